"""State dicts that PyTorch has pickled; torch is imported here alone, and only for reading them."""

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jetmoe_jax.checkpoints.tensors import StateDict, unreadable
from jetmoe_jax.errors import UserError

# Where training programs put the model among the optimiser and the rest; the first one is taken.
_NESTED = (
    'state_dict',
    'model',
    'module',
    'params',
    'state_dict_ema',
    'model_ema',
    'ema_state_dict',
    'teacher',
)


def read_pytorch(path: Path) -> StateDict:
    """Reads tensors only: a pickle that asks for anything else is refused, and nothing in it runs.

    Raises:
      UserError: PyTorch is absent, the file is damaged, needs more than tensors, or holds none.
    """
    zipped = zipfile.is_zipfile(path)
    with path.open('rb') as file:
        start = file.read(2)
    if not zipped and start[:1] != b'\x80':  # PyTorch before 1.6 wrote bare pickles
        why = 'the archive has no end' if start == b'PK' else 'it is neither a zip nor a pickle'
        raise unreadable(path, 'a PyTorch file', why)
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"reading {path} needs PyTorch, which is absent: pip install 'jetmoe_jax[torch]', or "
            'give a .safetensors file.'
        ) from error
    try:
        content = torch.load(path, map_location='cpu', weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        if needed := re.search(r'(?:GLOBAL|class|type) ([\w.]+)', str(error)):
            raise UserError(
                f'{path} is refused: it is a pickle that needs {needed[1]}, which may run code, '
                'and only tensors are read; where the file is trusted, load it with the program '
                'that wrote it and save its state dict alone.'
            ) from error
        raise unreadable(path, 'a PyTorch file', _first_line(error)) from error
    # Damage shows as almost any exception, depending on the byte; nothing of ours runs in there.
    except Exception as error:
        raise unreadable(path, 'a PyTorch file', _first_line(error)) from error
    return _state_dict(path, content, torch)


def _state_dict(path: Path, content: Any, torch: Any) -> StateDict:
    left_out = {}
    while isinstance(content, Mapping):
        key = next((key for key in _NESTED if isinstance(content.get(key), Mapping)), None)
        if key is None:
            break
        left_out |= {
            str(other): f'stands beside {key!r}, which is read' for other in content if other != key
        }
        content = content[key]
    entries = content if isinstance(content, Mapping) else {}
    tensors = {}
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            tensors[str(name)] = _to_numpy(path, name, value, torch)
        else:
            left_out[str(name)] = f'not a tensor ({type(value).__name__})'
    if not tensors:
        raise UserError(
            f'{path} has no tensors by name, but a {type(content).__name__} with the entries '
            f'{list(entries)[:5]}; save the state dict of the model, plain or under one of '
            f'{", ".join(_NESTED)}.'
        )
    return StateDict(str(path), tensors, left_out=left_out)


def _to_numpy(path: Path, name: str, tensor: Any, torch: Any) -> np.ndarray:
    try:
        if tensor.dtype == torch.bfloat16:  # numpy has no such type of its own
            return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f'{path}: tensor {name} is of a kind that is not read here ({tensor.layout}, '
            f'{tensor.dtype}); save it as an ordinary dense tensor.'
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
