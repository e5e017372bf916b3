"""The record of a recycling: which dense channels and neurons the successor came from."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass
class Record:
    """Where the successor's values came from.

    `channels[block][path]` and `neurons[block][path]` are (experts, units): the predecessor's
    indices behind every expert of a path ('core_experts' or 'universal_experts'). `origin` tells it
    in words for every other parameter.
    """

    origin: dict[str, str] = field(default_factory=dict)
    channels: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    neurons: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        """Writes `record.json` (origins) and `record.npz` (`channels/BLOCK/PATH`, ...)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        units = {'channels': self.channels, 'neurons': self.neurons}
        np.savez_compressed(
            folder / 'record.npz',
            **{
                f'{unit}/{block}/{path}': index.astype(np.int32)
                for unit, of_block in units.items()
                for block, of_path in of_block.items()
                for path, index in of_path.items()
            },
        )
        (folder / 'record.json').write_text(json.dumps(self.origin, indent=1) + '\n')
