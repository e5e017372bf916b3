"""Tests of Google's `.npz` checkpoints, in both spellings, against the same ViT in timm's names."""

import ml_dtypes
import numpy as np
import pytest

from jetmoe_jax.checkpoints.files import read_state_dict
from jetmoe_jax.errors import UserError

HEADS = 3


@pytest.fixture
def tensors(reference):
    arrays = reference('vit_token')
    return {k.removeprefix('state/'): v for k, v in arrays.items() if k.startswith('state/')}


def google_arrays(tensors, norm2='LayerNorm_2', mlp='MlpBlock_3', attention=1):
    """A timm ViT as vision_transformer names and lays it out; its own few lines, for the tests."""
    d = tensors['cls_token'].shape[-1]
    arrays = {
        'cls': tensors['cls_token'],
        'embedding/kernel': np.einsum('oihw->hwio', tensors['patch_embed.proj.weight']),
        'embedding/bias': tensors['patch_embed.proj.bias'],
        'Transformer/posembed_input/pos_embedding': tensors['pos_embed'],
        'Transformer/encoder_norm/scale': tensors['norm.weight'],
        'Transformer/encoder_norm/bias': tensors['norm.bias'],
        'head/kernel': tensors['head.weight'].T,
        'head/bias': tensors['head.bias'],
    }
    for i in range(3):
        ours, theirs = f'blocks.{i}.', f'Transformer/encoderblock_{i}/'
        for norm, name in (('norm1', 'LayerNorm_0'), ('norm2', norm2)):
            arrays[f'{theirs}{name}/scale'] = tensors[f'{ours}{norm}.weight']
            arrays[f'{theirs}{name}/bias'] = tensors[f'{ours}{norm}.bias']
        for dense in (0, 1):
            arrays[f'{theirs}{mlp}/Dense_{dense}/kernel'] = tensors[
                f'{ours}mlp.fc{dense + 1}.weight'
            ].T
            arrays[f'{theirs}{mlp}/Dense_{dense}/bias'] = tensors[f'{ours}mlp.fc{dense + 1}.bias']
        mha = f'{theirs}MultiHeadDotProductAttention_{attention}/'
        # (3, heads, head width, d): what timm's qkv.reshape(3, heads, -1) makes of the rows.
        weights = tensors[f'{ours}attn.qkv.weight'].reshape(3, HEADS, d // HEADS, d)
        biases = tensors[f'{ours}attn.qkv.bias'].reshape(3, HEADS, d // HEADS)
        for name, weight, bias in zip(('query', 'key', 'value'), weights, biases, strict=True):
            arrays[f'{mha}{name}/kernel'] = np.einsum('hcd->dhc', weight)
            arrays[f'{mha}{name}/bias'] = bias
        proj = tensors[f'{ours}attn.proj.weight'].reshape(d, HEADS, d // HEADS)
        arrays[f'{mha}out/kernel'] = np.einsum('dhc->hcd', proj)
        arrays[f'{mha}out/bias'] = tensors[f'{ours}attn.proj.bias']
    return arrays


def big_vision_arrays(tensors):
    arrays = google_arrays(tensors, norm2='LayerNorm_1', mlp='MlpBlock_0', attention=0)
    arrays['pos_embedding'] = arrays.pop('Transformer/posembed_input/pos_embedding')
    return arrays


def scanned(arrays):
    """The blocks stacked in front, as big_vision's `scan=True` keeps them."""
    start = 'Transformer/encoderblock_'
    rest = {k: v for k, v in arrays.items() if not k.startswith(start)}
    inner = [k.removeprefix(start + '0/') for k in arrays if k.startswith(start + '0/')]
    stacked = {k: np.stack([arrays[f'{start}{i}/{k}'] for i in range(3)]) for k in inner}
    return rest | {f'Transformer/encoderblock/{k}': v for k, v in stacked.items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize(
    'spelling',
    [google_arrays, big_vision_arrays, lambda tensors: scanned(big_vision_arrays(tensors))],
    ids=['vision_transformer', 'big_vision', 'big_vision scanned'],
)
@pytest.mark.parametrize('prefix', ['', 'params/', 'opt/target/'])
def test_every_spelling_gives_timms_tensors_the_heads_and_the_preprocessing(
    tmp_path, tensors, spelling, prefix
):
    arrays = {prefix + name: value for name, value in spelling(tensors).items()}
    np.savez(tmp_path / 'vit.npz', **arrays)

    state = read_state_dict(tmp_path / 'vit.npz')

    assert_same(state.tensors, tensors)
    assert state.hints == dict(num_heads=HEADS, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert state.left_out == {}


def test_the_order_of_blocks_does_not_depend_on_the_order_in_the_file(tmp_path, tensors):
    np.savez(tmp_path / 'vit.npz', **dict(reversed(google_arrays(tensors).items())))
    assert_same(read_state_dict(tmp_path / 'vit.npz').tensors, tensors)


@pytest.mark.parametrize('prefix', ['', 'params/'])
def test_the_optimiser_is_left_out_by_name(tmp_path, tensors, prefix):
    arrays = {prefix + k: v for k, v in big_vision_arrays(tensors).items()}
    arrays |= {'opt/0/mu/head/bias': np.zeros(10), 'opt/0/count': np.zeros(())}
    np.savez(tmp_path / 'vit.npz', **arrays)
    state = read_state_dict(tmp_path / 'vit.npz')
    assert_same(state.tensors, tensors)
    assert set(state.left_out) == {'opt/0/mu/head/bias', 'opt/0/count'}


def test_pre_logits_and_the_head_that_reads_it_are_left_out(tmp_path, tensors):
    arrays = google_arrays(tensors)
    arrays |= {'pre_logits/kernel': np.eye(48), 'pre_logits/bias': np.zeros(48)}
    np.savez(tmp_path / 'vit.npz', **arrays)
    state = read_state_dict(tmp_path / 'vit.npz')
    assert_same(state.tensors, {k: v for k, v in tensors.items() if not k.startswith('head.')})
    names = {f'{module}/{leaf}' for module in ('pre_logits', 'head') for leaf in ('kernel', 'bias')}
    assert set(state.left_out) == names
    assert 'pre_logits' in state.left_out['head/kernel']


def test_bfloat16_which_numpy_writes_as_bare_bytes_is_recognised(tmp_path, tensors):
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    np.savez(tmp_path / 'vit.npz', **google_arrays(half))
    assert_same(read_state_dict(tmp_path / 'vit.npz').tensors, half)


@pytest.mark.parametrize(
    'name', ['MAPHead_0/probe', 'Transformer/encoderblock_0/Moe/Mlp/wi/kernel']
)
def test_an_array_of_another_model_is_refused_by_name(tmp_path, tensors, name):
    np.savez(tmp_path / 'vit.npz', **google_arrays(tensors), **{name: np.zeros((1, 1, 48))})
    with pytest.raises(UserError, match=f'{name} .* no plain ViT has'):
        read_state_dict(tmp_path / 'vit.npz')


def test_damaged_and_foreign_archives_are_refused(tmp_path, tensors):
    np.savez(tmp_path / 'vit.npz', **google_arrays(tensors))
    data = (tmp_path / 'vit.npz').read_bytes()
    (tmp_path / 'cut.npz').write_bytes(data[:-300])
    middle = len(data) // 2
    (tmp_path / 'bad.npz').write_bytes(data[:middle] + bytes(64) + data[middle + 64 :])
    np.savez(tmp_path / 'other.npz', weights=np.zeros(3))
    np.savez(tmp_path / 'pickle.npz', **{'embedding/kernel': np.array([{}], object)})
    with pytest.raises(UserError, match=r'cut\.npz \([\d,]+ bytes\) .* whole zip archive'):
        read_state_dict(tmp_path / 'cut.npz')
    with pytest.raises(UserError, match=r'bad\.npz \([\d,]+ bytes\) cannot be read'):
        read_state_dict(tmp_path / 'bad.npz')
    with pytest.raises(UserError, match='not one of Google.s .*its first is weights'):
        read_state_dict(tmp_path / 'other.npz')
    with pytest.raises(UserError, match='Object arrays cannot be loaded'):
        read_state_dict(tmp_path / 'pickle.npz')


def test_attention_kernels_without_a_head_axis_and_missing_keys_are_refused(tmp_path, tensors):
    arrays = google_arrays(tensors)
    query = 'Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel'
    np.savez(tmp_path / 'flat.npz', **arrays | {query: np.zeros((48, 48))})
    with pytest.raises(UserError, match=r'query/kernel has shape \(48, 48\)'):
        read_state_dict(tmp_path / 'flat.npz')
    del arrays[query.replace('query', 'key')]
    np.savez(tmp_path / 'missing.npz', **arrays)
    with pytest.raises(UserError, match=r'no blocks\.1\.attn\.k\.weight'):
        read_state_dict(tmp_path / 'missing.npz')
