"""Noise in training: dropout and normal noise from 16 random bits a value.

JAX's own draws take a whole threefry block of 64 bits for each value, which on a CPU costs more
than the experts that the dropout is for. Four values out of each block are as good here.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp


def random_16_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform integers below 2^16, uint32. How they are sharded does not change them."""
    *rest, n = shape
    blocks = jax.random.key_data(jax.random.split(key, (*rest, -(-n // 4))))
    words = jnp.concatenate([blocks[..., 0], blocks[..., 1]], axis=-1)
    return jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :n]


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """N(0, 1), float32, in 2^16 steps of equal probability: up to 4.3 standard deviations."""
    flat = (*shape[:-2], shape[-2] * shape[-1])  # the last axis may be a single slot
    uniform = (random_16_bits(key, flat).astype(jnp.float32) + 0.5) / 2**15 - 1
    return math.sqrt(2) * jax.lax.erf_inv(uniform).reshape(shape)


class Dropout(nn.Module):
    """Drops values with probability `rate`, to 2^-16, and scales the others to keep the mean.

    The random key is 'dropout', as for flax's.
    """

    rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept_of_all = round((1 - self.rate) * 2**16)
        if self.deterministic or kept_of_all == 2**16:
            return x
        if not kept_of_all:
            return jnp.zeros_like(x)
        kept = random_16_bits(self.make_rng('dropout'), x.shape) < kept_of_all
        return jnp.where(kept, x * (2**16 / kept_of_all), 0).astype(x.dtype)
