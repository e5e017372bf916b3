"""The optimiser: its schedule, its mask, its layer-wise rates, and AdamW itself by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.models.parameters import flatten, param_shapes, unflatten
from jetmoe_jax.models.registry import create_model
from jetmoe_jax.training.config import default_config
from jetmoe_jax.training.optimizer import decay_mask, layer_scale, make_optimizer, make_schedule


def test_schedule_warms_up_linearly_and_ends_at_a_hundredth():
    config = default_config().optimizer
    rate = make_schedule(config, steps=3000, steps_per_epoch=10)
    np.testing.assert_allclose(rate(0), 4e-6, rtol=1e-5)
    np.testing.assert_allclose(rate(100), (4e-3 + 4e-6) / 2, rtol=1e-5)
    np.testing.assert_allclose(rate(200), 4e-3, rtol=1e-5)
    np.testing.assert_allclose(rate(1600), (4e-3 + 4e-5) / 2, rtol=1e-5)
    np.testing.assert_allclose(rate(3000), 4e-5, rtol=1e-5)


def test_only_matrices_decay():
    shapes = param_shapes(create_model('vjetmoe_t', layer_scale=0.1, reg_tokens=2))
    decayed = {path for path, on in flatten(decay_mask(unflatten(shapes))).items() if on}
    assert {path.split('/')[-1] for path in decayed} == {'kernel', 'phi'}
    assert decayed == {path for path in shapes if path.endswith(('kernel', 'phi'))}


@pytest.mark.parametrize(
    'path, layer',
    [
        ('pos_embed', 0),
        ('patch_embed/kernel', 0),
        ('blocks_0/norm1/scale', 1),
        ('blocks_11/attn/qkv/kernel', 12),
        ('fc_norm/scale', 13),
        ('head/kernel', 13),
        ('blocks_6/moe/core_experts/mlp/fc1/kernel', 13),
        ('blocks_6/moe/phi', 13),
        ('blocks_6/moe/temperature', 13),
    ],
)
def test_rates_fall_by_the_layer_and_moe_layers_keep_the_full_one(path, layer):
    assert layer_scale(path, 0.6, [f'blocks_{i}' for i in range(12)]) == pytest.approx(
        0.6 ** (13 - layer)
    )


def test_a_step_is_clipped_adamw_with_decoupled_decay():
    config = default_config().optimizer
    optimizer = make_optimizer(config, lambda step: 0.01, blocks=['blocks_0', 'blocks_1'])
    params = {'blocks_0': {'attn': {'qkv': {'kernel': jnp.full((2,), 2.0)}}}}
    grads = {'blocks_0': {'attn': {'qkv': {'kernel': jnp.array([30.0, -40.0])}}}}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam's first step is the gradient's sign; decay adds 0.05 * 2; layer 1 of 3 has 0.6 ** 2.
    expected = -0.01 * 0.36 * (np.array([1.0, -1.0]) + 0.05 * 2.0)
    np.testing.assert_allclose(updates['blocks_0']['attn']['qkv']['kernel'], expected, rtol=1e-5)


def test_gradients_are_clipped_to_the_global_norm():
    config = default_config().optimizer
    config.eps = 1.0  # then the step shows the gradient's size: g / (|g| + 1)
    optimizer = make_optimizer(config, lambda step: 1.0, blocks=['blocks_0'])
    params = {'head': {'bias': jnp.zeros(2)}}
    grads = {'head': {'bias': jnp.array([30.0, -40.0])}}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates['head']['bias'], [-3 / 4, 4 / 5], rtol=1e-5)
