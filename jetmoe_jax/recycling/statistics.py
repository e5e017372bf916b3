"""Calibration statistics: how strongly each channel and neuron of a dense model is activated.

One jitted forward pass a batch measures every block and position; nothing is kept per image.
"""

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import flatten
from jetmoe_jax.models.registry import Model

# What the model sows in every block -> the units it measures.
POSITIONS = {
    'mlp_input': 'channels, after norm2',
    'mlp_act': 'neurons, after the GELU',
    'attn_proj_input': "attention's output channels, before its projection",
}
METRICS = ('L1', 'L2', 'active')


@dataclass(frozen=True)
class Statistics:
    """Mean statistics over groups of images: `values[block][position][metric]` is (units,) float64.

    L1 and L2 are norms, `active` counts values above zero, over the images and tokens of a group.
    """

    values: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    images: int

    def of(self, block: str, position: str, metric: str = 'L2') -> np.ndarray:
        """(units,) of one block, named by its path."""
        return self.values[block][position][metric]

    def check(self, model: Model) -> None:
        """Refuses statistics of another model than this one."""
        for block, (channels, neurons) in model.blocks.items():
            for position, units in (('mlp_input', channels), ('mlp_act', neurons)):
                found = self.values.get(block, {}).get(position, {}).get('L2')
                if np.shape(found) != (units,):
                    raise UserError(
                        f'the statistics have {np.shape(found)} for {position} of {block}, the '
                        f'predecessor has {units} units; they are of another model: collect them.'
                    )

    def save(self, path: str | Path) -> None:
        """Writes one `.npz`."""
        nested = {block: dict(of_block) for block, of_block in self.values.items()}
        np.savez(path, images=self.images, **flatten_dict(nested, sep=':'))

    @classmethod
    def load(cls, path: str | Path) -> 'Statistics':
        """Reads what `save` wrote."""
        try:
            with np.load(path) as f:
                images = int(f['images'])
                values = {name: f[name] for name in f.files if name != 'images'}
            return cls(unflatten_dict(values, sep=':'), images)
        except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f'{path} cannot be read as saved statistics: {error}.') from error


def collect_statistics(
    model: Model,
    params: Mapping,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    group: int = 1,
) -> Statistics:
    """Statistics of a dense model over batches of (images, mask).

    Args:
      model: a dense ViT or ConvNeXt.
      params: its parameters, nested.
      batches: normalised images (b height width 3) and a mask (b,) of 0 and 1.
      group: images that share a norm; the result does not depend on the batch size if that is a
        multiple of it. The released code's norms are over whole batches.

    Raises:
      UserError: there is no image.
    """

    @jax.jit
    def measure(images: jax.Array, mask: jax.Array) -> dict[str, dict[str, jax.Array]]:
        _, sown = model.apply({'params': params}, images, mutable=['intermediates'])
        measured = {block: {} for block in model.blocks}
        for path, (x,) in flatten(sown['intermediates']).items():
            block = next((b for b in model.blocks if path.startswith(b + '/')), None)
            if (position := path.rpartition('/')[2]) in POSITIONS:
                measured[block][position] = _group_sums(x, mask, group)
        return measured

    totals: dict[str, dict[str, np.ndarray]] = {}
    images_seen, groups = 0, 0
    for images, mask in batches:
        if len(images) % group:
            raise UserError(f'a batch of {len(images)} images is not a multiple of group {group}.')
        # Added up in float64 on the host: float32 sums of 30,000 images would drift.
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), measure(images, mask))
        totals = jax.tree.map(np.add, totals, sums) if totals else sums
        images_seen += int(np.sum(mask))
        groups += int(np.sum(np.reshape(mask, (-1, group)).any(axis=1)))
    if not groups:
        raise UserError('there is no calibration image; give at least one batch.')
    values = jax.tree.map(lambda total: dict(zip(METRICS, total / groups, strict=True)), totals)
    return Statistics(values, images_seen)


def _group_sums(x: jax.Array, mask: jax.Array, group: int) -> jax.Array:
    """(metrics, units): x (b n u) -> each group's norms and counts, summed over the groups."""
    b, n, u = x.shape
    x = (x.astype(jnp.float32) * mask[:, None, None]).reshape(b // group, group * n, u)
    l1 = jnp.abs(x).sum(axis=1)
    l2 = jnp.sqrt(jnp.square(x).sum(axis=1))
    active = (x > 0).sum(axis=1).astype(jnp.float32)
    return jnp.stack([l1.sum(axis=0), l2.sum(axis=0), active.sum(axis=0)])
