"""The model that names and shapes tell: real checkpoints, variants, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from jetmoe_jax.checkpoints.architecture import infer_model
from jetmoe_jax.checkpoints.layout import layout_of
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT

REFERENCE = Path(__file__).parents[2] / 'third_party' / 'reference'
CATALOGUE = json.loads((REFERENCE / 'timm_catalogue.json').read_text())
HEADS = {
    'vit_tiny_patch16_224.augreg_in21k': 3,
    'vit_small_patch16_224.augreg_in21k': 6,
    'vit_base_patch16_224.augreg_in21k': 12,
    'vit_small_patch14_dinov2.lvd142m': 6,
    'vit_small_patch14_reg4_dinov2.lvd142m': 6,
    'deit3_small_patch16_224.fb_in22k_ft_in1k': 6,
}


def empty(shapes):
    """Tensors of the given shapes that take no memory."""
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}


def tensors_of(model):
    """Tensors of a model's names and shapes."""
    shapes = {}
    for path, leaf in param_shapes(model).items():
        shapes |= layout_of(model).tensor_shapes(path, leaf.shape)
    return empty(shapes)


def shapes_of(tensors):
    return {name: list(value.shape) for name, value in tensors.items()}


@pytest.fixture(scope='module')
def small():
    """Tensors of a small ViT: d=12, patches of 4 in a grid of 3 x 3."""
    sizes = dict(image_size=12, patch_size=4, width=12, depth=2, num_heads=3, num_classes=5)
    return tensors_of(ViT(**sizes))


@pytest.mark.parametrize('name', HEADS)
def test_a_real_checkpoint_gives_a_model_of_its_names_shapes_and_count(name):
    entry = CATALOGUE[name]
    model = infer_model(empty(entry['state']), name)
    assert shapes_of(tensors_of(model)) == entry['state']
    assert sum(leaf.size for leaf in param_shapes(model).values()) == entry['params']
    assert model.image_shape == tuple(entry['cfg']['input_size'][1:])
    assert model.num_heads == HEADS[name]
    assert model.pool == 'token'
    assert model.no_embed_class == ('reg4' in name or 'deit3' in name)


@pytest.mark.parametrize('name', [name for name in CATALOGUE if name.startswith('convnext')])
def test_a_convnext_is_told_from_a_vit(name):
    model = infer_model(empty(CATALOGUE[name]['state']), name)
    assert isinstance(model, ConvNeXt)
    assert shapes_of(tensors_of(model)) == CATALOGUE[name]['state']


def test_the_released_vjetmoe_t_gives_a_model_of_its_names_shapes_and_count():
    released = json.loads((REFERENCE / 'moe_jetpack_vjetmoe_t_state.json').read_text())
    model = infer_model(empty(released['state']), 'released')
    assert shapes_of(tensors_of(model)) == released['state']
    assert model.moe_blocks == (6, 7, 8, 9, 10, 11)
    assert (model.moe['core_experts'], model.moe['universal_experts']) == (98, 196)
    assert model.pool == 'avg'


MOE = dict(
    core_experts=3,
    universal_experts=5,
    hidden_factor=0.75,
    universal_factor=0.5,
    slots_per_expert=2,
)


@pytest.mark.parametrize(
    'variant',
    [
        dict(reg_tokens=4),
        dict(reg_tokens=4, no_embed_class=True, image_size=20),
        dict(no_embed_class=True),
        dict(class_token=False, pool='avg'),
        dict(layer_scale=0.1),
        dict(qk_norm=True, num_heads=1),
        dict(pre_norm=True),
        dict(mlp_ratio=2.5),
        dict(num_classes=0),
        dict(patch_size=2, image_size=10),
        dict(pool='avg', moe_blocks=(1,), moe=MOE | dict(query_norm=False, projections=True)),
        dict(pool='avg', moe_blocks=(0, 2), moe=MOE | dict(query_norm=True, projections=False)),
    ],
    ids=str,
)
def test_a_variant_is_told_by_its_names_and_shapes(variant):
    model = ViT(**(dict(image_size=12, patch_size=4, width=12, depth=3, num_heads=1,
                        num_classes=5) | variant))  # fmt: skip
    found = infer_model(tensors_of(model), 'file', num_heads=1)
    for name in ViT.__dataclass_fields__:
        if name not in ('parent', 'name'):
            assert getattr(found, name) == getattr(model, name), name


@pytest.mark.parametrize('width, hidden', [(1152, 4304), (88, 240), (104, 504)])
def test_a_hidden_width_that_is_no_multiple_of_the_width_is_exact(width, hidden):
    # 1152 -> 4304 is SigLIP's; 240 / 88 * 88 and 504 / 104 * 104 lie below their whole number.
    shapes = {
        'patch_embed.proj.weight': (width, 3, 4, 4),
        'pos_embed': (1, 10, width),
        'cls_token': (1, 1, width),
        'blocks.0.attn.qkv.weight': (3 * width, width),
        'blocks.0.mlp.fc1.weight': (hidden, width),
    }
    assert infer_model(empty(shapes), 'file', num_heads=1).mlp_hidden == hidden


def test_a_universal_width_that_is_no_simple_fraction_is_exact():
    # 16 / 392 * 392 lies below 16.
    model = ViT(image_size=4, patch_size=4, width=98, depth=1, num_heads=1, pool='avg',
                moe_blocks=(0,), moe=dict(core_experts=1, universal_experts=1))  # fmt: skip
    tensors = dict(tensors_of(model))
    prefix = 'blocks.0.mlp.univ_experts.vit_fc'
    for hidden in range(1, 98):
        tensors |= empty(
            {prefix + '1.weight': (1, hidden, 98), prefix + '2.weight': (1, 98, hidden)}
        )
        found = infer_model(tensors, 'file', num_heads=1)
        assert found.moe_layer('blocks_0').path_widths(98)['universal_experts'] == (1, hidden)


@pytest.mark.parametrize('width, heads', [(64, 1), (192, 3), (1024, 16)])
def test_heads_are_64_wide_when_nothing_tells(width, heads):
    shapes = {
        'patch_embed.proj.weight': (width, 3, 4, 4),
        'pos_embed': (1, 9, width),
        'blocks.0.attn.qkv.weight': (3 * width, width),
        'blocks.0.mlp.fc1.weight': (4 * width, width),
    }
    assert infer_model(empty(shapes), 'file').num_heads == heads


def test_a_width_that_is_no_multiple_of_64_needs_the_heads(small):
    with pytest.raises(UserError, match='file is 12 channels wide.*give --num_heads'):
        infer_model(small, 'file')


def test_heads_are_told_by_the_width_of_a_normalised_query():
    model = ViT(image_size=8, patch_size=4, width=12, depth=1, num_heads=3, qk_norm=True)
    assert infer_model(tensors_of(model), 'file').num_heads == 3


def test_what_the_caller_gives_wins_over_what_the_shapes_tell(small):
    found = infer_model(small, 'file', num_heads=4, image_size=20)
    assert (found.num_heads, found.image_size, found.width) == (4, 20, 12)


def test_an_attribute_that_no_model_has_is_refused_with_the_nearest(small):
    with pytest.raises(UserError, match="'num_head' does not exist; the nearest .* 'num_heads'"):
        infer_model(small, 'file', num_head=3)


def test_a_given_convention_of_the_position_embedding_decides_the_grid():
    # 9 rows: a grid of 2 x 2 behind five prefix tokens, or of 3 x 3 without rows for them.
    model = ViT(image_size=8, patch_size=4, width=12, depth=1, num_heads=1, reg_tokens=4)
    tensors = tensors_of(model)
    assert tensors['pos_embed'].shape == (1, 9, 12)
    assert infer_model(tensors, 'file', num_heads=1).image_size == 8
    given = dict(num_heads=1, no_embed_class=True)
    assert infer_model(tensors, 'file', **given).image_size == 12


def test_a_given_combine_function_is_merged_into_the_layers_arguments():
    model = ViT(image_size=8, patch_size=4, width=12, depth=1, num_heads=1, moe_blocks=(0,),
                moe=dict(core_experts=3, universal_experts=5))  # fmt: skip
    found = infer_model(tensors_of(model), 'file', num_heads=1, moe={'combine': 'softmax'})
    assert found.moe['combine'] == 'softmax'
    assert (found.moe['core_experts'], found.moe['universal_experts']) == (3, 5)


def test_a_grid_that_is_not_square_needs_the_image_size(small):
    tensors = small | empty({'pos_embed': (1, 7, 12)})
    with pytest.raises(UserError, match='file: pos_embed has 7 rows.*give the image_size'):
        infer_model(tensors, 'file', num_heads=1)
    found = infer_model(tensors, 'file', num_heads=1, image_size=(8, 12))
    assert found.image_shape == (8, 12)
    assert not found.no_embed_class


@pytest.mark.parametrize(
    'name, what',
    [
        ('dist_token', 'a distillation token'),
        ('head_dist.weight', 'a distillation token'),
        ('blocks.0.attn.relative_position_bias_table', 'a relative position bias'),
        ('rel_pos_bias.relative_position_bias_table', 'a relative position bias'),
        ('blocks.0.gamma_1', "BEiT's layer scale"),
        ('layers.0.blocks.0.attn.qkv.weight', 'window attention'),
        ('blocks.0.mlp.w12.weight', 'a gated MLP'),
        ('blocks.0.mlp.fc1_g.weight', 'a gated MLP'),
        ('blocks.0.attn.q_bias', 'separate query, key and value weights'),
    ],
)
def test_an_unsupported_variant_is_refused_by_the_tensor_that_tells_it(small, name, what):
    with pytest.raises(UserError) as error:
        infer_model(small | empty({name: (3,)}), 'some.file')
    message = str(error.value)
    assert message.startswith(f'some.file has {what}')
    assert f'(tensor {name})' in message and 'not supported' in message


@pytest.mark.parametrize(
    'missing', ['patch_embed.proj.weight', 'pos_embed', 'blocks.0.attn.qkv.weight']
)
def test_a_file_without_a_vits_tensors_is_refused_by_the_one_that_is_missing(small, missing):
    tensors = {name: value for name, value in small.items() if name != missing}
    with pytest.raises(UserError, match=f'file is not a ViT in timm names.*{missing}'):
        infer_model(tensors, 'file')


def test_another_family_of_model_is_refused_by_its_first_tensor():
    tensors = empty({'conv1.weight': (64, 3, 7, 7), 'layer1.0.conv1.weight': (64, 64, 1, 1)})
    with pytest.raises(UserError, match='resnet.bin is not a ViT.*its first is conv1.weight'):
        infer_model(tensors, 'resnet.bin')
    with pytest.raises(UserError, match='nothing.bin is not a ViT.*its first is absent'):
        infer_model({}, 'nothing.bin')


def test_a_vit_without_an_mlp_in_its_first_block_is_refused(small):
    tensors = {name: value for name, value in small.items() if '.mlp.' not in name}
    with pytest.raises(UserError, match=r'file has no tensor blocks\.0\.mlp\.fc1\.weight'):
        infer_model(tensors, 'file')
