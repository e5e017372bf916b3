"""Names and layouts, written out, and both directions for every parameter of every variant."""

import numpy as np
import pytest

from jetmoe_jax.checkpoints.layout import layout_of, state_dict
from jetmoe_jax.checkpoints.names import from_tensors, tensor_names, to_tensors
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT

SIZES = dict(image_size=10, patch_size=5, width=6, depth=2, num_heads=3, num_classes=7)
MOE = dict(core_experts=3, universal_experts=5, slots_per_expert=2)
VARIANTS = {
    'token': {},
    'registers': dict(reg_tokens=4, no_embed_class=True, layer_scale=0.1),
    'no class token': dict(class_token=False, pool='avg'),
    'clip': dict(pre_norm=True, qk_norm=True),
    'features': dict(num_classes=0),
    'moe': dict(pool='avg', moe_blocks=(1,), moe=MOE),
    'moe with projections': dict(
        moe_blocks=(0, 1), moe=MOE | dict(projections=True, query_norm=False)
    ),
}


def random_params(model):
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=leaf.shape) for path, leaf in param_shapes(model).items()}


@pytest.mark.parametrize('variant', VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_comes_back_from_tensors_of_the_shapes_foretold(variant):
    model = ViT(**(SIZES | variant))
    params = random_params(model)
    tensors = state_dict(model, params)
    names = [name for path in params for name in tensor_names(path)]
    assert len(names) == len(set(names))
    assert set(names) == set(tensors)
    for path, value in params.items():
        foretold = layout_of(model).tensor_shapes(path, value.shape)
        assert foretold == {name: tensors[name].shape for name in tensor_names(path)}
        back = from_tensors(path, [tensors[name] for name in tensor_names(path)])
        np.testing.assert_array_equal(back, value, err_msg=path)


@pytest.mark.parametrize(
    'path, shape, names',
    [
        ('cls_token', (1, 1, 6), {'cls_token': (1, 1, 6)}),
        ('pos_embed', (1, 5, 6), {'pos_embed': (1, 5, 6)}),
        ('patch_embed/kernel', (75, 6), {'patch_embed.proj.weight': (6, 3, 5, 5)}),
        ('blocks_11/norm2/scale', (6,), {'blocks.11.norm2.weight': (6,)}),
        ('blocks_3/attn/qkv/kernel', (6, 18), {'blocks.3.attn.qkv.weight': (18, 6)}),
        ('blocks_3/attn/qkv/bias', (18,), {'blocks.3.attn.qkv.bias': (18,)}),
        ('blocks_0/attn/q_norm/scale', (2,), {'blocks.0.attn.q_norm.weight': (2,)}),
        ('blocks_0/ls1/gamma', (6,), {'blocks.0.ls1.gamma': (6,)}),
        ('blocks_0/mlp/fc1/kernel', (6, 24), {'blocks.0.mlp.fc1.weight': (24, 6)}),
        ('head/kernel', (6, 7), {'head.weight': (7, 6)}),
        ('blocks_1/moe/phi', (8, 2, 6), {'blocks.1.mlp.phi': (8, 2, 6)}),
        (
            'blocks_1/moe/temperature',
            (2,),
            {'blocks.1.mlp.scales.0': (), 'blocks.1.mlp.scales.1': ()},
        ),
        ('blocks_1/moe/query_norm/bias', (6,), {'blocks.1.mlp.slot_norm.bias': (6,)}),
        ('blocks_1/moe/key_projection/scale', (6,), {'blocks.1.mlp.phi_key_proj.gamma': (6,)}),
        ('blocks_1/moe/query_projection/bias', (6,), {'blocks.1.mlp.phi_query_proj.beta': (6,)}),
        (
            'blocks_1/moe/core_experts/mlp/fc1/kernel',
            (3, 6, 24),
            {'blocks.1.mlp.core_experts.vit_fc1.weight': (3, 24, 6)},
        ),
        (
            'blocks_1/moe/universal_experts/mlp/fc2/bias',
            (5, 6),
            {'blocks.1.mlp.univ_experts.vit_fc2.bias': (5, 6)},
        ),
    ],
)
def test_names_and_shapes_are_those_of_timm_and_moe_jetpack(path, shape, names):
    tensors = to_tensors(path, np.zeros(shape, np.float32))
    assert {name: np.shape(value) for name, value in tensors.items()} == names


def test_a_patch_kernel_has_rows_by_height_width_and_colour():
    kernel = np.arange(2 * 2 * 3 * 5).reshape(12, 5)
    tensor = to_tensors('patch_embed/kernel', kernel)['patch_embed.proj.weight']
    for channel, colour, y, x in [(0, 0, 0, 0), (4, 1, 0, 1), (2, 2, 1, 0), (3, 0, 1, 1)]:
        assert tensor[channel, colour, y, x] == kernel[(y * 2 + x) * 3 + colour, channel]


def test_linear_and_expert_weights_are_transposed_last_axes_only():
    kernel = np.arange(3 * 5 * 7).reshape(3, 5, 7)
    path = 'blocks_1/moe/core_experts/mlp/fc1/kernel'
    (tensor,) = to_tensors(path, kernel).values()
    assert tensor[2, 6, 1] == kernel[2, 1, 6]
    (tensor,) = to_tensors('head/kernel', kernel[0]).values()
    assert tensor[6, 1] == kernel[0, 1, 6]


def test_both_temperatures_keep_their_places():
    tensors = to_tensors('blocks_4/moe/temperature', np.array([0.25, 0.75]))
    assert tensors == {'blocks.4.mlp.scales.0': 0.25, 'blocks.4.mlp.scales.1': 0.75}
    np.testing.assert_array_equal(
        from_tensors('blocks_4/moe/temperature', [np.array(0.25), np.array(0.75)]), [0.25, 0.75]
    )


def test_tensors_of_a_state_dict_are_contiguous_and_scalars_stay_scalars():
    params = {'head/kernel': np.zeros((3, 5)), 'blocks_0/moe/temperature': np.ones(2)}
    tensors = state_dict(ViT(), params)
    assert all(value.flags.c_contiguous for value in tensors.values())
    assert tensors['head.weight'].shape == (5, 3)
    assert tensors['blocks.0.mlp.scales.0'].shape == ()


@pytest.mark.parametrize('path', ['blocks_0/mlp/fc3/kernel', 'blocks_0/mlp/fc1/weight'])
def test_a_path_of_no_model_has_no_name(path):
    with pytest.raises(KeyError):
        tensor_names(path)
