"""State dicts on disk: tensors by name, whatever wrote them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetmoe_jax.errors import UserError

# Key of a safetensors file's metadata under which we keep what shapes cannot tell (see load.py).
METADATA_KEY = 'jetmoe_jax'


@dataclass(frozen=True)
class StateDict:
    """Tensors by name, as a file holds them, and what the file says about itself."""

    path: str
    tensors: Mapping[str, np.ndarray]
    hints: Mapping[str, Any] = field(default_factory=dict)


def read_state_dict(path: str | Path) -> StateDict:
    """Reads a `.safetensors` file; the tensors keep their dtype.

    Raises:
      UserError: the file is missing, a folder, empty, cut off or not a safetensors file.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f'{path} is a folder; give the .safetensors file in it.')
    if not path.exists():
        raise UserError(f'there is no checkpoint {path}; give the path of a .safetensors file.')
    if path.suffix != '.safetensors':
        raise UserError(f'{path} does not end in .safetensors, the only format read here.')
    try:
        with safe_open(path, framework='np') as f:
            hints = json.loads((f.metadata() or {}).get(METADATA_KEY, '{}'))
            return StateDict(str(path), {name: f.get_tensor(name) for name in f.keys()}, hints)  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(
            f'{path} ({path.stat().st_size:,} bytes) cannot be read as safetensors: {error}; '
            'it may be cut off: copy or download it again.'
        ) from error


def write_state_dict(
    path: str | Path, tensors: Mapping[str, np.ndarray], hints: Mapping[str, Any] | None = None
) -> None:
    """Writes a `.safetensors` file, under a temporary name first, so that it is whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + '.partial')
    metadata = {'format': 'pt'} | ({METADATA_KEY: json.dumps(dict(hints))} if hints else {})
    save_file(dict(tensors), partial, metadata=metadata)
    partial.replace(path)
