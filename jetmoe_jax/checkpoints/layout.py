"""How a model's parameters lie in a file: the names and layouts of its family."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from jetmoe_jax.checkpoints import convnext, names
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.parameters import FlatParams, param_shapes


class Layout(NamedTuple):
    """Names and conversions of one family; see names.py for what each function does."""

    tensor_names: Callable[[str], tuple[str, ...]]
    to_tensors: Callable[[str, np.ndarray], dict[str, np.ndarray]]
    from_tensors: Callable[[str, Sequence[np.ndarray]], np.ndarray]
    head: str  # name of the classifier's module

    def tensor_shapes(self, path: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes in the file of the tensors that hold a parameter of the given shape."""
        probe = np.broadcast_to(np.float32(0), shape)
        return {name: np.shape(value) for name, value in self.to_tensors(path, probe).items()}


def layout_of(model: nn.Module) -> Layout:
    """The layout of a ViT or a ConvNeXt."""
    if isinstance(model, ConvNeXt):
        to_tensors = partial(convnext.to_tensors, conv_mlp=model.conv_mlp)
        return Layout(convnext.tensor_names, to_tensors, convnext.from_tensors, 'head.fc')
    return Layout(names.tensor_names, names.to_tensors, names.from_tensors, 'head')


def with_own_names(layout: Layout) -> Layout:
    """The layout, but what has no name in files keeps its path and shape: for use in memory."""

    def unnamed(path: str) -> bool:
        try:
            layout.tensor_names(path)
        except KeyError:
            return True
        return False

    return Layout(
        lambda path: (path,) if unnamed(path) else layout.tensor_names(path),
        lambda path, value: {path: value} if unnamed(path) else layout.to_tensors(path, value),
        lambda path, values: values[0] if unnamed(path) else layout.from_tensors(path, values),
        layout.head,
    )


def state_dict(model: nn.Module, params: FlatParams) -> dict[str, np.ndarray]:
    """Flat parameters -> a state dict with timm's and MoE Jetpack's names and layouts.

    Raises:
      UserError: a parameter has no name there, as those of the baseline MoE layers.
    """
    values = {path: np.asarray(value) for path, value in params.items()}
    tensors = _named(layout_of(model).to_tensors, values)
    # np.ascontiguousarray would give the scalars among them an axis.
    return {name: np.require(value, requirements='C') for name, value in tensors.items()}


def state_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's `state_dict`, which raises the same."""
    shapes = {path: leaf.shape for path, leaf in param_shapes(model).items()}
    return _named(layout_of(model).tensor_shapes, shapes)


def _named(convert: Callable[[str, Any], Mapping[str, Any]], params: FlatParams) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for path, value in params.items():
        try:
            tensors |= convert(path, value)
        except KeyError as error:
            raise UserError(
                f"{path} has no name in timm's or MoE Jetpack's files; write a folder instead."
            ) from error
    return tensors
