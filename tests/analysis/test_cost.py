"""The cost model against counts of the traced and the compiled model."""

import math

import jax
import jax.numpy as jnp
import pytest

from jetmoe_jax.analysis.cost import model_cost
from jetmoe_jax.models.parameters import param_shapes, unflatten
from jetmoe_jax.models.registry import create_model
from jetmoe_jax.models.vit import ViT

SIZES = dict(image_size=12, patch_size=4, width=12, depth=3, num_heads=3, num_classes=7)
MOE = dict(core_experts=3, universal_experts=5, universal_factor=0.5, slots_per_expert=2)


def arguments(model):
    params = {'params': unflatten(param_shapes(model))}
    return params, jax.ShapeDtypeStruct((1, *model.image_shape, 3), jnp.float32)


def traced_multiply_adds(model):
    """Multiply-adds of every matrix product in the traced model."""
    return _count(jax.make_jaxpr(model.apply)(*arguments(model)).jaxpr)


def _count(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == 'dot_general':
            (contracted, _), _ = eqn.params['dimension_numbers']
            sizes = eqn.invars[0].aval.shape
            total += eqn.outvars[0].aval.size * math.prod(sizes[i] for i in contracted)
        inner = [value.jaxpr for value in eqn.params.values() if hasattr(value, 'jaxpr')]
        total += sum(map(_count, inner))
    return total


@pytest.mark.parametrize(
    'model',
    [
        ViT(**SIZES),
        ViT(**SIZES, class_token=False, pool='avg', mlp_ratio=2.5),
        ViT(**SIZES | dict(image_size=(8, 20), num_classes=0), reg_tokens=4, qk_norm=True),
        ViT(**SIZES, pool='avg', moe_blocks=(0, 2), moe=MOE),
        ViT(**SIZES, moe_blocks=(1,), moe=MOE | dict(universal_experts=0)),
    ],
    ids=['token', 'avg', 'registers', 'moe', 'core experts only'],
)
def test_every_product_of_the_traced_model_is_counted_once(model):
    assert model_cost(model).multiply_adds == traced_multiply_adds(model)


def test_a_small_vit_costs_what_is_added_up_by_hand():
    # 2 x 2 patches of 4 px and a class token: n = 5 tokens, d = 6 channels, h = 24, k = 7.
    model = ViT(image_size=8, patch_size=4, width=6, depth=2, num_heads=2, num_classes=7)
    patches = 4 * (4 * 4 * 3) * 6
    attention = 5 * 6 * 18 + 5 * 5 * 6 + 5 * 5 * 6 + 5 * 6 * 6
    mlp = 5 * 6 * 24 + 5 * 24 * 6
    assert model_cost(model).multiply_adds == patches + 2 * (attention + mlp) + 6 * 7


def test_vit_t_and_vjetmoe_t_cost_about_the_same():
    dense, moe = (model_cost(create_model(n)) for n in ('vit_tiny_patch16_224', 'vjetmoe_t'))
    # timm's 1.08 G leave out the products of attention, fvcore's 1.26 G have them and the norms.
    assert 1.08e9 < dense.multiply_adds <= 1.26e9
    assert moe.multiply_adds == pytest.approx(dense.multiply_adds, rel=0.15)
    assert dense.parameters == 5_717_416  # timm's vit_tiny_patch16_224 with 1,000 classes
    assert moe.parameters == 265_411_636


@pytest.mark.parametrize(
    'name, giga', [('convnext_atto', 0.55), ('convnext_femto', 0.79), ('convnext_tiny', 4.47)]
)
def test_convnexts_cost_what_timm_publishes(name, giga):
    # Published with the norms, which are left out here.
    assert model_cost(create_model(name)).multiply_adds == pytest.approx(giga * 1e9, rel=0.015)


@pytest.mark.parametrize(
    'moe', [{}, dict(moe_blocks=(1,), moe=dict(core_experts=32, universal_experts=64))]
)
def test_the_compiler_counts_two_operations_for_each_multiply_add(moe):
    model = ViT(image_size=64, patch_size=8, width=192, depth=2, num_heads=3, **moe)
    analysis = jax.jit(model.apply).lower(*arguments(model)).compile().cost_analysis()
    # It counts norms, softmaxes, entmax and GELUs besides: 6% in so small a model.
    count = model_cost(model).multiply_adds
    assert count < analysis['flops'] / 2 < 1.07 * count


def test_a_cost_is_told_in_one_line():
    text = str(model_cost(create_model('vit_tiny_patch16_224')))
    assert text == '5,717,416 parameters, 1.25 G multiply-adds'
