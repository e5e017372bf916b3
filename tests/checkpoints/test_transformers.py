"""Tests of transformers' names for ViT and DINOv2, in both spellings, and of DINOv2's own."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jetmoe_jax.checkpoints.files import read_state_dict
from jetmoe_jax.errors import UserError

# timm's name of a module -> its name up to release 4 and from release 5 on.
VIT = {
    'patch_embed.proj': ['embeddings.patch_embeddings.projection'] * 2,
    'norm': ['layernorm'] * 2,
}
VIT_BLOCK = {
    'norm1': ['layernorm_before'] * 2,
    'norm2': ['layernorm_after'] * 2,
    'attn.q': ['attention.attention.query', 'attention.q_proj'],
    'attn.k': ['attention.attention.key', 'attention.k_proj'],
    'attn.v': ['attention.attention.value', 'attention.v_proj'],
    'attn.proj': ['attention.output.dense', 'attention.o_proj'],
    'mlp.fc1': ['intermediate.dense', 'mlp.fc1'],
    'mlp.fc2': ['output.dense', 'mlp.fc2'],
}
DINOV2_BLOCK = VIT_BLOCK | {k: [k] * 2 for k in ('norm1', 'norm2', 'mlp.fc1', 'mlp.fc2')}


@pytest.fixture
def tensors(reference):
    arrays = reference('vit_token')
    return {k.removeprefix('state/'): v for k, v in arrays.items() if k.startswith('state/')}


@pytest.fixture
def dinov2(tensors):
    """The same ViT with layer scales and no head, as timm has DINOv2."""
    rng = np.random.default_rng(0)
    scales = {
        f'blocks.{i}.ls{j}.gamma': rng.normal(size=48).astype(np.float32)
        for i in range(3)
        for j in (1, 2)
    }
    return {k: v for k, v in tensors.items() if not k.startswith('head.')} | scales


def in_transformers_names(tensors, release, prefix, block_names=VIT_BLOCK, layers='encoder.layer'):
    """timm's tensors renamed, with qkv cut into three; its own few lines, for the tests."""
    cut = dict(tensors)
    for i in range(3):
        for leaf in ('weight', 'bias'):
            parts = np.split(cut.pop(f'blocks.{i}.attn.qkv.{leaf}'), 3)
            cut |= {f'blocks.{i}.attn.{x}.{leaf}': p for x, p in zip('qkv', parts, strict=True)}
    renamed = {}
    for name, value in cut.items():
        if name.startswith('head.'):
            renamed[name.replace('head.', 'classifier.')] = value
            continue
        module, _, leaf = name.rpartition('.')
        if name.startswith('blocks.'):
            _, i, inner = module.split('.', 2)
            if inner.startswith('ls'):
                new = f'{layers}.{i}.layer_scale{inner[-1]}.lambda1'
            else:
                new = f'{layers}.{i}.{block_names[inner][release]}.{leaf}'
        elif module:
            new = f'{VIT[module][release]}.{leaf}'
        else:
            new = {
                'cls_token': 'embeddings.cls_token',
                'pos_embed': 'embeddings.position_embeddings',
            }[name]
        renamed[prefix + new] = value
    return {name: np.ascontiguousarray(value) for name, value in renamed.items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize(
    ('release', 'layers'), [(0, 'encoder.layer'), (1, 'layers')], ids=['release 4', 'release 5']
)
@pytest.mark.parametrize('prefix', ['', 'vit.', 'module.vit.'])
def test_vit_gives_timms_tensors(tmp_path, tensors, release, layers, prefix):
    renamed = in_transformers_names(tensors, release, prefix, layers=layers)
    save_file(renamed, tmp_path / 'vit.safetensors')

    state = read_state_dict(tmp_path / 'vit.safetensors')

    assert_same(state.tensors, tensors)
    assert state.hints == dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert state.left_out == {}


@pytest.mark.parametrize('release', [0, 1], ids=['release 4', 'release 5'])
@pytest.mark.parametrize('prefix', ['', 'dinov2.'])
def test_dinov2_gives_timms_tensors(tmp_path, dinov2, release, prefix):
    renamed = in_transformers_names(dinov2, release, prefix, DINOV2_BLOCK)
    renamed[f'{prefix}embeddings.mask_token'] = np.zeros((1, 48), np.float32)
    save_file(renamed, tmp_path / 'dinov2.safetensors')

    state = read_state_dict(tmp_path / 'dinov2.safetensors')

    assert_same(state.tensors, dinov2)
    assert state.hints == {}
    assert state.left_out == {'mask_token': 'the mask token is only used in pre-training'}


@pytest.mark.parametrize('own_names', [True, False], ids=["DINOv2's names", "transformers' names"])
def test_registers_take_the_class_tokens_position_into_the_class_token(tmp_path, dinov2, own_names):
    registers = np.random.default_rng(1).normal(size=(1, 4, 48)).astype(np.float32)
    if own_names:
        renamed = dinov2 | {'register_tokens': registers, 'mask_token': np.zeros((1, 48))}
    else:
        renamed = in_transformers_names(dinov2, 0, 'dinov2_with_registers.', DINOV2_BLOCK)
        renamed['dinov2_with_registers.embeddings.register_tokens'] = registers
        renamed['dinov2_with_registers.embeddings.mask_token'] = np.zeros((1, 48))
    save_file(renamed, tmp_path / 'dinov2.safetensors')

    state = read_state_dict(tmp_path / 'dinov2.safetensors')

    expected = dinov2 | {
        'reg_token': registers,
        'cls_token': dinov2['cls_token'] + dinov2['pos_embed'][:, 0],
        'pos_embed': dinov2['pos_embed'][:, 1:],
    }
    assert_same(state.tensors, expected)
    assert set(state.left_out) == {'mask_token'}


def test_pooler_and_a_classifier_over_two_features_are_left_out_with_the_reason(tmp_path, dinov2):
    renamed = in_transformers_names(dinov2, 0, 'dinov2.', DINOV2_BLOCK)
    renamed['dinov2.pooler.dense.weight'] = np.zeros((48, 48))
    renamed |= {'classifier.weight': np.zeros((10, 96)), 'classifier.bias': np.zeros(10)}
    save_file(renamed, tmp_path / 'dinov2.safetensors')
    state = read_state_dict(tmp_path / 'dinov2.safetensors')
    assert_same(state.tensors, dinov2)
    assert set(state.left_out) == {'pooler.dense.weight', 'classifier.weight', 'classifier.bias'}
    assert 'side by side' in state.left_out['classifier.weight']


def test_unknown_tensors_keep_their_names_so_that_loading_refuses_them(tmp_path, tensors):
    renamed = in_transformers_names(tensors, 0, 'vit.')
    odd = 'encoder.layer.0.attention.attention.relative_position_bias.table'
    renamed[f'vit.{odd}'] = np.zeros(3, np.float32)
    renamed['vit.embeddings.distillation_token'] = np.zeros((1, 1, 48), np.float32)
    save_file(renamed, tmp_path / 'vit.safetensors')
    state = read_state_dict(tmp_path / 'vit.safetensors')
    assert state.tensors.keys() == tensors.keys() | {odd, 'dist_token'}


def test_a_query_without_its_value_is_refused(tmp_path, tensors):
    renamed = in_transformers_names(tensors, 0, '')
    del renamed['encoder.layer.2.attention.attention.value.weight']
    save_file(renamed, tmp_path / 'vit.safetensors')
    with pytest.raises(UserError, match=r'no blocks\.2\.attn\.v\.weight'):
        read_state_dict(tmp_path / 'vit.safetensors')


def test_configurations_beside_the_weights_give_heads_and_preprocessing(tmp_path, tensors):
    save_file(in_transformers_names(tensors, 0, 'vit.'), tmp_path / 'model.safetensors')
    config = {'model_type': 'vit', 'num_attention_heads': 3, 'hidden_act': 'gelu'}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    processor = {'image_mean': [0.1, 0.2, 0.3], 'image_std': [1.0, 1.0, 1.0]}
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(processor))

    state = read_state_dict(tmp_path / 'model.safetensors')

    assert state.hints == dict(num_heads=3, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))

    (tmp_path / 'config.json').write_text(json.dumps(config | {'hidden_act': 'quick_gelu'}))
    with pytest.raises(UserError, match="activation 'quick_gelu'"):
        read_state_dict(tmp_path / 'model.safetensors')
