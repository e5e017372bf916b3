"""ConvNeXt in timm's files: names, layouts and the architecture that a state dict belongs to.

MoE layers have the names of the MoE Jetpack's ViT, below their block; see names.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetmoe_jax.checkpoints import names
from jetmoe_jax.checkpoints.tensors import check_names
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import KERNEL_SIZE, ConvNeXt

LAYER_SCALE_INIT = 1e-6  # timm's; it matters only where a layer scale is made afresh

# (path of a parameter's module, name of its tensors); `*` stands for a stage's or block's number.
_MODULES = {
    'stem_conv': 'stem.0',
    'stem_norm': 'stem.1',
    'stages_*/downsample_norm': 'stages.*.downsample.0',
    'stages_*/downsample_conv': 'stages.*.downsample.1',
    'stages_*/blocks_*/conv_dw': 'stages.*.blocks.*.conv_dw',
    'stages_*/blocks_*/norm': 'stages.*.blocks.*.norm',
    'stages_*/blocks_*/mlp/fc1': 'stages.*.blocks.*.mlp.fc1',
    'stages_*/blocks_*/mlp/fc2': 'stages.*.blocks.*.mlp.fc2',
    'stages_*/blocks_*/ls': 'stages.*.blocks.*',
    'head_norm': 'head.norm',
    'head': 'head.fc',
}
_LEAVES = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias', 'gamma': 'gamma'}
_NUMBER = re.compile(r'(?<=stages_)\d+|(?<=blocks_)\d+')
_MOE = re.compile(r'stages_(\d+)/(blocks_\d+/moe/.*)')
_PATCH_SIZES = re.compile(r'(stem|downsample)_conv/kernel$')

_UNSUPPORTED = {
    r'\.grn\.': 'the global response normalisation of ConvNeXt V2',
    r'^norm_pre\.': 'a norm before the pooling (head_norm_first)',
    r'^head\.pre_logits': 'a hidden layer in the head',
    r'^stem\.2\.': 'an overlapping stem',
    r'\.shortcut\.': 'a convolution on the residual branch',
    r'^downsample_layers\.|\.dwconv\.': "the names of the authors' release, not timm's",
}


def tensor_names(path: str) -> tuple[str, ...]:
    """Names of the tensors that hold a parameter: one, but two for the temperatures.

    Raises:
      KeyError: the path is not a parameter of any ConvNeXt.
    """
    if moe := _MOE.match(path):
        return tuple(f'stages.{moe[1]}.{name}' for name in names.tensor_names(moe[2]))
    module, _, leaf = _NUMBER.sub('*', path).rpartition('/')
    name = f'{_MODULES[module]}.{_LEAVES[leaf]}'
    for number in _NUMBER.findall(path):
        name = name.replace('*', number, 1)
    return (name,)


def to_tensors(path: str, value: np.ndarray, conv_mlp: bool = False) -> dict[str, np.ndarray]:
    """A parameter -> its tensors by name, in the file's layout.

    Args:
      conv_mlp: the file holds the kernels of the MLPs as 1x1 convolutions.
    """
    if moe := _MOE.match(path):
        return dict(zip(tensor_names(path), names.to_tensors(moe[2], value).values(), strict=True))
    (name,) = tensor_names(path)
    if path.endswith('/conv_dw/kernel'):
        value = value.transpose(3, 2, 0, 1)
    elif _PATCH_SIZES.search(path):
        p = 2 if 'downsample' in path else round((value.shape[0] / 3) ** 0.5)
        value = value.reshape(p, p, -1, value.shape[-1]).transpose(3, 2, 0, 1)
    elif path.endswith('/kernel'):
        value = value.T
        if conv_mlp and '/mlp/' in path:
            value = value[:, :, None, None]
    return {name: value}


def from_tensors(path: str, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The inverse of `to_tensors`: the tensors that hold a parameter, in order -> its value."""
    if moe := _MOE.match(path):
        return names.from_tensors(moe[2], tensors)
    (value,) = tensors
    if path.endswith('/conv_dw/kernel'):
        return value.transpose(2, 3, 1, 0)
    if path.endswith('/kernel'):  # (out, in) or (out, in, p, p)
        return np.moveaxis(value, (0, 1), (-1, -2)).reshape(-1, value.shape[0])
    return value


def infer_convnext(tensors: Mapping[str, np.ndarray], source: str, **given: Any) -> ConvNeXt:
    """The ConvNeXt of a timm-named state dict.

    Args:
      tensors: the state dict.
      source: its name in error messages.
      **given: attributes of ConvNeXt that the caller knows (image_size, ...); they win.

    Raises:
      UserError: the state dict is not that of a ConvNeXt in a supported variant.
    """
    needed = ('stem.0.weight', 'stem.1.weight', 'stages.0.blocks.0.conv_dw.weight')
    check_names(tensors, source, 'ConvNeXt', _UNSUPPORTED, needed)
    shape = {name: np.shape(value) for name, value in tensors.items()}
    kernel = shape['stages.0.blocks.0.conv_dw.weight'][2:]
    if kernel != (KERNEL_SIZE, KERNEL_SIZE):
        raise UserError(f'{source} has depthwise kernels of size {kernel}; only 7x7 is supported.')

    found = sorted(
        (int(m[1]), int(m[2]))
        for name in shape
        if (m := re.match(r'stages\.(\d+)\.blocks\.(\d+)\.conv_dw\.weight$', name))
    )
    depths = [0] * (1 + found[-1][0])
    for stage, _ in found:
        depths[stage] += 1
    widths = tuple(
        shape.get(f'stages.{s}.blocks.0.conv_dw.weight', (0,))[0] for s in range(len(depths))
    )
    if not all(widths):
        raise UserError(f'{source} has no blocks in stage {widths.index(0)}; it may be cut off.')
    moe_blocks = tuple((s, i) for s, i in found if f'stages.{s}.blocks.{i}.mlp.phi' in shape)
    dense = next((v for n, v in shape.items() if n.endswith('.mlp.fc1.weight')), None)
    mlp_ratio = dense[0] / dense[1] if dense is not None else ConvNeXt.mlp_ratio
    hiddens = [round(width * given.get('mlp_ratio', mlp_ratio)) for width in widths]
    attributes = dict(
        patch_size=shape['stem.0.weight'][-1],
        widths=widths,
        depths=tuple(depths),
        mlp_ratio=mlp_ratio,
        conv_mlp=dense is not None and len(dense) == 4,
        num_classes=shape['head.fc.weight'][0] if 'head.fc.weight' in shape else 0,
        layer_scale=LAYER_SCALE_INIT if 'stages.0.blocks.0.gamma' in shape else None,
        moe_blocks=moe_blocks,
        moe=_infer_moe(shape, moe_blocks, hiddens) if moe_blocks else None,
    )
    if 'moe' in given and attributes['moe'] is not None:
        given['moe'] = attributes['moe'] | dict(given['moe'])
    return ConvNeXt(**(attributes | given))


def _infer_moe(
    shape: Mapping[str, tuple[int, ...]],
    moe_blocks: Sequence[tuple[int, int]],
    hiddens: Sequence[int],
) -> dict[str, Any]:
    """The arguments of the MoE layers; expert counts, slots and widths by stage.

    Args:
      hiddens: hidden neurons of a dense MLP in each stage.
    """
    stages, last = len(hiddens), ''
    core, universal, slots = [0] * stages, [0] * stages, [1] * stages
    wide, narrow = [1.0] * stages, [0.25] * stages
    for stage, i in moe_blocks:
        last = f'stages.{stage}.blocks.{i}.mlp.'
        core_fc1 = shape.get(last + 'core_experts.vit_fc1.weight', (0, 0, 0))
        universal_fc1 = shape.get(last + 'univ_experts.vit_fc1.weight', (0, 0, 0))
        core[stage], universal[stage] = core_fc1[0], universal_fc1[0]
        slots[stage] = shape[last + 'phi'][1]
        width = core_fc1[1] or hiddens[stage]
        wide[stage] = width / hiddens[stage]
        if universal_fc1[1]:
            narrow[stage] = universal_fc1[1] / width
    return dict(
        core_experts=tuple(core),
        universal_experts=tuple(universal),
        hidden_factor=tuple(wide),
        universal_factor=tuple(narrow),
        slots_per_expert=tuple(slots),
        query_norm=last + 'slot_norm.weight' in shape,
        projections=last + 'phi_key_proj.gamma' in shape,
    )
