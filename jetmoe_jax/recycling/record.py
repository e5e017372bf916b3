"""The record of a recycling: which dense channels and neurons the successor came from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ByBlock = dict[str, dict[str, np.ndarray]]


@dataclass
class Record:
    """Where the successor's values came from.

    Attributes:
      origin: tells it in words for every parameter.
      channels, neurons: [block][path], (experts, units): the predecessor's indices behind every
        expert of a path ('core_experts', 'universal_experts', 'experts' or 'shared_expert').
      changed: [block][path], (experts, units): those of `neurons` that drop-upcycling drew again,
        or noise-upcycling added noise to.
      communities: [block][position], (units,): of each unit of the predecessor, where the strategy
        is 'graph'; position is 'mlp_input' (channels) or 'mlp_act' (neurons).
    """

    origin: dict[str, str] = field(default_factory=dict)
    channels: ByBlock = field(default_factory=dict)
    neurons: ByBlock = field(default_factory=dict)
    changed: ByBlock = field(default_factory=dict)
    communities: ByBlock = field(default_factory=dict)

    def add_experts(
        self,
        block: str,
        path: str,
        channels: np.ndarray,
        neurons: np.ndarray,
        sources: Sequence[str],
    ) -> None:
        """Notes a path's experts, cut from the MLPs of `sources` in turn (a shared one: all)."""
        self.channels.setdefault(block, {})[path] = channels
        self.neurons.setdefault(block, {})[path] = neurons
        how = '' if len(sources) == 1 else 'mean of ' if path == 'shared_expert' else 'in turn '
        self.origin[f'{block}/moe/{path}'] = f'{how}{", ".join(sources)}: {block}/mlp'

    def arrays(self) -> dict[str, np.ndarray]:
        """{'channels/BLOCK/PATH': int32 array, ...}"""
        kinds = ('channels', 'neurons', 'changed', 'communities')
        return {
            f'{kind}/{block}/{name}': index.astype(np.int32)
            for kind in kinds
            for block, of_block in getattr(self, kind).items()
            for name, index in of_block.items()
        }

    def save(self, folder: str | Path) -> None:
        """Writes `record.json` (origins) and `record.npz` (`arrays`)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / 'record.npz', **self.arrays())
        (folder / 'record.json').write_text(json.dumps(self.origin, indent=1) + '\n')
