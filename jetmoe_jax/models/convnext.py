"""ConvNeXt (Liu et al. 2022) in timm's variants, dense or with MoE blocks.

Letters: b images, h w rows and columns of the grid, n = h w tokens, d channels, p patch size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.layers import (
    DropPath,
    LayerScale,
    as_pair,
    check_images,
    linear_over_depth,
)
from jetmoe_jax.moe.layers import make_layer
from jetmoe_jax.moe.mlp import Dense, Dtype, LayerNorm, Mlp, linear_init

KERNEL_SIZE = 7  # of the depthwise convolutions
_MARGIN = KERNEL_SIZE // 2


class DepthwiseConv(nn.Module):
    """A 7x7 convolution of each channel by itself, (b h w d) -> (b h w d); kernel (7 7 1 d)."""

    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (KERNEL_SIZE, KERNEL_SIZE, 1, x.shape[-1])
        kernel = self.param('kernel', linear_init, shape).astype(self.dtype)
        bias = self.param('bias', nn.initializers.zeros, (x.shape[-1],)).astype(self.dtype)
        # XLA's grouped convolution is 20 times slower than shifted products on a CPU.
        conv = sum_of_shifts if jax.default_backend() == 'cpu' else grouped_conv
        return conv(x.astype(self.dtype), kernel) + bias


def grouped_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Depthwise convolution with zero padding by XLA's operation: x (b h w d), kernel (7 7 1 d)."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, 1),
        padding='SAME',
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        feature_group_count=x.shape[-1],
    )


@jax.custom_vjp
@jax.jit  # traced once for all blocks of a stage
def sum_of_shifts(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`grouped_conv` as y[h, w] = sum over i, j of x[h + i - 3, w + j - 3] * kernel[i, j]."""
    b, h, w, d = x.shape
    padded, kernel = _pad(x), kernel.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32)
    for i in range(KERNEL_SIZE):
        for j in range(KERNEL_SIZE):
            y += padded[:, i : i + h, j : j + w] * kernel[i, j, 0]
    return y.astype(x.dtype)


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return sum_of_shifts(x, kernel), (x, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple:
    """For x the convolution with the flipped kernel; for the kernel one sum per shift."""
    x, kernel = saved
    padded, c = _pad(x), cotangent.astype(jnp.float32)

    def kernel_gradient(shift: jax.Array) -> jax.Array:
        window = jax.lax.dynamic_slice(padded, (0, *shift, 0), c.shape)
        return jnp.sum(window * c, axis=(1, 2))

    # A loop, as it compiles to less than half the time of 49 sums. Images are added up after it:
    # where they are spread over devices, that is one exchange and not 49.
    shifts = jnp.stack(jnp.divmod(jnp.arange(KERNEL_SIZE**2), KERNEL_SIZE), axis=-1)
    of_image = jax.lax.map(kernel_gradient, shifts)
    grad_kernel = of_image.sum(axis=1).reshape(kernel.shape).astype(kernel.dtype)
    return sum_of_shifts(cotangent, kernel[::-1, ::-1]), grad_kernel


sum_of_shifts.defvjp(_forward, _backward)


def _pad(x: jax.Array) -> jax.Array:
    margin = (_MARGIN, _MARGIN)
    return jnp.pad(x.astype(jnp.float32), ((0, 0), margin, margin, (0, 0)))


class Block(nn.Module):
    """x + (depthwise convolution -> LayerNorm -> MLP or MoE layer); (b h w d) -> (b h w d)."""

    mlp_hidden: int
    moe: Mapping[str, Any] | None = None
    layer_scale: float | None = None
    drop_path: float = 0.0
    dropout: float = 0.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        b, h, w, d = x.shape
        y = DepthwiseConv(self.dtype, name='conv_dw')(x)
        y = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='norm')(y)
        y = y.reshape(b, h * w, d)
        self.sow('intermediates', 'mlp_input', y)
        if self.moe is None:
            y = Mlp(self.mlp_hidden, self.dropout, self.dtype, name='mlp')(y, train)
        else:
            moe = make_layer(self.moe, hidden=self.mlp_hidden, dtype=self.dtype, name='moe')
            y = moe(y, train)
        y = y.reshape(b, h, w, d)
        if self.layer_scale is not None:
            y = LayerScale(self.layer_scale, self.dtype, name='ls')(y)
        x = x + DropPath(self.drop_path)(y, train)
        self.sow('intermediates', 'output', x)
        return x


class Stage(nn.Module):
    """Blocks of one width, after a downsampling to half the grid in all stages but the first.

    Attributes:
      blocks: the arguments of each Block.
    """

    width: int
    downsample: bool
    blocks: Sequence[Mapping[str, Any]]
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if self.downsample:
            x = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='downsample_norm')(x)
            x = Dense(self.width, dtype=self.dtype, name='downsample_conv')(_patches(x, 2))
        for i, arguments in enumerate(self.blocks):
            x = Block(dtype=self.dtype, name=f'blocks_{i}', **arguments)(x, train)
        return x


class ConvNeXt(nn.Module):
    """Images (b height width 3), normalised float -> logits (b k), float32.

    Attributes:
      image_size: pixels, one number or (height, width).
      patch_size: of the stem; every later stage halves the grid.
      widths, depths: channels and number of blocks of each stage.
      num_classes: 0 for no head: the pooled features (b d) are the output.
      layer_scale: initial value of the layer scales; None for none.
      conv_mlp: timm's files hold the MLPs as 1x1 convolutions; the function is the same.
      dropout: rate in the dense MLPs; drop_path: rate of the last block, linear over all blocks.
      moe_blocks: (stage, block) of each block whose MLP is a MoE layer, both counted from 0.
      moe: that layer by name ('layer') and its arguments (see moe/layers.py), where a tuple holds
        one value for each stage; expert dropout grows linearly over all blocks.
      dtype: of the computation; parameters, logits and softmaxes are float32.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 4
    widths: tuple[int, ...] = (48, 96, 192, 384)
    depths: tuple[int, ...] = (2, 2, 6, 2)
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    layer_scale: float | None = 1e-6
    conv_mlp: bool = False
    dropout: float = 0.0
    drop_path: float = 0.0
    moe_blocks: tuple[tuple[int, int], ...] = ()
    moe: Mapping[str, Any] | None = None
    dtype: Dtype = jnp.float32

    @property
    def image_shape(self) -> tuple[int, int]:
        """(height, width) of the images, in pixels."""
        return as_pair(self.image_size)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each stage."""
        cells = [self.patch_size * 2**stage for stage in range(len(self.depths))]
        return tuple(tuple(pixels // cell for pixels in self.image_shape) for cell in cells)

    @property
    def mlp_hiddens(self) -> tuple[int, ...]:
        """Hidden neurons of an MLP in each stage."""
        return tuple(round(width * self.mlp_ratio) for width in self.widths)

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Path of every block, in order -> channels and hidden neurons of its MLP."""
        return {_path(s, i): (self.widths[s], self.mlp_hiddens[s]) for s, i in self._pairs}

    @property
    def moe_paths(self) -> tuple[str, ...]:
        """Paths of the blocks with a MoE layer."""
        return tuple(_path(stage, i) for stage, i in self.moe_blocks)

    @property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        """(stage, block) of every block, in order."""
        return tuple((s, i) for s, depth in enumerate(self.depths) for i in range(depth))

    def moe_layer(self, path: str) -> nn.Module:
        """The MoE layer of a block, unbound."""
        stage, i = next(pair for pair in self._pairs if _path(*pair) == path)
        arguments = self._moe_arguments(stage, i)
        hidden = self.mlp_hiddens[stage]
        return make_layer(arguments, hidden=hidden, dtype=self.dtype, parent=None)

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        self._check(images)
        patches = _patches(images, self.patch_size)
        x = Dense(self.widths[0], dtype=self.dtype, name='stem_conv')(patches)
        x = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='stem_norm')(x)

        rates = linear_over_depth(self.drop_path, len(self._pairs))
        drop_path = dict(zip(self._pairs, rates, strict=True))
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            blocks = [
                dict(
                    mlp_hidden=self.mlp_hiddens[stage],
                    moe=self._moe_arguments(stage, i),
                    layer_scale=self.layer_scale,
                    drop_path=drop_path[stage, i],
                    dropout=self.dropout,
                )
                for i in range(depth)
            ]
            x = Stage(width, stage > 0, blocks, self.dtype, name=f'stages_{stage}')(x, train)

        x = x.mean(axis=(1, 2))
        x = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='head_norm')(x).astype(jnp.float32)
        self.sow('intermediates', 'pooled', x)
        if self.num_classes == 0:
            return x
        return Dense(self.num_classes, name='head')(x)

    def _moe_arguments(self, stage: int, block: int) -> Mapping[str, Any] | None:
        if (stage, block) not in map(tuple, self.moe_blocks):
            return None
        moe = {k: v[stage] if isinstance(v, tuple | list) else v for k, v in self.moe.items()}
        if 'expert_dropout' in moe:
            rates = linear_over_depth(moe['expert_dropout'], len(self._pairs))
            moe['expert_dropout'] = rates[self._pairs.index((stage, block))]
        return moe

    def _check(self, images: jax.Array) -> None:
        stages, cell = len(self.depths), self.patch_size * 2 ** (len(self.depths) - 1)
        if len(self.widths) != stages:
            raise UserError(
                f'widths {tuple(self.widths)} and depths {tuple(self.depths)} are not of one '
                'length; give one of each for every stage.'
            )
        check_images(images, self.image_shape, cell)
        if self.moe_blocks and self.moe is None:
            raise UserError('moe_blocks are given without the arguments of the layer (moe).')
        for block in self.moe_blocks:
            if tuple(block) not in self._pairs:
                raise UserError(
                    f'moe_blocks has {block}, which is no (stage, block) of a model with depths '
                    f'{tuple(self.depths)}; both are counted from 0.'
                )
        for name, value in (self.moe or {}).items():
            if isinstance(value, tuple | list) and len(value) != stages:
                raise UserError(
                    f'{name} of moe is {value}; give one number, or one for each of the {stages} '
                    'stages.'
                )


def _path(stage: int, block: int) -> str:
    return f'stages_{stage}/blocks_{block}'


def _patches(x: jax.Array, p: int) -> jax.Array:
    """(b h w d) -> (b h/p w/p p*p*d): what a p x p convolution of stride p multiplies."""
    b, h, w, d = x.shape
    x = x.reshape(b, h // p, p, w // p, p, d).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // p, w // p, p * p * d)
