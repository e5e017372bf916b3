"""Which device holds what: the mesh, and rules from parameter paths to its axes."""

import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetmoe_jax.errors import UserError

# (pattern of a path, spec); the first that is found anywhere in the path holds. The optimiser's
# moments lie under the same paths, so that they are placed like the parameters.
RULES = [
    (r'(^|_|/)experts/', P('expert')),
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


def check_experts(params: Any, mesh: Mesh) -> None:
    """Refuses experts that the expert axis does not divide; params may be shapes."""
    for path, leaf in _paths(params):
        if re.search(RULES[0][0], path) and leaf.shape[0] % mesh.shape['expert']:
            raise UserError(
                f'{path} has {leaf.shape[0]} experts and config.mesh.expert is '
                f'{mesh.shape["expert"]}; give a number that divides the experts.'
            )


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of a pytree of parameters or of a train state."""
    specs = [_spec(path) for path, _ in _paths(tree)]
    treedef = jax.tree.structure(tree)
    return jax.tree.unflatten(treedef, [NamedSharding(mesh, spec) for spec in specs])


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This host's share of a batch -> global arrays, images split over all devices."""
    sharding = NamedSharding(mesh, BATCH)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def on_mesh(function: Any, mesh: Mesh) -> Any:
    """Calls (and so compiles) `function` where the model's logical axes mean those of the mesh."""

    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL_AXES):
            return function(*args)

    return call


def _spec(path: str) -> P:
    return next(spec for pattern, spec in RULES if re.search(pattern, path))


def _paths(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator='/'), leaf) for path, leaf in leaves]
