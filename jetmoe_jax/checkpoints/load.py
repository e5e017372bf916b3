"""A state dict -> a model and its parameters, strictly, with a report of where each tensor went."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jetmoe_jax.checkpoints.architecture import infer_model
from jetmoe_jax.checkpoints.files import StateDict, read_state_dict, write_state_dict
from jetmoe_jax.checkpoints.layout import layout_of, state_dict
from jetmoe_jax.checkpoints.resample import resample_pos_embed
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, init_params, param_shapes
from jetmoe_jax.models.registry import Model
from jetmoe_jax.models.vit import ViT

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@dataclass
class LoadReport:
    """What became of the tensors of a file and of the parameters of the model."""

    source: str
    used: list[str] = field(default_factory=list)
    resampled: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)

    def table(self) -> str:
        """A few lines for the terminal."""
        lines = [f'{self.source}', f'  used as they are    {len(self.used)}']
        for name, how in self.resampled.items():
            lines.append(f'  resampled           {name}: {how}')
        for name, why in self.left_out.items():
            lines.append(f'  left out            {name}: {why}')
        for path in self.fresh:
            lines.append(f'  freshly initialised {path}')
        return '\n'.join(lines)


@dataclass
class Checkpoint:
    """A model with its parameters (flat, float32) and the preprocessing that they expect."""

    model: Model
    params: FlatParams
    report: LoadReport
    mean: tuple[float, ...] = IMAGENET['mean']
    std: tuple[float, ...] = IMAGENET['std']
    crop_fraction: float = 0.875
    class_names: tuple[str, ...] = ()


def load_checkpoint(
    path: str | Path,
    *,
    num_classes: int | None = None,
    revision: str | None = None,
    seed: int = 0,
    **given: Any,
) -> Checkpoint:
    """Reads a file into the model that it belongs to.

    Args:
      path: a file in any format of `read_state_dict`, or a timm name on the Hugging Face hub.
      num_classes: another count than the file's leaves its head out and makes a fresh one.
      revision: of the hub's repository.
      seed: of the parameters that are made fresh.
      **given: attributes of ViT that shapes cannot tell (num_heads, pool, image_size, ...).

    Raises:
      UserError: the file cannot be read, belongs to an unsupported model, or a tensor does not fit.
    """
    state = read_state_dict(path, revision=revision)
    hints = dict(state.hints)
    preprocessing = {
        name: tuple(value) if isinstance(value, list) else value
        for name in ('mean', 'std', 'crop_fraction', 'class_names')
        if (value := hints.pop(name, None)) is not None
    }
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in (hints | given).items()}
    model = infer_model(state.tensors, state.path, **given)
    if num_classes is not None and num_classes != model.num_classes:
        model = model.clone(num_classes=num_classes)
    params, report = fit(model, state, seed=seed)
    return Checkpoint(model, params, report, **preprocessing)


def fit(model: Model, state: StateDict, *, seed: int = 0) -> tuple[FlatParams, LoadReport]:
    """The parameters of `model` from a state dict, resampled where the patch grid differs.

    Raises:
      UserError: a tensor is missing, left over, not finite, or of another shape than the model's.
    """
    report = LoadReport(state.path, left_out=dict(state.left_out))
    layout = layout_of(model)
    tensors = dict(state.tensors)
    head = tensors.get(f'{layout.head}.weight')
    classes = 0 if head is None else len(head)
    params: FlatParams = {}
    for path, leaf in param_shapes(model).items():
        names = layout.tensor_names(path)
        if path.startswith('head/') and classes != model.num_classes:
            report.fresh.append(path)
            continue
        values = [_take(tensors, name, path, state.path) for name in names]
        if path == 'pos_embed':
            values = [_resample(model, values[0], report)]
        expected = layout.tensor_shapes(path, leaf.shape)
        for name, value in zip(names, values, strict=True):
            if value.shape != expected[name]:
                raise UserError(
                    f'{state.path}: tensor {name} has shape {value.shape}, the model expects '
                    f'{expected[name]}; check num_heads, image_size and the file.'
                )
            if not np.isfinite(value).all():
                raise UserError(f'{state.path}: tensor {name} has NaN or infinite values.')
        params[path] = np.require(layout.from_tensors(path, values), np.float32, 'C')
        report.used += [name for name in names if name not in report.resampled]
    for name in tensors:
        if name in (f'{layout.head}.weight', f'{layout.head}.bias'):
            report.left_out[name] = f'{classes} classes, the model has {model.num_classes}'
        else:
            raise UserError(
                f'{state.path}: tensor {name} {tensors[name].shape} has no place in the model '
                f'({len(tensors)} such tensors); ViTs, ConvNeXts and their MoE models are read.'
            )
    params |= init_params(model, seed, report.fresh)
    return params, report


def save_checkpoint(
    path: str | Path,
    model: Model,
    params: Mapping[str, Any],
    dtype: Any = np.float32,
    **hints: Any,
) -> None:
    """Writes flat parameters as a `.safetensors` file with timm's and MoE Jetpack's names.

    Args:
      hints: what shapes cannot tell (num_heads, pool, mean, std), kept in the file's metadata.
    """
    tensors = {name: value.astype(dtype) for name, value in state_dict(model, dict(params)).items()}
    write_state_dict(path, tensors, hints)


def untold(model: Model) -> dict[str, Any]:
    """The attributes that a state dict's shapes cannot tell, for its hints."""
    return {name: getattr(model, name) for name in ('num_heads', 'pool') if hasattr(model, name)}


def _take(tensors: dict[str, np.ndarray], name: str, path: str, source: str) -> np.ndarray:
    if name not in tensors:
        raise UserError(f'{source}: tensor {name} (our {path}) is missing.')
    return np.asarray(tensors.pop(name)).astype(np.float32)


def _resample(model: ViT, pos_embed: np.ndarray, report: LoadReport) -> np.ndarray:
    prefix = 0 if model.no_embed_class else model.prefix_tokens
    rows = pos_embed.shape[1] - prefix
    side = round(rows**0.5)
    if side * side == rows and (side, side) != model.grid:
        height, width = model.grid
        report.resampled['pos_embed'] = f'{side}x{side} -> {height}x{width} patches, bicubic'
        return resample_pos_embed(pos_embed, model.grid, prefix_tokens=prefix)
    return pos_embed
