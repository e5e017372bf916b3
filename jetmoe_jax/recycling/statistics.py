"""Calibration statistics: how strongly each channel and neuron of a dense model is activated."""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams

# What the model sows in every block -> the units it measures.
POSITIONS = {
    'mlp_input': 'channels, after norm2',
    'mlp_act': 'neurons, after the GELU',
    'attn_proj_input': "attention's output channels, before its projection",
}
METRICS = ('L1', 'L2', 'active')
CO_ACTIVATION = 'co_activation'

Need = tuple[str, str, str]  # (block, position, metric)


@dataclass(frozen=True)
class Statistics:
    """Mean statistics over groups of images.

    Attributes:
      values: values[block][position][metric] is (units,) float64. L1 and L2 are norms, `active`
        counts values above zero, over the images and tokens of a group. 'co_activation', where it
        was asked for, is (units, units): how often two units are above zero together.
      images: number of images.
      fingerprint: of the checkpoint's parameters (see `fingerprint`).
      origin: in JSON values, what they were made from: checkpoint, data, image_size, ...
    """

    values: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    images: int
    fingerprint: str
    origin: Mapping[str, Any] = field(default_factory=dict)

    def of(self, block: str, position: str, metric: str = 'L2') -> np.ndarray:
        """(units,) of one block, named by its path; (units, units) for 'co_activation'."""
        return self.values[block][position][metric]

    def check(self, checkpoint: Checkpoint, needs: Iterable[Need]) -> None:
        """Refuses statistics that are not of this checkpoint, or lack something that is needed.

        Raises:
          UserError: another checkpoint, or values missing, of another shape, NaN or all zero.
        """
        source = checkpoint.report.source
        for block, position, metric in needs:
            what = f'{metric} for {position} of {block}'
            channels, neurons = checkpoint.model.blocks[block]
            units = neurons if position == 'mlp_act' else channels
            shape = (units, units) if metric == CO_ACTIVATION else (units,)
            value = self.values.get(block, {}).get(position, {}).get(metric)
            if value is None:
                how = ' with co-activation' if metric == CO_ACTIVATION else ''
                raise UserError(
                    f'the statistics have no {what} of {source}; collect them again{how}.'
                )
            if value.shape != shape:
                raise UserError(
                    f'the statistics have {value.shape} as {what}, {source} has {units} units; '
                    'they are of another model: collect them again.'
                )
            if not np.isfinite(value).all() or (value < 0).any() or not value.any():
                raise UserError(
                    f'the statistics have NaN, infinite, negative or only zero values as {what}; '
                    "check the checkpoint's weights and the images, and collect them again."
                )
        found = fingerprint(checkpoint.params)
        if found != self.fingerprint:
            raise UserError(
                f'the statistics are of {self.origin.get("checkpoint", "a checkpoint")} with '
                f'fingerprint {self.fingerprint[:12]!r}, {source} has {found[:12]!r} (at this '
                'image size); collect them again, or give the checkpoint they are of.'
            )

    def save(self, path: str | Path) -> None:
        """Writes one `.npz`."""
        nested = {block: dict(of_block) for block, of_block in self.values.items()}
        origin = {'images': self.images, 'fingerprint': self.fingerprint, **self.origin}
        np.savez(path, origin=json.dumps(origin), **flatten_dict(nested, sep=':'))

    @classmethod
    def load(cls, path: str | Path) -> 'Statistics':
        """Reads what `save` wrote."""
        try:
            with np.load(path) as f:
                origin = json.loads(str(f['origin']))
                values = {name: f[name] for name in f.files if name != 'origin'}
            images, of = origin.pop('images'), origin.pop('fingerprint')
            return cls(unflatten_dict(values, sep=':'), images, of, origin)
        except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(
                f'{path} cannot be read as saved statistics: {error}; collect them again.'
            ) from error


def fingerprint(params: FlatParams) -> str:
    """SHA-256 of flat parameters, whatever their order: names, shapes and float32 values."""
    digest = hashlib.sha256()
    for path in sorted(params):
        value = np.ascontiguousarray(params[path], np.float32)
        digest.update(f'{path}{value.shape}'.encode())
        digest.update(value.data)
    return digest.hexdigest()
