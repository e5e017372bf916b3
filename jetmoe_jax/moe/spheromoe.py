"""SpheroMoE: soft routing on the hypersphere, with two paths of experts (MoE Jetpack, 2024).

Letters: b images, n tokens, d channels, e experts (core ones first, then universal), s slots per
expert.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.errors import UserError, known_key
from jetmoe_jax.moe.entmax import entmax15
from jetmoe_jax.moe.experts import Experts, expert_dropout, expert_width
from jetmoe_jax.moe.metrics import router_z_loss, routing_metrics, sow_losses, sow_metrics
from jetmoe_jax.moe.mlp import Dtype, LayerNorm
from jetmoe_jax.moe.noise import normal

# Both softmaxes are taken over a last axis: XLA's CPU backend takes ten times as long over an inner
# one, and thirty times as long over two together.


def softmax_over_tokens(z: jax.Array) -> jax.Array:
    """Softmax of z (b n e s) over tokens."""
    return jnp.moveaxis(jax.nn.softmax(jnp.moveaxis(z, 1, -1)), -1, 1)


def softmax_over_slots(z: jax.Array) -> jax.Array:
    """Softmax of z (b n e s) over experts and slots together."""
    return jax.nn.softmax(z.reshape(*z.shape[:2], -1)).reshape(z.shape)


def entmax15_over_slots(z: jax.Array) -> jax.Array:
    """1.5-entmax of z (b n e s) over experts and slots together."""
    return entmax15(z, axis=(2, 3))


COMBINE: dict[str, Callable[[jax.Array], jax.Array]] = {
    'softmax': softmax_over_slots,
    'entmax15': entmax15_over_slots,
}

# The layer's two published settings: what the released code trains, and what the paper describes.
SETTINGS = {
    'released': dict(
        temperature=0.5,
        combine='entmax15',
        projections=False,
        expert_dropout_mode='sample',
        expert_dropout=0.1,
        dropout=0.4,
    ),
    'paper': dict(
        temperature=1.5,
        combine='softmax',
        projections=True,
        expert_dropout_mode='expert',
        expert_dropout=0.1,
        dropout=0.4,
    ),
}


def setting(name: str) -> dict[str, Any]:
    """The arguments of a published setting; a UserError names the nearest if there is none."""
    return dict(SETTINGS[known_key('setting of the layer', name, SETTINGS)])


# The layer's parts, each taken out by itself: name -> the arguments that do it. 'single_path' is
# computed from the others, in `ablate`.
SWITCHES = {
    'no_query_l2norm': dict(query_l2norm=False),
    'no_query_norm': dict(query_norm=False),
    'shared_temperature': dict(shared_temperature=True),
    'fixed_temperature': dict(learn_temperature=False),
    'no_noise': dict(noise=False),
    'no_expert_dropout': dict(expert_dropout=0.0),
}
ABLATIONS = (*SWITCHES, 'single_path')


def ablate(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The layer's arguments without the part that an ablation names; as they are where it is ''.

    Args:
      arguments: of SpheroMoE, `core_experts` and `universal_experts` among them; in a ConvNeXt a
        tuple holds one value for each stage.
      name: one of ABLATIONS.

    Raises:
      UserError: there is no such ablation; the nearest is named.
    """
    if not name:
        return dict(arguments)
    if known_key('ablation', name, ABLATIONS) == 'single_path':
        return dict(arguments) | _single_path(arguments)
    return dict(arguments) | SWITCHES[name]


def _single_path(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All experts on one path and of one width: their mean, so that count and cost stay."""
    if isinstance(arguments['core_experts'], tuple):
        stages = [
            _single_path({k: v[i] if isinstance(v, tuple) else v for k, v in arguments.items()})
            for i in range(len(arguments['core_experts']))
        ]
        return {name: tuple(stage[name] for stage in stages) for name in stages[0]}
    core, universal = arguments['core_experts'], arguments['universal_experts']
    factor = arguments.get('universal_factor', SpheroMoE.universal_factor)
    width = arguments.get('hidden_factor', SpheroMoE.hidden_factor)
    return dict(
        core_experts=core + universal,
        universal_experts=0,
        hidden_factor=width * (core + factor * universal) / max(core + universal, 1),
    )


def l2norm(x: jax.Array) -> jax.Array:
    """x / (|x| + 1e-6) over the last axis, in float32; its gradient is finite at x = 0."""
    x = x.astype(jnp.float32)
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x / (jnp.sqrt(jnp.maximum(square, 1e-30)) + 1e-6)


class ScaleShift(nn.Module):
    """alpha * x + beta, a scale and a shift for each channel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        alpha = self.param('scale', nn.initializers.ones, (x.shape[-1],))
        beta = self.param('bias', nn.initializers.zeros, (x.shape[-1],))
        return alpha * x + beta


class SpheroMoE(nn.Module):
    """The SpheroMoE layer: X (b n d) -> (b n d), in place of a block's MLP.

    Attributes:
      core_experts: number of wide experts.
      universal_experts: number of experts narrower by `universal_factor`.
      hidden: hidden neurons that the factors are of; 4 d when None.
      hidden_factor: a core expert has `hidden * hidden_factor` hidden neurons, a universal one
        `hidden * hidden_factor * universal_factor`.
      slots_per_expert: slots (input rows) of each expert.
      temperature: initial value of both elements of T.
      shared_temperature: T has one element, for both softmaxes.
      learn_temperature: T is trained; otherwise its gradient is stopped.
      combine: 'softmax' or 'entmax15', the function f of the combine weights.
      projections: scale and shift the tokens (key) and the slot queries before they are normalised.
      query_norm: LayerNorm on the slot queries.
      query_l2norm: l2norm on the slot queries, after the LayerNorm.
      noise: noise N(0, 1) / e on both softmaxes' inputs in training.
      expert_dropout: rate at which whole experts are dropped in training.
      expert_dropout_mode: 'expert', a draw for each image and expert, or 'sample', one an image.
      dropout: dropout rate inside the experts.
      z_weight: weight of the router z-loss.

    Random keys in training: 'noise' and 'dropout'. Sows 'losses' and 'metrics' (moe/metrics.py).
    """

    core_experts: int
    universal_experts: int
    universal_factor: float = 0.25
    hidden: int | None = None
    hidden_factor: float = 1.0
    slots_per_expert: int = 1
    temperature: float = 0.5
    shared_temperature: bool = False
    learn_temperature: bool = True
    combine: str = 'entmax15'
    projections: bool = False
    query_norm: bool = True
    query_l2norm: bool = True
    noise: bool = True
    expert_dropout: float = 0.0
    expert_dropout_mode: str = 'sample'
    dropout: float = 0.0
    z_weight: float = 0.0
    dtype: Dtype = jnp.float32

    def path_widths(self, d: int) -> dict[str, tuple[int, int]]:
        """(experts, hidden width) of each path that has experts, in the order of their slots."""
        paths = {
            'core_experts': (self.core_experts, self.hidden_factor),
            'universal_experts': (
                self.universal_experts,
                self.hidden_factor * self.universal_factor,
            ),
        }
        return {
            name: (count, expert_width(self.hidden, d, factor))
            for name, (count, factor) in paths.items()
            if count
        }

    def multiply_adds(self, n: int, d: int) -> int:
        """Of one image of n tokens: logits, dispatch and combine, and the experts."""
        s = self.slots_per_expert
        return sum(e * s * (3 * n * d + 2 * d * h) for e, h in self.path_widths(d).values())

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        self._check()
        d = x.shape[-1]
        paths = self.path_widths(d)
        e, s = sum(count for count, _ in paths.values()), self.slots_per_expert
        phi = self.param('phi', _orthogonal_rows, (e, s, d))
        elements = 1 if self.shared_temperature else 2
        T = self.param('temperature', nn.initializers.constant(self.temperature), (elements,))
        T = jnp.broadcast_to(T if self.learn_temperature else jax.lax.stop_gradient(T), (2,))

        key, query = x.astype(jnp.float32), phi
        if self.projections:
            key = ScaleShift(name='key_projection')(key)
            query = ScaleShift(name='query_projection')(query)
        if self.query_norm:
            query = LayerNorm(epsilon=1e-5, name='query_norm')(query)
        K, Q = l2norm(key), l2norm(query) if self.query_l2norm else query

        L = jnp.einsum('bnd,esd->bnes', K, Q, precision='highest')
        noise = 0.0
        if train and self.noise:
            noise = normal(self.make_rng('noise'), L.shape) / e
        D = softmax_over_tokens(L / T[0] + noise)
        C = COMBINE[self.combine](L / T[1] + noise)
        sow_losses(self, {'z_loss': (self.z_weight, router_z_loss(L / T[1]))})
        sow_metrics(self, routing_metrics(D, C) | path_shares(C, paths) | temperatures(T))

        D, C = D.astype(self.dtype), C.astype(self.dtype)
        slots = jnp.einsum('bnd,bnes->besd', x, D)
        Y, first = [], 0
        for name, (count, hidden) in paths.items():
            experts = Experts(hidden, self.dropout, self.dtype, name=name)
            Y.append(experts(slots[:, first : first + count], train))
            first += count
        drop = expert_dropout(self.expert_dropout, self.expert_dropout_mode, train)
        Y = drop(jnp.concatenate(Y, axis=1))
        return jnp.einsum('besd,bnes->bnd', Y, C)

    def _check(self) -> None:
        if self.combine not in COMBINE:
            raise UserError(f'combine is {self.combine!r}; use one of {", ".join(COMBINE)}.')
        if self.core_experts < 0 or self.universal_experts < 0 or self.slots_per_expert < 1:
            raise UserError(
                f'{self.core_experts} core experts, {self.universal_experts} universal experts and '
                f'{self.slots_per_expert} slots: give counts of at least 0, 0 and 1.'
            )
        if self.core_experts + self.universal_experts == 0:
            raise UserError('core_experts and universal_experts are both 0; give one a count.')


def path_shares(C: jax.Array, paths: Mapping[str, tuple[int, int]]) -> dict[str, jax.Array]:
    """The share of the combine weights C (b n e s) that each path of experts gets."""
    shares, first = {}, 0
    for name, (count, _) in paths.items():
        share = jnp.mean(jnp.sum(C[:, :, first : first + count], axis=(2, 3)))
        shares[f'{name}_share'] = jax.lax.stop_gradient(share)
        first += count
    return shares


def temperatures(T: jax.Array) -> dict[str, jax.Array]:
    """The two temperatures by name."""
    return {'dispatch_temperature': T[0], 'combine_temperature': T[1]}


def _orthogonal_rows(key: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Orthogonal initialisation of phi (e s d) as an e x (s d) matrix."""
    e, s, d = shape
    return nn.initializers.orthogonal()(key, (e, s * d)).reshape(shape)
