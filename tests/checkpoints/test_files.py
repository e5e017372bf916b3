"""Tests of reading and writing `.safetensors`, and of what all formats share."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jetmoe_jax.checkpoints.files import read_state_dict, write_state_dict
from jetmoe_jax.errors import UserError


@pytest.fixture
def tensors(reference):
    """A small ViT of three blocks and three heads, d=48, in timm's names."""
    arrays = reference('vit_token')
    return {k.removeprefix('state/'): v for k, v in arrays.items() if k.startswith('state/')}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_safetensors_give_back_what_was_written_in_its_dtype(tmp_path, tensors, dtype):
    tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    tensors['blocks.0.mlp.scales.0'] = np.array(1.5, dtype)
    write_state_dict(tmp_path / 'a.safetensors', tensors, {'num_heads': 3})

    state = read_state_dict(tmp_path / 'a.safetensors')

    assert_same(state.tensors, tensors)
    assert state.hints == {'num_heads': 3}
    assert state.left_out == {}
    assert state.path == str(tmp_path / 'a.safetensors')


def test_integers_booleans_and_empty_tensors_are_read(tmp_path):
    tensors = {'a': np.arange(3), 'b': np.array([True, False]), 'c': np.zeros((0, 3), np.float32)}
    save_file(tensors, tmp_path / 'a.safetensors')
    assert_same(read_state_dict(tmp_path / 'a.safetensors').tensors, tensors)


def test_a_type_without_a_numpy_equal_is_refused_by_name(tmp_path):
    save_file({'odd': np.zeros(3, np.complex64)}, tmp_path / 'a.safetensors')
    with pytest.raises(UserError, match='tensor odd is of type C64'):
        read_state_dict(tmp_path / 'a.safetensors')


@pytest.mark.parametrize('prefix', ['model.', 'module.', 'backbone.', 'module.model.encoder.'])
def test_a_common_prefix_is_stripped(tmp_path, tensors, prefix):
    save_file({prefix + k: v for k, v in tensors.items()}, tmp_path / 'a.safetensors')
    assert_same(read_state_dict(tmp_path / 'a.safetensors').tensors, tensors)


def test_a_head_beside_the_prefix_keeps_its_name(tmp_path, tensors):
    names = {k: k if k.startswith('head.') else 'backbone.' + k for k in tensors}
    save_file({names[k]: v for k, v in tensors.items()}, tmp_path / 'a.safetensors')
    assert_same(read_state_dict(tmp_path / 'a.safetensors').tensors, tensors)


def test_a_name_that_only_ends_like_a_patch_embedding_is_no_second_model(tmp_path, tensors):
    more = {'audio_patch_embed.proj.weight': np.zeros(3, np.float32)}
    save_file(tensors | more, tmp_path / 'a.safetensors')
    assert_same(read_state_dict(tmp_path / 'a.safetensors').tensors, tensors | more)


def test_two_models_in_a_file_are_refused(tmp_path, tensors):
    both = {prefix + k: v for prefix in ('student.', 'teacher.') for k, v in tensors.items()}
    save_file(both, tmp_path / 'a.safetensors')
    with pytest.raises(UserError, match="2 models, under the prefixes 'student.', 'teacher.'"):
        read_state_dict(tmp_path / 'a.safetensors')


def test_names_that_clash_without_the_prefix_are_refused(tmp_path, tensors):
    clash = {'model.' + k: v for k, v in tensors.items()} | {'head.bias': tensors['head.bias']}
    save_file(clash, tmp_path / 'a.safetensors')
    with pytest.raises(UserError, match='the same without the prefix'):
        read_state_dict(tmp_path / 'a.safetensors')


@pytest.mark.parametrize('suffix', ['.safetensors', '.npz', '.pth', '.pt', '.bin'])
def test_empty_and_wrong_files_of_every_ending_are_refused_by_name_and_size(tmp_path, suffix):
    empty, text = tmp_path / f'empty{suffix}', tmp_path / f'text{suffix}'
    empty.touch()
    text.write_bytes(b'version https://git-lfs.github.com/spec/v1\n' * 3)
    with pytest.raises(UserError, match=rf'empty\{suffix} is empty \(0 bytes\)'):
        read_state_dict(empty)
    with pytest.raises(UserError, match=rf'text\{suffix} \(129 bytes\) cannot be read as'):
        read_state_dict(text)


@pytest.mark.parametrize('keep', [5, 1000, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path, tensors, keep):
    write_state_dict(tmp_path / 'a.safetensors', tensors)
    data = (tmp_path / 'a.safetensors').read_bytes()
    (tmp_path / 'cut.safetensors').write_bytes(data[:keep])
    with pytest.raises(UserError, match=r'cut\.safetensors \([\d,]+ bytes\) .* cut off'):
        read_state_dict(tmp_path / 'cut.safetensors')


def test_missing_files_folders_unknown_endings_and_stray_revisions_are_refused(tmp_path, tensors):
    with pytest.raises(UserError, match='there is no checkpoint .*vit_x.pth'):
        read_state_dict(tmp_path / 'vit_x.pth')
    with pytest.raises(UserError, match='there is no checkpoint nothing'):
        read_state_dict('nothing')
    with pytest.raises(UserError, match='is a folder'):
        read_state_dict(tmp_path)
    (tmp_path / 'a.ckpt').write_text('?')
    with pytest.raises(UserError, match='unknown format; files ending in .safetensors, .npz'):
        read_state_dict(tmp_path / 'a.ckpt')
    write_state_dict(tmp_path / 'a.safetensors', tensors)
    with pytest.raises(UserError, match="not a name on the hub; revision='main'"):
        read_state_dict(tmp_path / 'a.safetensors', revision='main')


def test_a_write_that_replaces_the_file_being_read_leaves_the_tensors_alone(tmp_path, tensors):
    write_state_dict(tmp_path / 'a.safetensors', tensors)
    state = read_state_dict(tmp_path / 'a.safetensors')
    write_state_dict(tmp_path / 'a.safetensors', {k: 0 * v for k, v in tensors.items()})
    assert_same(state.tensors, tensors)


def test_safetensors_npz_and_hub_are_read_offline_without_pytorch(tmp_path, tensors):
    write_state_dict(tmp_path / 'a.safetensors', tensors)
    np.savez(tmp_path / 'a.npz', **{'embedding/kernel': np.zeros((8, 8, 3, 48))})
    snapshot = tmp_path / 'hub' / 'models--timm--vit_x' / 'snapshots' / ('0' * 40)
    write_state_dict(snapshot / 'model.safetensors', tensors)
    (snapshot.parents[1] / 'refs').mkdir()
    (snapshot.parents[1] / 'refs' / 'main').write_text(snapshot.name)
    code = """
import json, sys
from jetmoe_jax.checkpoints.files import read_state_dict
from jetmoe_jax.errors import UserError
counts = [len(read_state_dict(source).tensors) for source in ('a.safetensors', 'vit_x')]
try:
    read_state_dict('a.npz')
except UserError as error:
    counts.append(str(error))
print(json.dumps([counts, 'torch' in sys.modules]))
"""
    environment = os.environ | {
        'HF_HUB_CACHE': str(tmp_path / 'hub'),
        'HF_HUB_OFFLINE': '1',
        'PYTHONPATH': os.pathsep.join(sys.path),
    }
    output = subprocess.run(
        [sys.executable, '-c', code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (one, two, message), torch_imported = json.loads(output)
    assert one == two == len(tensors)
    assert 'heads' in message
    assert not torch_imported
