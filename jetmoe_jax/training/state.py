"""The train state: all that a step reads and writes, and all that a checkpoint holds of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jetmoe_jax.models.parameters import FlatParams, unflatten
from jetmoe_jax.training.sharding import pad_experts, tree_shardings


class TrainState(struct.PyTreeNode):
    """step: int32 (); params: nested dicts, float32; opt_state: optax's; rng: key data, uint32.

    ema: the moving average of the parameters, None where it is not kept.
    """

    step: jax.Array
    params: Any
    ema: Any
    opt_state: Any
    rng: jax.Array


def create_state(
    params: FlatParams,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    ema: bool = False,
) -> TrainState:
    """A state at step 0, placed on the mesh; its moving average starts at the parameters."""
    build = partial(_build, optimizer=optimizer, seed=seed, ema=ema)
    params = unflatten(pad_experts(params, mesh))
    shardings = tree_shardings(jax.eval_shape(build, params), mesh)
    params = jax.device_put(params, shardings.params)
    return jax.jit(build, out_shardings=shardings)(params)


def abstract_state(
    param_shapes: FlatParams,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    ema: bool = False,
) -> TrainState:
    """Shapes and shardings of a state, to restore into, with no memory spent."""
    build = partial(_build, optimizer=optimizer, seed=0, ema=ema)
    padded = jax.eval_shape(partial(pad_experts, mesh=mesh), param_shapes)
    shapes = jax.eval_shape(build, unflatten(padded))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        tree_shardings(shapes, mesh),
    )


def to_items(state: TrainState) -> dict[str, Any]:
    """The state as the pytrees that a checkpoint holds, by name."""
    rest = {'step': state.step, 'opt_state': state.opt_state, 'rng': state.rng}
    items = {'params': state.params, 'train': rest}
    return items if state.ema is None else items | {'ema': state.ema}


def from_items(items: dict[str, Any]) -> TrainState:
    """The inverse of `to_items`."""
    return TrainState(params=items['params'], ema=items.get('ema'), **items['train'])


def _build(
    params: Any, optimizer: optax.GradientTransformation, seed: int, ema: bool
) -> TrainState:
    rng = jax.random.key_data(jax.random.key(seed))
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, average, optimizer.init(params), rng)
