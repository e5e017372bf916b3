"""The 1.5-entmax, a softmax that gives exact zeros, with its gradient.

Source: Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, ACL 2019.
"""

import functools
import math

import jax
import jax.numpy as jnp

Axis = int | tuple[int, ...]


def entmax15(z: jax.Array, axis: Axis = -1) -> jax.Array:
    """Maps scores to a sparse distribution: alpha-entmax with alpha = 1.5.

        p = max(z / 2 - tau, 0)^2    with tau such that sum(p) = 1

    The threshold is found without sorting, by Newton's iteration on ||max(z / 2 - tau, 0)|| = 1.
    A norm of convex functions is convex, so the iteration climbs to tau from the left and never
    overshoots; its number of steps grows with the logarithm of the row's size and makes p exact to
    float32 rounding.

    Args:
      z: scores of any shape and float dtype. An entry of -inf gets p = 0 and gradient 0; as for the
        softmax, every row needs one finite entry.
      axis: the axis, or the axes together, over which p sums to one.

    Returns:
      p, of the shape of z, in float32 whatever the dtype of z.
    """
    return _entmax15(z.astype(jnp.float32), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _entmax15(z: jax.Array, axis: Axis) -> jax.Array:
    axes = (axis,) if isinstance(axis, int) else axis
    size = math.prod(z.shape[a] for a in axes)
    x = (z - jnp.max(z, axis, keepdims=True)) / 2

    # The largest x is 0 and max(0 - tau, 0)^2 <= 1, so tau is never below -1.
    tau = -1.0
    for _ in range(_newton_steps(size) - 1):
        tau = tau + _newton_step(jnp.maximum(x - tau, 0), axis)

    # The last step is taken on the root itself: small roots keep the digits that tau cannot hold.
    root = jnp.maximum(x - tau, 0)
    root = jnp.maximum(root - _newton_step(root, axis), 0)
    return root**2


def _newton_steps(size: int) -> int:
    """Steps after which the worst rows found by search, of `size` entries, have converged."""
    return 4 + round(math.log10(size))


def _newton_step(root: jax.Array, axis: Axis) -> jax.Array:
    """-g / g' of g(tau) = ||root|| - 1, where root = max(x - tau, 0) and g' = -sum(root) / ||root||."""
    square = jnp.sum(root**2, axis, keepdims=True)
    return (square - jnp.sqrt(square)) / jnp.sum(root, axis, keepdims=True)


def _forward(z: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
    p = _entmax15(z, axis)
    return p, p


def _backward(axis: Axis, p: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """With s = sqrt(p) and cotangent c: grad z = s * (c - sum(s * c) / sum(s))."""
    s = jnp.sqrt(p)
    mean = jnp.sum(s * cotangent, axis, keepdims=True) / jnp.sum(s, axis, keepdims=True)
    return (s * (cotangent - mean),)


_entmax15.defvjp(_forward, _backward)
