"""Layers that the model families share."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.errors import UserError
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


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an image size, which may be one number."""
    return (size, size) if isinstance(size, int) else tuple(size)


def check_images(images: jax.Array, image_shape: tuple[int, int], cell: int) -> None:
    """Refuses images that are not of the model's size, and a size that is no multiple of a cell.

    Args:
      images: (b height width 3).
      cell: pixels along a side of what becomes one token (in the last stage).
    """
    if any(pixels < 1 or pixels % cell for pixels in image_shape):
        raise UserError(
            f'image size {image_shape} is not a multiple of {cell}, the pixels of a '
            'token in the last block; choose an image_size that is.'
        )
    if images.shape[1:] != (*image_shape, 3):
        raise UserError(
            f'images are {images.shape[1:]}, the model takes {(*image_shape, 3)} '
            '(height, width, channels).'
        )


def linear_over_depth(rate: float, depth: int) -> list[float]:
    """A rate for each of `depth` blocks, growing linearly from 0 to `rate`."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]
