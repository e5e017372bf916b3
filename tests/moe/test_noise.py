"""Noise from 16 bits a value: its distribution, its independence, and how it is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetmoe_jax.moe.noise import Dropout, normal, random_16_bits


@pytest.fixture(scope='module')
def bits():
    return np.asarray(jax.jit(random_16_bits, static_argnums=1)(jax.random.key(0), (64, 1022)))


def test_every_bit_is_set_half_of_the_time(bits):
    assert bits.shape == (64, 1022) and bits.max() < 2**16
    share = (bits[..., None] >> np.arange(16) & 1).mean(axis=(0, 1))
    np.testing.assert_allclose(share, 0.5, atol=5 * 0.5 / np.sqrt(bits.size))


def test_values_of_one_block_are_independent(bits):
    """Four values, 256 apart, share a block of random bits."""
    parts = [bits[:, i : i + 254].ravel() for i in range(0, 1022, 256)]
    correlation = np.corrcoef(parts) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(parts[0].size)
    assert len(np.unique(bits[:, :4])) > 250  # 256 draws of 65,536 hardly ever meet


def test_noise_is_normal():
    z = np.asarray(jax.jit(normal, static_argnums=1)(jax.random.key(1), (50, 20, 301, 1))).ravel()
    error = 5 / np.sqrt(z.size)
    assert abs(z.mean()) < error and abs(z.var() - 1) < 2 * error
    assert abs((z**4).mean() - 3) < 10 * error
    assert abs((np.abs(z) < 1).mean() - 0.682689) < error


@pytest.mark.parametrize('rate', [0.0, 0.4, 1.0])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    x = jnp.ones((40, 50, 101))
    layer = Dropout(rate, deterministic=False)
    y = np.asarray(jax.jit(layer.apply)({}, x, rngs={'dropout': jax.random.key(2)}))
    error = 5 / np.sqrt(x.size)
    assert abs((y == 0).mean() - rate) < error
    np.testing.assert_allclose(y[y > 0], 1 / (1 - rate) if rate < 1 else 0, rtol=1e-4)
    assert Dropout(rate, deterministic=True).apply({}, x) is x


def test_devices_draw_what_one_draws():
    def draw(x):
        layer = Dropout(0.4, deterministic=False)
        return layer.apply({}, x, rngs={'dropout': jax.random.key(3)})

    x = np.ones((8, 5, 7), np.float32)
    mesh = Mesh(jax.devices(), 'data')
    split = jax.jit(draw)(jax.device_put(x, NamedSharding(mesh, P('data'))))
    assert len(split.sharding.device_set) == 8
    np.testing.assert_array_equal(split, jax.jit(draw)(x))
