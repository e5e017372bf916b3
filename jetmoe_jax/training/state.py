"""The train state: all that a step reads and writes, and all that a checkpoint holds of it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jetmoe_jax.models.parameters import FlatParams, unflatten
from jetmoe_jax.training.sharding import tree_shardings


class TrainState(struct.PyTreeNode):
    """step: int32 (); params: nested dicts, float32; opt_state: optax's; rng: key data, uint32."""

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array


def create_state(
    params: FlatParams, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh
) -> TrainState:
    """A state at step 0, placed on the mesh."""

    def build(params: Any) -> TrainState:
        rng = jax.random.key_data(jax.random.key(seed))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng)

    params = unflatten(params)
    shardings = tree_shardings(jax.eval_shape(build, params), mesh)
    params = jax.device_put(params, shardings.params)
    return jax.jit(build, out_shardings=shardings)(params)


def abstract_state(
    param_shapes: FlatParams, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes and shardings of a state, to restore into, with no memory spent."""

    def build(params: Any) -> TrainState:
        rng = jax.random.key_data(jax.random.key(0))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng)

    shapes = jax.eval_shape(build, unflatten(param_shapes))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        tree_shardings(shapes, mesh),
    )
