"""Calibration statistics: how strongly each channel and neuron of a dense model is activated.

One jitted forward pass a batch measures every block and position; nothing is kept per image.
"""

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jetmoe_jax.errors import UserError

# What the model sows in every block -> the units it measures.
POSITIONS = {
    'mlp_input': 'channels, after norm2',
    'mlp_act': 'neurons, after the GELU',
    'attn_proj_input': "attention's output channels, before its projection",
}
METRICS = ('L1', 'L2', 'active')


@dataclass(frozen=True)
class Statistics:
    """Mean statistics over groups of images; `values[position][metric]` is (blocks, units) float64.

    L1 and L2 are norms, `active` counts values above zero, over the images and tokens of a group.
    """

    values: Mapping[str, Mapping[str, np.ndarray]]
    images: int

    def of(self, position: str, block: int, metric: str = 'L2') -> np.ndarray:
        """(units,) of one block."""
        return self.values[position][metric][block]

    def save(self, path: str | Path) -> None:
        """Writes one `.npz`."""
        flat = {f'{p}/{m}': v for p, of_p in self.values.items() for m, v in of_p.items()}
        np.savez(path, images=self.images, **flat)

    @classmethod
    def load(cls, path: str | Path) -> 'Statistics':
        """Reads what `save` wrote."""
        try:
            with np.load(path) as f:
                values = {p: {m: f[f'{p}/{m}'] for m in METRICS} for p in POSITIONS}
                return cls(values, int(f['images']))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f'{path} cannot be read as saved statistics: {error}.') from error


def collect_statistics(
    model: nn.Module,
    params: Mapping,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    group: int = 1,
) -> Statistics:
    """Statistics of a dense model over batches of (images, mask).

    Args:
      model: a dense ViT.
      params: its parameters, nested.
      batches: normalised images (b height width 3) and a mask (b,) of 0 and 1.
      group: images that share a norm; the result does not depend on the batch size if that is a
        multiple of it. The released code's norms are over whole batches.

    Raises:
      UserError: there is no image.
    """
    blocks = range(model.depth)

    @jax.jit
    def measure(images: jax.Array, mask: jax.Array) -> dict:
        _, sown = model.apply({'params': params}, images, mutable=['intermediates'])
        sown = sown['intermediates']

        def stack(position: str) -> jax.Array:
            name = {'mlp_act': 'mlp', 'attn_proj_input': 'attn'}.get(position)
            of_block = [sown[f'blocks_{i}'][name] if name else sown[f'blocks_{i}'] for i in blocks]
            return jnp.stack([_group_sums(x[position][0], mask, group) for x in of_block], axis=1)

        return {position: stack(position) for position in POSITIONS}

    totals = {p: np.zeros((len(METRICS), model.depth, 1)) for p in POSITIONS}
    images_seen, groups = 0, 0
    for images, mask in batches:
        if len(images) % group:
            raise UserError(f'a batch of {len(images)} images is not a multiple of group {group}.')
        for position, value in measure(images, mask).items():
            # Added up in float64 on the host: float32 sums of 30,000 images would drift.
            totals[position] = totals[position] + np.asarray(value, np.float64)
        images_seen += int(np.sum(mask))
        groups += int(np.sum(np.reshape(mask, (-1, group)).any(axis=1)))
    if not groups:
        raise UserError('there is no calibration image; give at least one batch.')
    values = {p: dict(zip(METRICS, total / groups, strict=True)) for p, total in totals.items()}
    return Statistics(values, images_seen)


def _group_sums(x: jax.Array, mask: jax.Array, group: int) -> jax.Array:
    """(metrics, units): x (b n u) -> each group's norms and counts, summed over the groups."""
    b, n, u = x.shape
    x = (x.astype(jnp.float32) * mask[:, None, None]).reshape(b // group, group * n, u)
    l1 = jnp.abs(x).sum(axis=1)
    l2 = jnp.sqrt(jnp.square(x).sum(axis=1))
    active = (x > 0).sum(axis=1).astype(jnp.float32)
    return jnp.stack([l1.sum(axis=0), l2.sum(axis=0), active.sum(axis=0)])
