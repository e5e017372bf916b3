"""Tests of PyTorch pickles; those that need PyTorch itself are skipped without it."""

import io
import os
import pickle
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

from jetmoe_jax.checkpoints.files import read_state_dict
from jetmoe_jax.errors import UserError


@pytest.fixture
def torch():
    return pytest.importorskip('torch')


@pytest.fixture
def tensors(reference):
    arrays = reference('vit_token')
    return {k.removeprefix('state/'): v for k, v in arrays.items() if k.startswith('state/')}


@pytest.fixture
def torch_tensors(torch, tensors):
    return {name: torch.from_numpy(value) for name, value in tensors.items()}


class MakesFile:
    """Unpickled without care, it makes a file of its path."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_zip(path, content):
    """A `.pth` archive by hand, of a pickle without tensors."""
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', pickle.dumps(content, protocol=2))
        archive.writestr('archive/byteorder', 'little')
        archive.writestr('archive/version', '3\n')


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize('suffix', ['.pth', '.pt', '.bin'])
@pytest.mark.parametrize('zipped', [True, False], ids=['zip', 'bare pickle'])
def test_a_plain_state_dict_gives_its_tensors(
    torch, tmp_path, tensors, torch_tensors, suffix, zipped
):
    path = tmp_path / f'vit{suffix}'
    torch.save(torch_tensors, path, _use_new_zipfile_serialization=zipped)
    state = read_state_dict(path)
    assert_same(state.tensors, tensors)
    assert state.left_out == {}


@pytest.mark.parametrize('key', ['state_dict', 'model', 'model_ema'])
def test_a_nested_state_dict_with_a_prefix_is_found_and_the_rest_is_named(
    torch, tmp_path, tensors, torch_tensors, key
):
    inner = {f'module.{name}': value for name, value in torch_tensors.items()}
    content = {key: inner, 'epoch': 3, 'optimizer': {'state': {0: torch.zeros(3)}}}
    torch.save(content, tmp_path / 'vit.pth')
    state = read_state_dict(tmp_path / 'vit.pth')
    assert_same(state.tensors, tensors)
    why = f'stands beside {key!r}, which is read'
    assert state.left_out == {'epoch': why, 'optimizer': why}


def test_the_trained_weights_win_over_their_average(torch, tmp_path, torch_tensors):
    average = {name: 0 * value for name, value in torch_tensors.items()}
    torch.save({'model_ema': average, 'model': torch_tensors}, tmp_path / 'vit.pth')
    state = read_state_dict(tmp_path / 'vit.pth')
    assert state.tensors['head.weight'].any()
    assert set(state.left_out) == {'model_ema'}


def test_dtypes_parameters_transposed_tensors_and_other_entries(torch, tmp_path):
    values = torch.arange(15.0).reshape(3, 5)
    content = {
        'half': values.half(),
        'bfloat16': values.bfloat16().T,
        'parameter': torch.nn.Parameter(values),
        'count': torch.tensor(7),
        'note': 'text',
    }
    torch.save(content, tmp_path / 'vit.pth')
    state = read_state_dict(tmp_path / 'vit.pth')
    array = np.arange(15.0).reshape(3, 5)
    assert_same(
        state.tensors,
        {
            'half': array.astype(np.float16),
            'bfloat16': array.T.astype(ml_dtypes.bfloat16),
            'parameter': array.astype(np.float32),
            'count': np.array(7),
        },
    )
    assert state.left_out == {'note': 'not a tensor (str)'}


def test_a_sparse_tensor_is_refused_by_name(torch, tmp_path):
    torch.save({'odd': torch.eye(3).to_sparse()}, tmp_path / 'vit.pth')
    with pytest.raises(UserError, match='tensor odd is of a kind'):
        read_state_dict(tmp_path / 'vit.pth')


def test_transformers_names_in_a_bin_are_translated(torch, tmp_path):
    names = ['embeddings.patch_embeddings.projection.weight', 'encoder.layer.0.norm1.bias']
    torch.save({f'dinov2.{name}': torch.ones(6, 3, 2, 2) for name in names}, tmp_path / 'a.bin')
    state = read_state_dict(tmp_path / 'a.bin')
    assert set(state.tensors) == {'patch_embed.proj.weight', 'blocks.0.norm1.bias'}


@pytest.mark.parametrize('zipped', [True, False], ids=['zip', 'bare pickle'])
def test_a_pickle_that_would_run_code_is_refused_and_nothing_in_it_runs(torch, tmp_path, zipped):
    path, victim = tmp_path / 'bad.pth', tmp_path / 'made'
    content = {'state_dict': {'head.bias': MakesFile(victim)}}
    if zipped:
        write_zip(path, content)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=False)
    with pytest.raises(
        UserError, match=r'bad\.pth is refused: it is a pickle that needs \w+\.mkdir'
    ) as e:
        read_state_dict(path)
    assert not victim.exists()
    assert 'weights_only' not in str(e.value)


def test_a_whole_model_is_refused(torch, tmp_path):
    torch.save(torch.nn.Linear(3, 5), tmp_path / 'model.pth')
    with pytest.raises(UserError, match='needs torch.nn.modules.linear.Linear'):
        read_state_dict(tmp_path / 'model.pth')


def test_a_file_without_tensors_is_refused(torch, tmp_path):
    write_zip(tmp_path / 'a.pth', {'epoch': 3})
    with pytest.raises(
        UserError, match=r"no tensors by name, but a dict with the entries \['epoch'\]"
    ):
        read_state_dict(tmp_path / 'a.pth')
    torch.save([torch.zeros(3)], tmp_path / 'b.pth')
    with pytest.raises(UserError, match='no tensors by name, but a list'):
        read_state_dict(tmp_path / 'b.pth')


@pytest.mark.parametrize('zipped', [True, False], ids=['zip', 'bare pickle'])
@pytest.mark.parametrize('part', [0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(torch, tmp_path, torch_tensors, zipped, part):
    data = io.BytesIO()
    torch.save(torch_tensors, data, _use_new_zipfile_serialization=zipped)
    (tmp_path / 'cut.pth').write_bytes(data.getvalue()[: int(part * len(data.getvalue()))])
    with pytest.raises(
        UserError, match=r'cut\.pth \([\d,]+ bytes\) cannot be read as a PyTorch file'
    ):
        read_state_dict(tmp_path / 'cut.pth')


def test_an_archive_of_something_else_is_refused(torch, tmp_path):
    np.savez(tmp_path / 'a.npz', a=np.zeros(3))
    (tmp_path / 'a.npz').rename(tmp_path / 'a.pth')
    with pytest.raises(
        UserError, match=r'a\.pth \([\d,]+ bytes\) cannot be read as a PyTorch file'
    ):
        read_state_dict(tmp_path / 'a.pth')


def test_a_cut_off_archive_is_refused_before_pytorch_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    (tmp_path / 'cut.pth').write_bytes(b'PK\x03\x04' + bytes(50))
    with pytest.raises(UserError, match=r'cut\.pth \(54 bytes\) .* the archive has no end'):
        read_state_dict(tmp_path / 'cut.pth')


def test_without_pytorch_the_extra_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    write_zip(tmp_path / 'a.pth', {})
    with pytest.raises(UserError, match=r"a\.pth needs PyTorch.*pip install 'jetmoe_jax\[torch\]'"):
        read_state_dict(tmp_path / 'a.pth')
