"""Sparse MoE layers: tokens choose experts (V-MoE), or experts choose tokens.

Sources: Riquelme et al., Scaling Vision with Sparse Mixture of Experts, NeurIPS 2021, with the
conventions of Google's vmoe; Zhou et al., Mixture-of-Experts with Expert Choice Routing, NeurIPS
2022. The tokens of one image are routed together, and apart from those of any other.

Letters: b images, n tokens, d channels, e experts, c places of an expert (its capacity).
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.errors import UserError
from jetmoe_jax.moe.experts import Experts, expert_width
from jetmoe_jax.moe.metrics import (
    Losses,
    router_z_loss,
    routing_metrics,
    sow_losses,
    sow_metrics,
)
from jetmoe_jax.moe.mlp import Dense, Dtype, Mlp
from jetmoe_jax.moe.noise import normal

LOSS_SCOPES = ('image', 'batch')


def capacity_of(readings: int, e: int, factor: float) -> int:
    """Places of each of e experts, where tokens are to be read so many times in all.

    ceil(readings * factor / e), rounded up to a multiple of 4 as in vmoe.
    """
    return 4 * math.ceil(math.ceil(readings * factor / e) / 4)


def token_choice(
    gates: jax.Array, experts_per_token: int, capacity: int, batch_priority: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Every token takes a place at each of its best experts while there are any.

    Tokens queue in their order, all with their first choice before any with a second one; who finds
    an expert full is dropped there.

    Args:
      gates: (b n e), float32.
      experts_per_token: how many experts a token chooses.
      capacity: places c of an expert.
      batch_priority: tokens queue by their greatest gate instead (batch priority routing).

    Returns:
      Dispatch weights D (b n e c), 1 for the token that has the place, and combine weights C, its
      gate there; both float32.
    """

    def places(gates: jax.Array) -> jax.Array:
        """Gates of one image (n e) -> the place of each token at each expert; c and above: none."""
        n, e = gates.shape
        best, choices = jax.lax.top_k(gates, experts_per_token)
        order = jnp.argsort(-best[:, 0]) if batch_priority else jnp.arange(n)
        queue = jax.nn.one_hot(choices[order].T.ravel(), e, dtype=jnp.int32)
        ahead = jnp.cumsum(queue, axis=0) - queue
        place = jnp.where(queue, ahead, capacity).reshape(experts_per_token, n, e).min(axis=0)
        return jnp.zeros_like(place).at[order].set(place)

    D = jax.nn.one_hot(jax.vmap(places)(gates), capacity)
    return D, gates[..., None] * D


def expert_choice(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Every expert gives its places to the tokens with the greatest gates.

    Args:
      gates: (b n e), float32.
      capacity: places c of an expert, at most n.

    Returns:
      Dispatch weights D (b n e c), 1 for the token that has the place, and combine weights C, its
      gate there; both float32.
    """
    _, chosen = jax.lax.top_k(gates.swapaxes(1, 2), capacity)
    D = jax.nn.one_hot(chosen, gates.shape[1], axis=1)
    return D, gates[..., None] * D


# The auxiliary losses take gates or logits (g n e): g groups of tokens, balanced each by itself.


def importance_loss(gates: jax.Array) -> jax.Array:
    """CV^2 over experts of the sum over tokens of the gates, mean over groups."""
    return _squared_variation(jnp.sum(gates, axis=1))


def load_loss(logits: jax.Array, noisy_logits: jax.Array, experts_per_token: int) -> jax.Array:
    """CV^2 over experts of the expected load, mean over groups.

    The load is the mean over tokens of the probability that, the noise N(0, 1/e) on this expert's
    logit drawn again, it would be among the token's best: P(logit + noise > least of the best).
    """
    e = logits.shape[-1]
    least = jax.lax.top_k(noisy_logits, experts_per_token)[0][..., -1:]
    p = jax.scipy.stats.norm.cdf((logits - least) * e)
    return _squared_variation(jnp.mean(p, axis=1))


def gshard_loss(gates: jax.Array) -> jax.Array:
    """e * sum over experts of (mean gate) * (share of tokens whose first choice it is).

    Mean over groups; 1 when balanced. Source: Lepikhin et al., GShard, ICLR 2021.
    """
    e = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), e)
    return e * jnp.mean(jnp.sum(jnp.mean(gates, axis=1) * jnp.mean(first, axis=1), axis=-1))


def _squared_variation(x: jax.Array) -> jax.Array:
    """(standard deviation / mean)^2 over experts of x (g e), mean over groups."""
    return jnp.mean(jnp.var(x, axis=-1) / jnp.mean(x, axis=-1) ** 2)


class SparseMoE(nn.Module):
    """What the sparse layers share; `TokenChoice` and `ExpertChoice` say how gates give places.

    Attributes:
      num_experts: number of experts.
      hidden: hidden neurons that the factor is of; 4 d when None.
      hidden_factor: an expert has `hidden * hidden_factor` hidden neurons.
      capacity_factor: places of all experts together, as a multiple of what the tokens need.
      capacity: places of each expert, instead of a factor.
      noise: noise of standard deviation 1/e on the logits in training.
      shared_expert: an MLP beside the experts and as wide, whose output is added to every token's.
      dropout: dropout rate inside the experts.
      z_weight: weight of the router z-loss.

    Random keys in training: 'noise' and 'dropout'. Sows 'losses' and 'metrics'.
    """

    num_experts: int = 32
    hidden: int | None = None
    hidden_factor: float = 1.0
    capacity_factor: float = 1.0
    capacity: int | None = None
    noise: bool = True
    shared_expert: bool = False
    dropout: float = 0.0
    z_weight: float = 0.0
    dtype: Dtype = jnp.float32

    @property
    def readings_per_token(self) -> int:
        """Experts that are to read a token, at a capacity factor of 1."""
        return 1

    @property
    def slots(self) -> int | None:
        """Input rows of all experts together, for one image; None when they depend on n."""
        return None if self.capacity is None else self.num_experts * self.capacity

    def path_widths(self, d: int) -> dict[str, tuple[int, int]]:
        """(experts, hidden width) of the one path, by the name of its module."""
        return {'experts': (self.num_experts, expert_width(self.hidden, d, self.hidden_factor))}

    def places(self, n: int) -> int:
        """Places of each expert for n tokens: n at most, for an expert reads a token once."""
        readings = n * self.readings_per_token
        c = self.capacity or capacity_of(readings, self.num_experts, self.capacity_factor)
        return min(c, n)

    def multiply_adds(self, n: int, d: int) -> int:
        """Of one image of n tokens: router, one-hot dispatch and combine, and the experts."""
        e, h = self.path_widths(d)['experts']
        shared = 2 * n * d * h if self.shared_expert else 0
        return n * d * e + e * self.places(n) * (2 * n * d + 2 * d * h) + shared

    def route(self, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gates (b n e) -> dispatch and combine weights (b n e c)."""
        raise NotImplementedError

    def auxiliary_losses(self, L: jax.Array, noisy: jax.Array) -> Losses:
        """Name -> (weight, loss), from logits (b n e) without and with noise."""
        return {'z_loss': (self.z_weight, router_z_loss(L))}

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        self._check()
        d, e = x.shape[-1], self.num_experts
        router = Dense(e, use_bias=False, kernel_init=nn.initializers.lecun_normal(), name='router')
        with jax.default_matmul_precision('highest'):
            L = router(x.astype(jnp.float32))
        noisy = L
        if train and self.noise:
            noisy = L + normal(self.make_rng('noise'), L.shape) / e
        gates = jax.nn.softmax(noisy)

        D, C = self.route(gates)
        dropped = jnp.mean(jnp.sum(D, axis=(2, 3)) == 0)
        sow_metrics(self, routing_metrics(D, C) | {'dropped_tokens': dropped})
        sow_losses(self, self.auxiliary_losses(L, noisy))

        D, C = D.astype(self.dtype), C.astype(self.dtype)
        slots = jnp.einsum('bnd,bnec->becd', x, D)
        _, hidden = self.path_widths(d)['experts']
        Y = Experts(hidden, self.dropout, self.dtype, name='experts')(slots, train)
        y = jnp.einsum('becd,bnec->bnd', Y, C)
        if self.shared_expert:
            y += Mlp(hidden, self.dropout, self.dtype, name='shared_expert')(x, train)
        return y

    def _check(self) -> None:
        if self.num_experts < 1:
            raise UserError(f'num_experts is {self.num_experts}; give at least 1.')
        if self.capacity is not None and self.capacity < 1:
            raise UserError(f'capacity is {self.capacity}; give each expert at least 1 place.')
        if self.capacity_factor <= 0:
            raise UserError(f'capacity_factor is {self.capacity_factor}; give a positive number.')


class TokenChoice(SparseMoE):
    """V-MoE's layer: X (b n d) -> (b n d), each token by its best experts with a place left.

    A token that finds no place gets zeros. The gates of the chosen experts are used as they are,
    not made to sum to one.

    Attributes (beside SparseMoE's):
      capacity_factor: of n * experts_per_token / e, places of an expert.
      experts_per_token: how many experts a token chooses.
      batch_priority: the tokens with the greatest gates take places first.
      importance_weight, load_weight, gshard_weight: weights of the auxiliary losses. The load loss
        exists only where there is noise.
      loss_scope: experts are to be balanced in each 'image' by itself, or over the whole 'batch'.
    """

    capacity_factor: float = 1.05
    experts_per_token: int = 2
    batch_priority: bool = False
    importance_weight: float = 0.0
    load_weight: float = 0.0
    gshard_weight: float = 0.0
    loss_scope: str = 'image'

    @property
    def readings_per_token(self) -> int:
        return self.experts_per_token

    def route(self, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        capacity = self.places(gates.shape[1])
        return token_choice(gates, self.experts_per_token, capacity, self.batch_priority)

    def auxiliary_losses(self, L: jax.Array, noisy: jax.Array) -> Losses:
        losses = dict(super().auxiliary_losses(L, noisy))
        with_noise = noisy is not L
        if self.loss_scope == 'batch':
            L, noisy = L.reshape(1, -1, L.shape[-1]), noisy.reshape(1, -1, L.shape[-1])
        losses['importance_loss'] = self.importance_weight, importance_loss(jax.nn.softmax(L))
        losses['gshard_loss'] = self.gshard_weight, gshard_loss(jax.nn.softmax(noisy))
        if with_noise:
            losses['load_loss'] = self.load_weight, load_loss(L, noisy, self.experts_per_token)
        return losses

    def _check(self) -> None:
        super()._check()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f'experts_per_token is {self.experts_per_token}; '
                f'give a count from 1 to num_experts, {self.num_experts}.'
            )
        if self.loss_scope not in LOSS_SCOPES:
            raise UserError(
                f'loss_scope is {self.loss_scope!r}; use one of {", ".join(LOSS_SCOPES)}.'
            )


class ExpertChoice(SparseMoE):
    """Expert choice: X (b n d) -> (b n d), each expert reading the tokens of its greatest gates.

    Experts are always full; a token may be read by several, or by none and then gets zeros.

    Attributes (beside SparseMoE's):
      capacity_factor: of n / e, places of an expert: the experts that read a token, on average.
    """

    def route(self, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        return expert_choice(gates, self.places(gates.shape[1]))
