"""The transformer's MLP and its dense layer: what a dense block has once, and an expert is.

Letters: b images, n tokens or slots, d channels, h hidden neurons.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.moe.noise import Dropout

Dtype = Any
Initializer = Callable[..., jax.Array]

# ViT's initialisation (timm's "trunc_normal, std 0.02"); flax truncates at two standard deviations.
linear_init: Initializer = nn.initializers.truncated_normal(stddev=0.02)

# Flax's faster variance, E[x^2] - E[x]^2, loses digits where the mean is large.
LayerNorm = functools.partial(nn.LayerNorm, use_fast_variance=False)


@jax.custom_vjp
def matmul(x: jax.Array, W: jax.Array) -> jax.Array:
    """x W of matrices (i j) and (j k), with its gradients as products that are fast on a CPU too.

    JAX's own rule gives W's gradient as a transposed product: XLA's CPU backend then takes thirty
    times as long to sum its squares, for the gradient's norm. And it takes up to four times as long
    for a small matrix times a transposed larger one as for the transposed product.
    """
    return x @ W


def _matmul_backward(operands: tuple[jax.Array, jax.Array], c: jax.Array) -> tuple:
    x, W = operands
    if x.shape[0] < W.shape[0]:
        transposed = jnp.einsum('jk,ik->ji', W, c)
        # Rounds to what it is: without an operation here XLA swaps the product back.
        dx = jax.lax.reduce_precision(transposed, exponent_bits=8, mantissa_bits=23).T
    else:
        dx = jnp.einsum('ik,jk->ij', c, W)
    return dx, jnp.einsum('ij,ik->jk', x, c)


matmul.defvjp(lambda x, W: (x @ W, (x, W)), _matmul_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x Phi(x) with Phi the normal distribution function, in the dtype of x.

    Computed in float32 by erf: jax.nn.gelu's erfc, exact in the far tail as well, takes three
    times as long on a CPU, forward and backward.
    """
    return (x * _normal_cdf(x.astype(jnp.float32))).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5))


def _gelu_backward(x: jax.Array, c: jax.Array) -> tuple[jax.Array]:
    """Phi(x) + x Phi'(x), times the cotangent."""
    y = x.astype(jnp.float32)
    slope = _normal_cdf(y) + y * jnp.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    return ((c * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


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
        y = matmul(x.reshape(-1, x.shape[-1]).astype(self.dtype), kernel.astype(self.dtype))
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
        h = gelu(Dense(self.hidden, dtype=self.dtype, name='fc1')(x))
        self.sow('intermediates', 'mlp_act', h)
        h = Dropout(self.dropout, deterministic=not train)(h)
        y = Dense(x.shape[-1], dtype=self.dtype, name='fc2')(h)
        return Dropout(self.dropout, deterministic=not train)(y)
