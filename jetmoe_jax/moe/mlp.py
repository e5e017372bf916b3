"""The transformer's MLP and its dense layer: what a dense block has once, and an expert is.

Letters: b images, n tokens or slots, d channels, h hidden neurons.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Dtype = Any
Initializer = Callable[..., jax.Array]

# ViT's initialisation (timm's "trunc_normal, std 0.02"); flax truncates at two standard deviations.
linear_init: Initializer = nn.initializers.truncated_normal(stddev=0.02)


class Dense(nn.Module):
    """y = x W + b over the last axis; kernel (in, out), parameters in float32.

    The leading axes are flattened for the product: XLA's CPU backend takes about twice as long for
    the backward pass of a (b n d) product as for that of (b*n d).
    """

    features: int
    use_bias: bool = True
    dtype: Dtype = jnp.float32
    kernel_init: Initializer = linear_init

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param('kernel', self.kernel_init, (x.shape[-1], self.features))
        y = x.reshape(-1, x.shape[-1]).astype(self.dtype) @ kernel.astype(self.dtype)
        if self.use_bias:
            bias = self.param('bias', nn.initializers.zeros, (self.features,))
            y += bias.astype(self.dtype)
        return y.reshape(*x.shape[:-1], self.features)


class Mlp(nn.Module):
    """fc1 -> exact (erf) GELU -> dropout -> fc2 -> dropout; x (..., d) -> (..., d)."""

    hidden: int
    dropout: float = 0.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        h = nn.gelu(Dense(self.hidden, dtype=self.dtype, name='fc1')(x), approximate=False)
        self.sow('intermediates', 'mlp_act', h)
        h = nn.Dropout(self.dropout, deterministic=not train)(h)
        y = Dense(x.shape[-1], dtype=self.dtype, name='fc2')(h)
        return nn.Dropout(self.dropout, deterministic=not train)(y)
