"""A state dict -> a model and its parameters, strictly, with a report of where each tensor went."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetmoe_jax.checkpoints.architecture import HEAD_WIDTH, infer_model
from jetmoe_jax.checkpoints.files import StateDict, read_state_dict, write_state_dict
from jetmoe_jax.checkpoints.layout import Layout, layout_of, state_dict
from jetmoe_jax.checkpoints.resample import resample_pos_embed
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.layers import as_pair
from jetmoe_jax.models.parameters import FlatParams, init_params, param_shapes
from jetmoe_jax.models.registry import Model
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.spheromoe import SpheroMoE

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

_PREPROCESSING = ('mean', 'std', 'crop_fraction', 'class_names')
# What shapes cannot tell of a model, or not in every case.
_UNTOLD = ('num_heads', 'pool', 'image_size', 'no_embed_class', 'mlp_ratio')
_UNTOLD_OF_MOE = ('combine', 'query_l2norm')


@dataclass
class LoadReport:
    """What became of the tensors of a file and of the parameters of the model."""

    source: str
    used: list[str] = field(default_factory=list)
    adapted: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def table(self) -> str:
        """A few lines for the terminal."""
        lines = [f'{self.source}', f'  used as they are    {len(self.used)}']
        for name, how in self.adapted.items():
            lines.append(f'  adapted             {name}: {how}')
        for name, why in self.left_out.items():
            lines.append(f'  left out            {name}: {why}')
        for path in self.fresh:
            lines.append(f'  freshly initialised {path}')
        lines += [f'  assumed             {what}' for what in self.assumed]
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
    allow_nonfinite: bool = False,
    seed: int = 0,
    **given: Any,
) -> Checkpoint:
    """Reads a file into the model that it belongs to.

    Args:
      path: a file in any format of `read_state_dict`, or a timm name on the Hugging Face hub.
      num_classes: another count than the file's leaves its head out and makes a fresh one.
      revision: of the hub's repository.
      allow_nonfinite: takes NaN and infinite weights, which are refused otherwise.
      seed: of the parameters that are made fresh.
      **given: attributes of ViT that shapes cannot tell (num_heads, pool, image_size, ...).

    Raises:
      UserError: the file cannot be read, belongs to an unsupported model, or a tensor does not fit.
    """
    state = read_state_dict(path, revision=revision)
    # What a hub's config says of pooling or heads means nothing to a ConvNeXt.
    family = ConvNeXt if 'stem.0.weight' in state.tensors else ViT
    known = (*family.__dataclass_fields__, *_PREPROCESSING)
    hints = {name: value for name, value in state.hints.items() if name in known}
    preprocessing = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _PREPROCESSING
        if (value := hints.pop(name, None)) is not None
    }
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in (hints | given).items()}
    if 'moe' in hints and 'moe' in given:
        given['moe'] = dict(hints['moe']) | dict(given['moe'])
    model = infer_model(state.tensors, state.path, **given)
    if num_classes is not None and num_classes != model.num_classes:
        model = model.clone(num_classes=num_classes)
    if 'class_names' in preprocessing and len(preprocessing['class_names']) != model.num_classes:
        del preprocessing['class_names']
    params, report = fit(model, state, allow_nonfinite=allow_nonfinite, seed=seed)
    if isinstance(model, ViT) and 'num_heads' not in given and not model.qk_norm:
        report.assumed.append(f'num_heads {model.num_heads}: heads {HEAD_WIDTH} wide, as is usual')
    return Checkpoint(model, params, report, **preprocessing)


def fit(
    model: Model,
    state: StateDict,
    *,
    layout: Layout | None = None,
    allow_nonfinite: bool = False,
    seed: int = 0,
) -> tuple[FlatParams, LoadReport]:
    """The parameters of `model` from a state dict, resampled where the patch grid differs.

    Args:
      layout: of the state dict; the family's, when None.

    Raises:
      UserError: a tensor is missing, left over, not finite, or of another shape than the model's.
    """
    report = LoadReport(state.path, left_out=dict(state.left_out))
    layout = layout or layout_of(model)
    tensors = dict(state.tensors)
    head = tensors.get(f'{layout.head}.weight')
    classes = 0 if head is None else len(head)
    params: FlatParams = {}
    for path, leaf in param_shapes(model).items():
        names = layout.tensor_names(path)
        if path.startswith('head/') and classes != model.num_classes:
            report.fresh.append(path)
            continue
        if path.startswith('fc_norm/') and names[0] not in tensors and 'norm.weight' in tensors:
            names = tuple(name.removeprefix('fc_') for name in names)
            report.adapted[names[0]] = f"the class token's, used as our {path}"
        values = [_take(tensors, name, path, state.path) for name in names]
        if path == 'pos_embed':
            values = [_resample(model, values[0], state, report)]
        expected = layout.tensor_shapes(path, leaf.shape).values()
        for name, value, shape in zip(names, values, expected, strict=True):
            if value.shape != shape:
                raise UserError(
                    f'{state.path}: tensor {name} has shape {value.shape}, the model expects '
                    f'{shape}; check experts, --num_heads and --image_size, and the file.'
                )
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise UserError(
                    f'{state.path}: tensor {name} is of type {value.dtype}; weights are floating.'
                )
            if not (allow_nonfinite or np.isfinite(value).all()):
                raise UserError(
                    f'{state.path}: tensor {name} has NaN or infinite values; take another file, '
                    'or --allow_nonfinite if that is meant.'
                )
        params[path] = _own(layout.from_tensors(path, values))
        report.used += [name for name in names if name not in report.adapted]
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


def save_checkpoint(path: str | Path, checkpoint: Checkpoint, dtype: Any = np.float32) -> None:
    """Writes a `.safetensors` file with timm's names (dense) or MoE Jetpack's (V-JetMoE).

    What shapes cannot tell (num_heads, pool, mean, std, class names) goes into the file's metadata.
    """
    tensors = {}
    for name, value in state_dict(checkpoint.model, checkpoint.params).items():
        with np.errstate(over='ignore'):
            tensors[name] = value.astype(dtype)
        if np.isfinite(value).all() and not np.isfinite(tensors[name]).all():
            raise UserError(f'tensor {name} is too large for {np.dtype(dtype)}; write float32.')
    write_state_dict(path, tensors, hints_of(checkpoint))


def hints_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What shapes cannot tell of a checkpoint, as the metadata of its file."""
    model = checkpoint.model
    hints = {name: getattr(model, name) for name in _UNTOLD if hasattr(model, name)}
    hints |= {name: getattr(checkpoint, name) for name in _PREPROCESSING}
    if model.moe:
        hints['moe'] = {
            name: model.moe.get(name, getattr(SpheroMoE, name)) for name in _UNTOLD_OF_MOE
        }
    return hints


def _take(tensors: dict[str, np.ndarray], name: str, path: str, source: str) -> np.ndarray:
    if name not in tensors:
        raise UserError(f'{source}: tensor {name} (our {path}) is missing.')
    return np.asarray(tensors.pop(name))


def _own(value: np.ndarray) -> np.ndarray:
    """A float32 copy in rows. Blocks of a transposed matrix fit the cache: 7 times faster."""
    copy = np.empty(value.shape, np.float32)
    if value.ndim == 2 and value.flags.f_contiguous:
        for i in range(0, value.shape[1], 64):
            copy[:, i : i + 64] = value[:, i : i + 64]
    else:
        copy[...] = value
    return copy


def _resample(
    model: ViT, pos_embed: np.ndarray, state: StateDict, report: LoadReport
) -> np.ndarray:
    """The position embedding on the model's grid; the file's is the one it tells, or a square."""
    prefix = 0 if model.no_embed_class else model.prefix_tokens
    side = math.isqrt(max(pos_embed.shape[1] - prefix, 0))
    grid = (side, side)
    if 'image_size' in state.hints:
        grid = tuple(pixels // model.patch_size for pixels in as_pair(state.hints['image_size']))
    if grid == model.grid or math.prod(grid) + prefix != pos_embed.shape[1]:
        return pos_embed
    (rows, columns), (height, width) = grid, model.grid
    report.adapted['pos_embed'] = f'{rows}x{columns} -> {height}x{width} patches, bicubic'
    return resample_pos_embed(pos_embed, model.grid, prefix_tokens=prefix, source_grid=grid)
