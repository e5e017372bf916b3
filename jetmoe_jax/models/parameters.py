"""Parameters as flat dicts, {'blocks_3/attn/qkv/kernel': array}: shapes and initial values."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

FlatParams = dict[str, Any]


def flatten(params: Mapping[str, Any]) -> FlatParams:
    """Nested dicts -> {'a/b/c': leaf}."""
    return flatten_dict(params, sep='/')


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{'a/b/c': leaf} -> nested dicts."""
    return unflatten_dict(dict(flat), sep='/')


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """('a/b/0', leaf) for every leaf of any pytree, in its order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator='/'), leaf) for path, leaf in leaves]


def param_shapes(model: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter, with no memory spent on them."""
    return flatten(jax.eval_shape(_init(model), jax.random.key(0)))


def param_count(model: nn.Module) -> int:
    """Number of trainable values."""
    return sum(leaf.size for leaf in param_shapes(model).values())


def init_params(model: nn.Module, seed: int, only: Collection[str] | None = None) -> FlatParams:
    """Initial values of all parameters, or of the paths in `only`, from a seed.

    A path's value does not depend on which others are asked for: compiled as one function, the
    draws that nobody asked for are never made. It runs on the CPU whatever else there is, so that
    the values are the same everywhere, and hardly optimised: compiling costs more than running.
    """
    if only is not None and not only:
        return {}

    def init(key: jax.Array) -> FlatParams:
        flat = flatten(_init(model)(key))
        return flat if only is None else {path: flat[path] for path in only}

    cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(cpu):
        init = jax.jit(init, compiler_options={'xla_backend_optimization_level': 0})
        return jax.tree.map(np.asarray, init(jax.random.key(seed)))


def _init(model: nn.Module) -> Callable[[jax.Array], Any]:
    images = jnp.zeros((1, *model.image_shape, 3))
    return lambda key: model.init(key, images)['params']
