"""Which device holds what: the mesh, and rules from parameter paths to its axes."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, named_leaves

# (pattern of a path, spec): the first that is found anywhere in the path holds. The optimiser's
# moments lie under the same paths, so that they are placed like the parameters.
EXPERTS = r'(^|_|/)experts/'
RULES = [
    (EXPERTS, P('expert')),
    (r'', P()),
]

# What the model's logical axes stand for (see moe/experts.py).
LOGICAL_AXES = [
    ('batch', ('data', 'expert')),
    ('expert_batch', 'data'),
    ('expert', 'expert'),
]

BATCH = P(('data', 'expert'))


def make_mesh(expert: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices with axes ('data', 'expert').

    Raises:
      UserError: the device count is not a multiple of `expert`.
    """
    devices = jax.devices() if devices is None else devices
    if expert < 1 or len(devices) % expert:
        raise UserError(
            f'config.mesh.expert is {expert} and there are {len(devices)} devices; '
            'give a number that divides them.'
        )
    return Mesh(np.asarray(devices).reshape(-1, expert), ('data', 'expert'))


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Refuses a batch that the devices do not divide."""
    if batch_size % mesh.size:
        raise UserError(
            f'config.batch_size is {batch_size} and there are {mesh.size} devices; '
            f'give a multiple of {mesh.size}.'
        )


def pad_experts(params: FlatParams, mesh: Mesh) -> FlatParams:
    """Flat parameters with the experts padded by zeros to a multiple of the expert axis.

    A layer gives padded experts no slot (see moe/experts.py), so that they get no gradient and stay
    zero; a checkpoint's padding is cut off or extended where it is restored.
    """
    m = mesh.shape['expert']

    def padded(path: str, leaf: jax.Array) -> jax.Array:
        if not re.search(EXPERTS, path) or leaf.shape[0] % m == 0:
            return leaf
        return jnp.pad(leaf, [(0, -leaf.shape[0] % m)] + [(0, 0)] * (leaf.ndim - 1))

    return {path: padded(path, leaf) for path, leaf in params.items()}


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of a pytree of parameters or of a train state."""
    specs = [_spec(path) for path, _ in named_leaves(tree)]
    treedef = jax.tree.structure(tree)
    return jax.tree.unflatten(treedef, [NamedSharding(mesh, spec) for spec in specs])


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This host's share of a batch -> global arrays, images split over all devices."""
    sharding = NamedSharding(mesh, BATCH)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def on_mesh(function: Any, mesh: Mesh) -> Any:
    """A jitted function whose calls, and `lower`, take the logical axes to be those of the mesh."""

    def under_mesh(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL_AXES):
                return function(*args)

        return call

    call = under_mesh(function)
    call.lower = under_mesh(function.lower)
    return call


def _spec(path: str) -> P:
    return next(spec for pattern, spec in RULES if re.search(pattern, path))
