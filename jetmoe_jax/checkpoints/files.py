"""State dicts on disk and on the hub: tensors under timm's names, whatever wrote them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetmoe_jax.checkpoints.google import read_npz
from jetmoe_jax.checkpoints.hub import download, hints_beside, is_hub_name
from jetmoe_jax.checkpoints.pytorch import read_pytorch
from jetmoe_jax.checkpoints.tensors import StateDict, strip_prefix, unreadable
from jetmoe_jax.checkpoints.transformers import from_dinov2, from_transformers
from jetmoe_jax.errors import UserError

__all__ = ['METADATA_KEY', 'StateDict', 'StateDictWriter', 'read_state_dict', 'write_state_dict']

# Key of a safetensors file's metadata under which we keep what shapes cannot tell (see load.py).
METADATA_KEY = 'jetmoe_jax'

_DTYPES = {
    'F64': np.float64,
    'F32': np.float32,
    'F16': np.float16,
    'BF16': ml_dtypes.bfloat16,
    'I64': np.int64,
    'I32': np.int32,
    'I16': np.int16,
    'I8': np.int8,
    'U8': np.uint8,
    'BOOL': np.bool_,
}


def read_state_dict(source: str | Path, *, revision: str | None = None) -> StateDict:
    """Reads a checkpoint of any supported format, under timm's names and in PyTorch's layout.

    Tensors keep their dtype; MoE Jetpack's names, which extend timm's, stay as they are.

    Args:
      source: the path of a `.safetensors`, a `.pth`, `.pt` or `.bin` of PyTorch, or a `.npz` of
        Google's; or a model of timm on the Hugging Face hub, `timm/NAME` or NAME. What exists as a
        path is read as one.
      revision: the hub's branch, tag or commit; the newest of the main branch when left out.

    Raises:
      UserError: there is no such file or model, or it cannot be read as what its name says.
    """
    path = Path(source)
    if not path.exists() and path.suffix not in _READERS and is_hub_name(str(source)):
        path = download(str(source), revision)
    elif revision is not None:
        raise UserError(f'{source} is not a name on the hub; revision={revision!r} needs one.')
    _check_path(path)
    state = _READERS[path.suffix](path)
    state = replace(state, path=str(source), hints=hints_beside(path) | dict(state.hints))
    return from_dinov2(from_transformers(strip_prefix(state)))


def write_state_dict(
    path: str | Path, tensors: Mapping[str, np.ndarray], hints: Mapping[str, Any] | None = None
) -> None:
    """Writes a `.safetensors` file, under a temporary name first, so that it is whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + '.partial')
    save_file(dict(tensors), partial, metadata=_metadata(hints))
    partial.chmod(0o644)  # safetensors makes it the owner's alone
    partial.replace(path)


class StateDictWriter:
    """Writes a `.safetensors` file of float32 tensors one by one, in any order.

    The bytes are those of `write_state_dict`. The file has the name it was given from the start:
    the caller moves it when it is whole.

    Args:
      shapes: name -> shape of every tensor.
    """

    def __init__(
        self,
        path: str | Path,
        shapes: Mapping[str, Sequence[int]],
        hints: Mapping[str, Any] | None = None,
    ):
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        header: dict[str, Any] = {'__metadata__': _metadata(hints)}
        self._begins, end = {}, 0
        for name, shape in sorted(self._shapes.items()):
            self._begins[name], end = end, end + 4 * math.prod(shape)
            offsets = [self._begins[name], end]
            header[name] = {'dtype': 'F32', 'shape': list(shape), 'data_offsets': offsets}
        text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
        text += b' ' * (-len(text) % 8)
        self._missing, self._start = set(self._shapes), 8 + len(text)
        self._file = open(path, 'wb')  # noqa: SIM115
        self._file.write(len(text).to_bytes(8, 'little') + text)

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes tensors at their places."""
        for name, value in tensors.items():
            if value.shape != self._shapes[name] or value.dtype != np.float32:
                raise ValueError(f'{name}: {value.dtype} {value.shape}, not {self._shapes[name]}')
            self._file.seek(self._start + self._begins[name])
            self._file.write(np.require(value, requirements='C').data)
            self._missing.discard(name)

    def close(self) -> None:
        """Ends the file, in which every tensor must have been written."""
        self._file.close()
        if self._missing:
            raise ValueError(
                f'{len(self._missing)} tensors are missing, {min(self._missing)} first'
            )


def _metadata(hints: Mapping[str, Any] | None) -> dict[str, str]:
    """One key only: safetensors writes several in any order, and the bytes are to be the same."""
    return {METADATA_KEY: json.dumps(dict(hints))} if hints else {'format': 'pt'}


def _check_path(path: Path) -> None:
    kinds = ', '.join(_READERS)
    if path.is_dir():
        raise UserError(f'{path} is a folder; give the checkpoint in it, a file ending in {kinds}.')
    if not path.exists():
        raise UserError(
            f'there is no checkpoint {path}; give the path of a file ending in {kinds}, or the '
            'name of a timm model on the hub, such as timm/vit_small_patch16_224.augreg_in21k.'
        )
    if path.suffix not in _READERS:
        raise UserError(f'{path} is of an unknown format; files ending in {kinds} are read.')
    if path.stat().st_size == 0:
        raise UserError(f'{path} is empty (0 bytes); copy or download it again.')


def _read_safetensors(path: Path) -> StateDict:
    """The tensors are read-only views of the mapped file: nothing is read before it is used."""
    try:
        with safe_open(path, framework='np') as file:  # checks the header against the file's size
            hints = json.loads((file.metadata() or {}).get(METADATA_KEY, '{}'))
    except (SafetensorError, ValueError, OSError) as error:
        raise unreadable(path, 'safetensors', error) from error

    data = np.asarray(np.memmap(path, np.uint8, mode='r'))
    start = 8 + int(data[:8].view('<u8')[0])
    header = json.loads(data[8:start].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == '__metadata__':
            continue
        if entry['dtype'] not in _DTYPES:
            raise UserError(
                f'{path}: tensor {name} is of type {entry["dtype"]}; '
                f'save it as one of {", ".join(_DTYPES)}.'
            )
        begin, end = entry['data_offsets']
        values = data[start + begin : start + end].view(_DTYPES[entry['dtype']])
        tensors[name] = values.reshape(entry['shape'])
    return StateDict(str(path), tensors, hints)


_READERS = {
    '.safetensors': _read_safetensors,
    '.npz': read_npz,
    '.pth': read_pytorch,
    '.pt': read_pytorch,
    '.bin': read_pytorch,
}
