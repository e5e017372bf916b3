"""Google's `.npz` ViT checkpoints: those of vision_transformer, and big_vision's spelling of them.

Names: vit_jax/models_vit.py of google-research/vision_transformer and big_vision/models/vit.py of
google-research/big_vision. Kernels are (in, out); attention kernels (d, heads, head width) and, for
the output, (heads, head width, d); the patch embedding is (height, width, in, out).
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jetmoe_jax.checkpoints.tensors import StateDict, join_qkv, unreadable
from jetmoe_jax.errors import UserError

# The model alone; the checkpoints of big_vision's training, newer and older, with the optimiser.
_PREFIXES = ('', 'params/', 'opt/target/')

_NAMES = {
    'cls': 'cls_token',
    'pos_embedding': 'pos_embed',
    'Transformer/pos_embedding': 'pos_embed',
    'Transformer/posembed_input/pos_embedding': 'pos_embed',
}
_MODULES = {
    'embedding': 'patch_embed.proj',
    'Transformer/encoder_norm': 'norm',
    'head': 'head',
}
# vision_transformer numbers all modules of a block together, big_vision each kind by itself.
_BLOCK_MODULES = {
    'LayerNorm_0': 'norm1',
    'LayerNorm_1': 'norm2',
    'LayerNorm_2': 'norm2',
    'MlpBlock_0/Dense_0': 'mlp.fc1',
    'MlpBlock_0/Dense_1': 'mlp.fc2',
    'MlpBlock_3/Dense_0': 'mlp.fc1',
    'MlpBlock_3/Dense_1': 'mlp.fc2',
} | {
    f'MultiHeadDotProductAttention_{i}/{theirs}': f'attn.{ours}'
    for i in (0, 1)
    for theirs, ours in (('query', 'q'), ('key', 'k'), ('value', 'v'), ('out', 'proj'))
}
_LEAVES = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}
_BLOCK = re.compile(r'Transformer/encoderblock(?:_(\d+))?/(.+)/(\w+)')


def read_npz(path: Path) -> StateDict:
    """Reads the model of a checkpoint, not its optimiser; the hints have the number of heads.

    Raises:
      UserError: the file is damaged, or is not a plain ViT of Google's.
    """
    if not zipfile.is_zipfile(path):
        raise unreadable(path, '.npz', 'it is not a whole zip archive')
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _translate(str(path), arrays)
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError) as error:
        raise unreadable(path, '.npz', error) from error


def _translate(source: str, arrays: Mapping[str, np.ndarray]) -> StateDict:
    prefix = next((p for p in _PREFIXES if p + 'embedding/kernel' in arrays), None)
    if prefix is None:
        raise UserError(
            f"{source} is not one of Google's ViT checkpoints: it has no array embedding/kernel "
            f'(its first is {next(iter(arrays), "absent")}).'
        )
    left_out = _left_out(arrays, prefix)
    tensors, heads = {}, set()
    for name in [name for name in arrays if name not in left_out]:
        for timm_name, value in _tensors(source, name.removeprefix(prefix), _native(arrays[name])):
            if timm_name.endswith('.attn.q.weight'):
                heads.add(_heads(source, name, value))
            tensors[timm_name] = _pytorch_layout(timm_name, value)
    if len(heads) != 1:
        raise UserError(f'{source} has blocks of {sorted(heads)} heads; one number is expected.')
    hints = dict(num_heads=heads.pop(), mean=(0.5,) * 3, std=(0.5,) * 3)
    return StateDict(source, join_qkv(tensors, source), hints, left_out)


def _left_out(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, str]:
    has_pre_logits = f'{prefix}pre_logits/kernel' in arrays
    reasons = {}
    for name in arrays:
        inner = name.removeprefix(prefix)
        if not name.startswith(prefix) or inner.startswith('opt/'):
            reasons[name] = 'not of the model (optimiser, step)'
        elif has_pre_logits and inner.startswith(('pre_logits/', 'head/')):
            # A dense layer and a tanh before the head, in the first ImageNet-21k models.
            reasons[name] = 'the model has no pre_logits, which the head of this file reads'
    return reasons


def _tensors(source: str, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of an array: one, or one for each block where the blocks are stacked in front."""
    module, _, leaf = name.rpartition('/')
    if name in _NAMES:
        yield _NAMES[name], value
    elif module in _MODULES and leaf in _LEAVES:
        yield f'{_MODULES[module]}.{_LEAVES[leaf]}', value
    elif (m := _BLOCK.fullmatch(name)) and m[2] in _BLOCK_MODULES and m[3] in _LEAVES:
        stem = f'{_BLOCK_MODULES[m[2]]}.{_LEAVES[m[3]]}'
        for i, block in enumerate(value) if m[1] is None else [(m[1], value)]:
            yield f'blocks.{i}.{stem}', block
    else:
        raise UserError(f'{source} has the array {name} {value.shape}, which no plain ViT has.')


def _heads(source: str, name: str, kernel: np.ndarray) -> int:
    if kernel.ndim != 3:
        raise UserError(
            f'{source}: {name} has shape {kernel.shape} in a block; '
            'expected (d, heads, head width).'
        )
    return kernel.shape[1]


def _pytorch_layout(name: str, value: np.ndarray) -> np.ndarray:
    """The values of a tensor of this timm name as (out, in), or (out, in, height, width)."""
    if name == 'patch_embed.proj.weight':
        return value.transpose(3, 2, 0, 1)
    if re.search(r'\.attn\.[qkv]\.', name):
        return value.reshape(-1) if name.endswith('bias') else value.reshape(len(value), -1).T
    if name.endswith('.attn.proj.weight'):
        return value.reshape(-1, value.shape[-1]).T
    return value.T if value.ndim == 2 else value


def _native(value: np.ndarray) -> np.ndarray:
    # numpy writes bfloat16 as two bytes of no known type.
    return value.view(ml_dtypes.bfloat16) if value.dtype == np.dtype('V2') else value
