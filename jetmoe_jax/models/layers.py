"""Layers that the model families share."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.moe.mlp import Dtype


class LayerScale(nn.Module):
    """x * gamma, one learnable factor a channel (CaiT, Touvron et al. 2021)."""

    init_value: float
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = self.param('gamma', nn.initializers.constant(self.init_value), (x.shape[-1],))
        return x * gamma.astype(self.dtype)


class DropPath(nn.Module):
    """Drops a residual branch for whole images in training (Huang et al. 2016)."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        every_axis_but_images = tuple(range(1, x.ndim))
        return nn.Dropout(self.rate, every_axis_but_images, deterministic=not train)(x)


def linear_over_depth(rate: float, depth: int) -> list[float]:
    """A rate for each of `depth` blocks, growing linearly from 0 to `rate`."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]
