"""Experts: MLPs with weights of their own, as one vmapped module, each reading its own slots."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from jetmoe_jax.errors import UserError
from jetmoe_jax.moe.mlp import Dtype, Mlp

# Logical axes of slots (b e s d): with images split over all devices, and with experts split over
# the expert axis. Going from one to the other is an all-to-all of slots; weights stay where they
# are. training/sharding.py says which mesh axes the names stand for; without a mesh they are inert.
BY_IMAGE = ('batch', None, None, None)
BY_EXPERT = ('expert_batch', 'expert', None, None)


class Experts(nn.Module):
    """Expert i applied to its slots: (b e s d) -> (b e s d). Kernels (e d h) and (e h d).

    The parameters may hold more experts than there are slots for: padding, by which devices divide
    any count. Padded experts read zeros, nothing reads them, and so their gradient is 0.
    """

    hidden: int
    dropout: float = 0.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, slots: jax.Array, train: bool = False) -> jax.Array:
        mlp = nn.vmap(
            Mlp,
            in_axes=(1, None),
            out_axes=1,
            variable_axes={'params': 0},
            split_rngs={'params': True, 'dropout': True},
        )(self.hidden, self.dropout, self.dtype, name='mlp')
        e = slots.shape[1]
        slots = jnp.pad(slots, ((0, 0), (0, self._held_experts(e) - e), (0, 0), (0, 0)))
        slots = nn.with_logical_constraint(slots, BY_EXPERT)
        Y = nn.with_logical_constraint(mlp(slots, train), BY_EXPERT)
        return nn.with_logical_constraint(Y, BY_IMAGE)[:, :e]

    def _held_experts(self, e: int) -> int:
        """Experts that the parameters hold; `e` at initialisation."""
        leaves = jax.tree.leaves(self.variables.get('params', {}))
        return leaves[0].shape[0] if leaves else e


def expert_width(hidden: int | None, d: int, factor: float) -> int:
    """Hidden neurons of an expert: `factor` times `hidden`, or times 4 d when that is None.

    Raises:
      UserError: none are left.
    """
    hidden = hidden or 4 * d
    width = round(hidden * factor) if 0 < factor < math.inf else 0
    if not width:
        raise UserError(
            f'experts of {factor:g} times {hidden} hidden neurons have none; '
            'give a larger hidden_factor or universal_factor.'
        )
    return width


EXPERT_DROPOUT_MODES = ('expert', 'sample')


def expert_dropout(rate: float, mode: str, train: bool) -> nn.Dropout:
    """Dropout of whole experts on their outputs (b e s d), or of an image's whole output.

    What is kept is scaled by 1/(1-p). Made within a layer's call, it is a submodule of that layer.

    Raises:
      UserError: `mode` is neither 'expert' nor 'sample'.
    """
    if mode not in EXPERT_DROPOUT_MODES:
        raise UserError(
            f'expert_dropout_mode is {mode!r}; use one of {", ".join(EXPERT_DROPOUT_MODES)}.'
        )
    shared_axes = (2, 3) if mode == 'expert' else (1, 2, 3)
    return nn.Dropout(rate, shared_axes, deterministic=not train)
