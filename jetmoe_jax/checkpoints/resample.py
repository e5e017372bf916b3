"""Position embeddings for another grid of patches than the one they were trained on.

The result is that of timm's `resample_abs_pos_embed`; nothing but NumPy is needed.
"""

import math

import numpy as np

from jetmoe_jax.errors import UserError

Grid = tuple[int, int]


def resample_pos_embed(
    pos_embed: np.ndarray,
    grid: Grid,
    *,
    prefix_tokens: int,
    source_grid: Grid | None = None,
) -> np.ndarray:
    """Resamples a learned position embedding by bicubic, antialiased interpolation.

        out[i, j] = sum over y, x of W_h[i, y] * W_w[j, x] * grid_embed[y, x]

    Args:
      pos_embed: (1, prefix + gh * gw, d), any float dtype; rows of the grid one after the other.
      grid: (H, W), the patches wanted.
      prefix_tokens: leading positions outside the grid (class token, registers); kept as they are.
      source_grid: (gh, gw); when left out, the grid is taken to be square.

    Returns:
      (1, prefix + H * W, d) in float32; the same values when the grid is unchanged.

    Raises:
      UserError: the number of positions does not fit the source grid, or is not a square.
    """
    tokens = pos_embed.shape[1] - prefix_tokens
    source_grid = _source_grid(tokens, prefix_tokens, source_grid)
    if source_grid == tuple(grid):
        return pos_embed.astype(np.float32)

    prefix, patches = np.split(pos_embed, [prefix_tokens], axis=1)
    patches = patches[0].astype(np.float64).reshape(*source_grid, -1)
    weights = [_weights(*sizes) for sizes in zip(source_grid, grid, strict=True)]
    patches = np.einsum('iy,jx,yxd->ijd', *weights, patches, optimize=True)
    patches = patches.reshape(1, grid[0] * grid[1], -1)
    return np.concatenate([prefix, patches], axis=1).astype(np.float32)


def _source_grid(tokens: int, prefix_tokens: int, source_grid: Grid | None) -> Grid:
    found = f'The position embedding has {tokens} positions after {prefix_tokens} prefix tokens'
    if source_grid is not None:
        if math.prod(source_grid) != tokens:
            raise UserError(
                f'{found}, but the source grid {source_grid[0]}x{source_grid[1]} has '
                f'{math.prod(source_grid)}: correct source_grid or prefix_tokens.'
            )
        return tuple(source_grid)
    side = math.isqrt(max(tokens, 0))
    if side == 0 or side**2 != tokens:
        raise UserError(
            f'{found}, expected a square number: '
            'give source_grid=(height, width) or correct prefix_tokens.'
        )
    return side, side


def _weights(source: int, target: int) -> np.ndarray:
    """Interpolation weights of one axis: (target, source) in float64, each row of sum one.

    Pixel centres are at half-integers. When the axis shrinks, the kernel is widened by the same
    factor, which is the antialiasing. Weights that fall outside the axis are spread over the rest.
    """
    scale = source / target
    centres = (np.arange(target) + 0.5) * scale
    distances = (np.arange(source) + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = _cubic(np.abs(distances))
    return weights / weights.sum(axis=1, keepdims=True)


def _cubic(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    """The cubic convolution kernel (Keys, IEEE Trans. ASSP 1981) at distances x >= 0.

    (a + 2) x^3 - (a + 3) x^2 + 1          for x <= 1
    a (x^3 - 5 x^2 + 8 x - 4)              for 1 < x < 2, and 0 beyond
    """
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
