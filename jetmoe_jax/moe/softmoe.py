"""Soft MoE: every slot is a mean of all tokens, every token of all outputs.

Source: Puigcerver et al., From Sparse to Soft Mixtures of Experts, ICLR 2024; constants, metrics
and initialisation as in Google's vmoe.

Letters: b images, n tokens, d channels, e experts, s slots per expert.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.errors import UserError
from jetmoe_jax.moe.experts import Experts, expert_dropout, expert_width
from jetmoe_jax.moe.metrics import router_z_loss, routing_metrics, sow_losses, sow_metrics
from jetmoe_jax.moe.mlp import Dtype
from jetmoe_jax.moe.noise import normal
from jetmoe_jax.moe.spheromoe import softmax_over_slots, softmax_over_tokens


def normalise(x: jax.Array, axis: int = -1, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(sum(x^2) + epsilon) over one axis, in float32; its gradient is finite at x = 0."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis, keepdims=True) + epsilon)


def soft_logits(x: jax.Array, mu: jax.Array, scale: jax.Array) -> jax.Array:
    """L = scale * cosine similarity of tokens and slots, float32.

    The released MoE Jetpack layer divides by norm + 1e-6 instead and scales its queries: the same
    numbers to within 1e-5 for vectors of norm 0.3 and above, so its weights can be used here.

    Args:
      x: tokens (b n d).
      mu: a query for every slot (d e s).
      scale: a number; multiplied into the smaller array, which is cheaper and changes nothing.

    Returns:
      L (b n e s).
    """
    K, Q = normalise(x), normalise(mu, axis=0)
    if K.size < Q.size:
        K *= scale
    else:
        Q *= scale
    return jnp.einsum('bnd,des->bnes', K, Q, precision='highest')


def soft_routing(L: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits L (b n e s) -> dispatch D (softmax over n) and combine C (over e and s together)."""
    return softmax_over_tokens(L), softmax_over_slots(L)


def soft_metrics(D: jax.Array, C: jax.Array, mu: jax.Array) -> dict[str, jax.Array]:
    """The metrics of vmoe's soft router, under its names.

    The extremes of the weights, and the cosine similarities between the combine weights of any two
    tokens of an image, the dispatch weights of any two slots, and the queries of any two slots.

    Args:
      D, C: dispatch and combine weights (b n e s), float32.
      mu: the queries (d e s).
    """
    D, C, mu = jax.lax.stop_gradient((D, C, mu))
    b, n, e, s = C.shape
    metrics = {}
    for name, w, axis in ('combine', C, (2, 3)), ('dispatch', D, 1):
        metrics[f'{name}_weights_min_mean'] = jnp.mean(jnp.min(w, axis))
        metrics[f'{name}_weights_max_mean'] = jnp.mean(jnp.max(w, axis))
    metrics |= _similarities('combine_weights', C.reshape(b, n, e * s))
    metrics |= _similarities('dispatch_weights', D.reshape(b, n, e * s).swapaxes(1, 2))
    metrics |= _similarities('mu', mu.reshape(1, -1, e * s).swapaxes(1, 2))
    return metrics


def _similarities(name: str, x: jax.Array) -> dict[str, jax.Array]:
    """Least, greatest and mean cosine similarity of any two of vectors x (b i d); {} for one."""
    b, count, _ = x.shape
    if count < 2:
        return {}
    x = normalise(x, epsilon=1e-9)
    similarity = jnp.einsum('bid,bjd->bij', x, x)
    pair = ~jnp.eye(count, dtype=bool)
    total = jnp.sum(similarity, where=pair)
    return {
        f'{name}_similarity_min': jnp.min(similarity, where=pair, initial=jnp.inf),
        f'{name}_similarity_max': jnp.max(similarity, where=pair, initial=-jnp.inf),
        f'{name}_similarity_mean': total / (b * count * (count - 1)),
    }


class SoftMoE(nn.Module):
    """The Soft MoE layer: X (b n d) -> (b n d), in place of a block's MLP.

    Attributes:
      num_experts: number of experts.
      slots_per_expert: slots (input rows) of each expert.
      hidden: hidden neurons that the factor is of; 4 d when None.
      hidden_factor: an expert has `hidden * hidden_factor` hidden neurons.
      noise: noise N(0, 1) / e on the logits in training.
      expert_dropout: rate at which whole experts are dropped in training.
      expert_dropout_mode: 'expert', a draw for each image and expert, or 'sample', one an image.
      dropout: dropout rate inside the experts.
      z_weight: weight of the router z-loss.

    Random keys in training: 'noise' and 'dropout'. Sows 'losses' and 'metrics'.
    """

    num_experts: int = 128
    slots_per_expert: int = 1
    hidden: int | None = None
    hidden_factor: float = 1.0
    noise: bool = False
    expert_dropout: float = 0.0
    expert_dropout_mode: str = 'sample'
    dropout: float = 0.0
    z_weight: float = 0.0
    dtype: Dtype = jnp.float32

    @property
    def slots(self) -> int:
        """Input rows of all experts together, for one image."""
        return self.num_experts * self.slots_per_expert

    def path_widths(self, d: int) -> dict[str, tuple[int, int]]:
        """(experts, hidden width) of the one path, by the name of its module."""
        return {'experts': (self.num_experts, expert_width(self.hidden, d, self.hidden_factor))}

    def multiply_adds(self, n: int, d: int) -> int:
        """Of one image of n tokens: logits, dispatch and combine, and the experts."""
        _, h = self.path_widths(d)['experts']
        return self.slots * (3 * n * d + 2 * d * h)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        self._check()
        d, e, s = x.shape[-1], self.num_experts, self.slots_per_expert
        mu = self.param('mu', nn.initializers.lecun_normal(), (d, e, s))
        scale = self.param('scale', nn.initializers.ones, ())

        L = soft_logits(x, mu, scale)
        noise = 0.0
        if train and self.noise:
            noise = normal(self.make_rng('noise'), L.shape) / e
        D, C = soft_routing(L + noise)
        sow_metrics(self, routing_metrics(D, C) | soft_metrics(D, C, mu))
        sow_losses(self, {'z_loss': (self.z_weight, router_z_loss(L))})

        D, C = D.astype(self.dtype), C.astype(self.dtype)
        slots = jnp.einsum('bnd,bnes->besd', x, D)
        _, hidden = self.path_widths(d)['experts']
        Y = Experts(hidden, self.dropout, self.dtype, name='experts')(slots, train)
        drop = expert_dropout(self.expert_dropout, self.expert_dropout_mode, train)
        Y = drop(Y)
        return jnp.einsum('besd,bnes->bnd', Y, C)

    def _check(self) -> None:
        if self.num_experts < 1 or self.slots_per_expert < 1:
            raise UserError(
                f'{self.num_experts} experts of {self.slots_per_expert} slots: '
                'give counts of at least 1.'
            )
