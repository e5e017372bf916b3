"""What a MoE layer tells of its routing: metrics, auxiliary losses, and how both leave the layer.

Letters: b images, n tokens, e experts, s slots of an expert (or c, a sparse expert's places).

A layer sows into the collections 'losses' (what the trainer adds to its loss, weights included)
and 'metrics' (what it logs). Both are inert unless `apply` is given them as mutable.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

Losses = Mapping[str, tuple[float, jax.Array]]  # name -> (weight, loss)


def sow_metrics(module: nn.Module, metrics: Mapping[str, jax.Array]) -> None:
    """Sows into 'metrics'; nothing at initialisation, so that `init` gives parameters alone."""
    if not module.is_initializing():
        for name, value in metrics.items():
            module.sow('metrics', name, value)


def sow_losses(module: nn.Module, losses: Losses) -> None:
    """Sows weight * loss into 'losses' where weight is not 0, and every loss into 'metrics'.

    A loss of weight 0 that nobody reads costs nothing: the compiler drops it.
    """
    sow_metrics(module, {name: loss for name, (_, loss) in losses.items()})
    if not module.is_initializing():
        for name, (weight, loss) in losses.items():
            if weight:
                module.sow('losses', name, weight * loss)


def entropy(w: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Mean entropy, in nats, of weights w made to sum to one over `axis`; 0 where all are 0."""
    total = jnp.sum(w, axis, keepdims=True)
    p = w / jnp.where(total > 0, total, 1)
    return jnp.mean(jnp.sum(jax.scipy.special.entr(p), axis))


def routing_metrics(D: jax.Array, C: jax.Array) -> dict[str, jax.Array]:
    """Entropy and maximum of dispatch (over tokens) and combine weights (over slots), means.

    Args:
      D, C: dispatch and combine weights (b n e s), float32.
    """
    D, C = jax.lax.stop_gradient((D, C))
    return {
        'dispatch_entropy': entropy(D, 1),
        'dispatch_max': jnp.mean(jnp.max(D, 1)),
        'combine_entropy': entropy(C, (2, 3)),
        'combine_max': jnp.mean(jnp.max(C, (2, 3))),
    }


def router_z_loss(logits: jax.Array) -> jax.Array:
    """Mean over tokens of logsumexp^2 of logits (b n ...) (ST-MoE, Zoph et al. 2022)."""
    logits = logits.astype(jnp.float32).reshape(*logits.shape[:2], -1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
