"""Vision transformer (Dosovitskiy et al. 2021) in timm's variants, dense or with MoE blocks.

Letters: b images, n tokens, d channels, h heads, c channels of a head.
"""

from collections.abc import Mapping
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
from jetmoe_jax.moe.noise import Dropout

POOLS = ('token', 'avg')


@jax.custom_vjp
def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k^T) v of every head: (b h n c) -> (b h n c); softmax in float32.

    The weights stay exp(logits - max): what they are to be divided by is divided out of the output,
    and in the gradient out of the cotangent, which are smaller (as in FlashAttention, Dao 2022).
    """
    return _attend_forward(q, k, v)[0]


def _attend_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    L = jnp.einsum('bhqc,bhkc->bhqk', q, k, preferred_element_type=jnp.float32)
    P = jnp.exp(L - jnp.max(L, axis=-1, keepdims=True)).astype(v.dtype)
    total = jnp.sum(P.astype(jnp.float32), axis=-1, keepdims=True)
    y = jnp.einsum('bhqk,bhkc->bhqc', P, v, preferred_element_type=jnp.float32) / total
    return y.astype(v.dtype), (q, k, v, P, total, y)


def _attend_backward(residuals: tuple, c: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dL = P (dP - sum(dP P)), where sum(dP P) is sum(c y).

    P and c are rounded to the dtype once, before all that is made of them, and y is not: what dP
    and its mean have in common then cancels.
    """
    q, k, v, P, total, y = residuals
    c = (c / total).astype(v.dtype)
    mean = jnp.sum(c.astype(jnp.float32) * y, axis=-1, keepdims=True)
    dv = jnp.einsum('bhqk,bhqc->bhkc', P, c)
    dP = jnp.einsum('bhqc,bhkc->bhqk', c, v, preferred_element_type=jnp.float32)
    dL = (P * (dP - mean)).astype(q.dtype)
    return jnp.einsum('bhqk,bhkc->bhqc', dL, k), jnp.einsum('bhqk,bhqc->bhkc', dL, q), dv


attend.defvjp(_attend_forward, _attend_backward)


class Attention(nn.Module):
    """Multi-head self-attention, (b n d) -> (b n d); softmax in float32."""

    num_heads: int
    qk_norm: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, n, d = x.shape
        qkv = Dense(3 * d, dtype=self.dtype, name='qkv')(x)
        q, k, v = qkv.reshape(b, n, 3, self.num_heads, -1).transpose(2, 0, 3, 1, 4)
        if self.qk_norm:
            q = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='q_norm')(q)
            k = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='k_norm')(k)
        heads = attend(q * q.shape[-1] ** -0.5, k, v).swapaxes(1, 2).reshape(b, n, d)
        self.sow('intermediates', 'attn_proj_input', heads)
        return Dense(d, dtype=self.dtype, name='proj')(heads)


class Block(nn.Module):
    """x + attention, then x + MLP or MoE layer, each after its LayerNorm; (b n d) -> (b n d)."""

    num_heads: int
    mlp_hidden: int
    moe: Mapping[str, Any] | None = None
    layer_scale: float | None = None
    qk_norm: bool = False
    drop_path: float = 0.0
    dropout: float = 0.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        y = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='norm1')(x)
        y = Attention(self.num_heads, self.qk_norm, self.dtype, name='attn')(y)
        y = Dropout(self.dropout, deterministic=not train)(y)
        x = x + self._residual(y, 'ls1', train)

        y = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='norm2')(x)
        self.sow('intermediates', 'mlp_input', y)
        if self.moe is None:
            y = Mlp(self.mlp_hidden, self.dropout, self.dtype, name='mlp')(y, train)
        else:
            moe = make_layer(self.moe, hidden=self.mlp_hidden, dtype=self.dtype, name='moe')
            y = moe(y, train)
        x = x + self._residual(y, 'ls2', train)
        self.sow('intermediates', 'output', x)
        return x

    def _residual(self, y: jax.Array, scale_name: str, train: bool) -> jax.Array:
        if self.layer_scale is not None:
            y = LayerScale(self.layer_scale, self.dtype, name=scale_name)(y)
        return DropPath(self.drop_path)(y, train)


class ViT(nn.Module):
    """Images (b height width 3), normalised float -> logits (b k), float32.

    Attributes:
      image_size: pixels, one number or (height, width).
      pool: 'token', the class token after the final `norm`; or 'avg', the mean over the patch
        tokens, followed by `fc_norm`.
      reg_tokens: number of register tokens (Darcet et al. 2024).
      no_embed_class: the position embedding has no rows for the class token and the registers.
      layer_scale: initial value of the layer scales; None for none.
      qk_norm: LayerNorm on queries and keys.
      pre_norm: LayerNorm on the embedded tokens; the patch embedding then has no bias (CLIP).
      num_classes: 0 for no head: the pooled features (b d) are the output.
      dropout: rate in the dense blocks; drop_path: rate of the last block, linear over depth.
      moe_blocks: the blocks whose MLP is a MoE layer.
      moe: that layer by name ('layer') and its arguments (see moe/layers.py); expert dropout grows
        linearly over depth.
      dtype: of the computation; parameters, logits and softmaxes are float32.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    width: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    pool: str = 'token'
    class_token: bool = True
    reg_tokens: int = 0
    no_embed_class: bool = False
    layer_scale: float | None = None
    qk_norm: bool = False
    pre_norm: bool = False
    dropout: float = 0.0
    drop_path: float = 0.0
    moe_blocks: tuple[int, ...] = ()
    moe: Mapping[str, Any] | None = None
    dtype: Dtype = jnp.float32

    @property
    def image_shape(self) -> tuple[int, int]:
        """(height, width) of the images, in pixels."""
        return as_pair(self.image_size)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return tuple(pixels // self.patch_size for pixels in self.image_shape)

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return int(self.class_token) + self.reg_tokens

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] + self.prefix_tokens

    @property
    def mlp_hidden(self) -> int:
        return round(self.width * self.mlp_ratio)

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Path of every block, in order -> channels and hidden neurons of its MLP."""
        return {f'blocks_{i}': (self.width, self.mlp_hidden) for i in range(self.depth)}

    @property
    def moe_paths(self) -> tuple[str, ...]:
        """Paths of the blocks with a MoE layer."""
        return tuple(f'blocks_{i}' for i in self.moe_blocks)

    def moe_layer(self, path: str) -> nn.Module:
        """The MoE layer of a block, unbound."""
        arguments = self._moe_arguments(int(path.removeprefix('blocks_')))
        return make_layer(arguments, hidden=self.mlp_hidden, dtype=self.dtype, parent=None)

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        self._check(images)
        d, b = self.width, images.shape[0]
        x = self._patch_embed(images)
        x = self._add_prefix_and_position(x)
        x = Dropout(self.dropout, deterministic=not train)(x)
        if self.pre_norm:
            x = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='norm_pre')(x)

        drop_path = linear_over_depth(self.drop_path, self.depth)
        for i in range(self.depth):
            x = Block(
                self.num_heads,
                self.mlp_hidden,
                moe=self._moe_arguments(i),
                layer_scale=self.layer_scale,
                qk_norm=self.qk_norm,
                drop_path=drop_path[i],
                dropout=self.dropout,
                dtype=self.dtype,
                name=f'blocks_{i}',
            )(x, train)

        if self.pool == 'token':
            x = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='norm')(x)
            self.sow('intermediates', 'features', x)
            x = x[:, 0]
        else:
            self.sow('intermediates', 'features', x)
            x = x[:, self.prefix_tokens :].mean(axis=1)
            x = LayerNorm(epsilon=1e-6, dtype=self.dtype, name='fc_norm')(x)
        x = x.astype(jnp.float32)
        self.sow('intermediates', 'pooled', x)
        if self.num_classes == 0:
            return x.reshape(b, d)
        return Dense(self.num_classes, name='head')(x)

    def _patch_embed(self, images: jax.Array) -> jax.Array:
        """Images -> (b n d): a p x p convolution of stride p, as a product of patches."""
        b, p, (rows, columns) = images.shape[0], self.patch_size, self.grid
        patches = images.reshape(b, rows, p, columns, p, 3).transpose(0, 1, 3, 2, 4, 5)
        patches = patches.reshape(b, rows * columns, p * p * 3)
        embed = Dense(self.width, not self.pre_norm, self.dtype, linear_init, name='patch_embed')
        return embed(patches)

    def _add_prefix_and_position(self, x: jax.Array) -> jax.Array:
        """Puts [class token, registers] before the patches and adds the position embedding."""
        b, n, d = x.shape
        tokens = []
        if self.class_token:
            tokens.append(self.param('cls_token', nn.initializers.normal(1e-6), (1, 1, d)))
        if self.reg_tokens:
            tokens.append(
                self.param('reg_token', nn.initializers.normal(1e-6), (1, self.reg_tokens, d))
            )
        prefix = [jnp.broadcast_to(t, (b, *t.shape[1:])).astype(self.dtype) for t in tokens]
        rows = n if self.no_embed_class else n + self.prefix_tokens
        position = self.param('pos_embed', linear_init, (1, rows, d)).astype(self.dtype)
        if self.no_embed_class:
            return jnp.concatenate([*prefix, x + position], axis=1)
        return jnp.concatenate([*prefix, x], axis=1) + position

    def _moe_arguments(self, block: int) -> Mapping[str, Any] | None:
        if block not in self.moe_blocks:
            return None
        moe = dict(self.moe)
        if 'expert_dropout' in moe:
            moe['expert_dropout'] = linear_over_depth(moe['expert_dropout'], self.depth)[block]
        return moe

    def _check(self, images: jax.Array) -> None:
        if self.pool not in POOLS:
            raise UserError(f'pool is {self.pool!r}; use one of {", ".join(POOLS)}.')
        if self.pool == 'token' and not self.class_token:
            raise UserError("pool is 'token' and the model has no class token; use pool='avg'.")
        if self.width % self.num_heads:
            raise UserError(f'width {self.width} is not a multiple of num_heads {self.num_heads}.')
        check_images(images, self.image_shape, self.patch_size)
        if self.moe_blocks and self.moe is None:
            raise UserError('moe_blocks are given without the arguments of the layer (moe).')
        if self.moe_blocks and not set(self.moe_blocks) <= set(range(self.depth)):
            raise UserError(
                f'moe_blocks {self.moe_blocks} are not all among the {self.depth} blocks.'
            )
