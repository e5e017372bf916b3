"""Calibration statistics: how strongly each channel and neuron of a dense model is activated.

One jitted forward pass a batch measures every block and position; nothing is kept per image. Each
device adds up its own images, and the devices' sums meet at the end.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, flatten, unflatten
from jetmoe_jax.models.registry import Model

# What the model sows in every block -> the units it measures.
POSITIONS = {
    'mlp_input': 'channels, after norm2',
    'mlp_act': 'neurons, after the GELU',
    'attn_proj_input': "attention's output channels, before its projection",
}
METRICS = ('L1', 'L2', 'active')
CO_ACTIVATION = 'co_activation'
# A device takes so many images at a time, whatever the batch: the same compiled pass gives each
# image the same rounding.
IMAGES_AT_ONCE = 16

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


def collect_statistics(
    checkpoint: Checkpoint,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    group: int = 1,
    co_activation: bool = False,
    transform: Callable[[jax.Array], jax.Array] = lambda images: images,
    devices: Sequence[jax.Device] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Statistics:
    """Statistics of a dense model over batches of (images, mask), on all devices.

    Args:
      checkpoint: a dense ViT or ConvNeXt.
      batches: images (b height width 3) and a mask (b,) of 0 and 1; on several hosts each gives its
        own share, of one size.
      group: images that share a norm; the result does not depend on the batch size if that is a
        multiple of it. The released code's norms are over whole batches.
      co_activation: also how often any two units of a position are above zero together.
      transform: makes normalised images of the batches', on the device.
      devices: all there are, when None.
      origin: what is known of the images, to be kept with the statistics.

    Raises:
      UserError: there is no image, or a batch is not a multiple of `group`.
    """
    mesh = Mesh(jax.devices() if devices is None else devices, ('data',))
    by_image, everywhere = (NamedSharding(mesh, spec) for spec in (P('data'), P()))
    share = group * -(-IMAGES_AT_ONCE // group)  # images of a device
    params = jax.device_put(checkpoint.params, everywhere)

    def measure(params: FlatParams, images: jax.Array, mask: jax.Array) -> Any:
        sown = sow(checkpoint.model, params, transform(images))
        return jax.tree.map(lambda x: batch_sums(x, mask, group, co_activation), sown)

    def add_batch(totals: Any, params: FlatParams, images: jax.Array, mask: jax.Array) -> Any:
        sums = measure(params, images, mask)
        mine = jax.tree.map(lambda x: x[0], totals)
        return jax.tree.map(lambda x: x[None], jax.tree.map(add, mine, sums, is_leaf=_is_sum))

    specs = (P('data'), P(), P('data'), P('data'))
    add_batch = jax.jit(
        jax.shard_map(add_batch, mesh=mesh, in_specs=specs, out_specs=P('data'), check_vma=False),
        donate_argnums=0,
    )
    totals, counts = None, np.zeros(2, np.int64)
    for part in _of_one_size(batches, share * len(mesh.local_devices), group):
        _, mask = part
        counts += int(np.sum(mask)), int(np.sum(np.reshape(mask, (-1, group)).any(axis=1)))
        if totals is None:
            shapes = jax.eval_shape(measure, params, *(x[:share] for x in part))
            totals = jax.tree.map(
                lambda x: jnp.zeros((mesh.size, *x.shape), device=by_image), shapes
            )
        placed = [jax.make_array_from_process_local_data(by_image, x) for x in part]
        totals = add_batch(totals, params, *placed)
    images_seen, groups = multihost_utils.process_allgather(counts).reshape(-1, 2).sum(axis=0)
    if not groups:
        raise UserError('there is no calibration image; give at least one.')

    def mean(pair: TwoFloat) -> np.ndarray:
        of_devices = [multihost_utils.process_allgather(x, tiled=True) for x in pair]
        return sum(np.asarray(x, np.float64).sum(axis=0) for x in of_devices) / groups

    values = jax.tree.map(mean, totals, is_leaf=_is_sum)
    for of_block in values.values():
        for position, sums in of_block.items():
            norms = dict(zip(METRICS, sums['norms'], strict=True))
            of_block[position] = norms | {k: v for k, v in sums.items() if k != 'norms'}
    origin = {'checkpoint': checkpoint.report.source, **(origin or {})}
    return Statistics(values, int(images_seen), fingerprint(checkpoint.params), origin)


def sow(model: Model, params: FlatParams, images: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """What a forward pass shows: {block: {position: (b n units)}}."""
    _, sown = model.apply({'params': unflatten(params)}, images, mutable=['intermediates'])
    measured = {block: {} for block in model.blocks}
    for path, (x,) in flatten(sown['intermediates']).items():
        block = next((b for b in model.blocks if path.startswith(b + '/')), None)
        if (position := path.rpartition('/')[2]) in POSITIONS:
            measured[block][position] = x
    return measured


class TwoFloat(NamedTuple):
    """A sum as two float32 numbers, high + low, together good for 48 bits.

    Plain float32 sums of 30,000 images drift by more than 1e-6, and counts stop at 2^24.
    """

    high: jax.Array
    low: jax.Array


def add(a: TwoFloat, b: TwoFloat) -> TwoFloat:
    """a + b, with the rounding error of the high parts kept in the low one (Knuth's two-sum)."""
    high = a.high + b.high
    b_rounded = high - a.high
    error = (a.high - (high - b_rounded)) + (b.high - b_rounded)
    low = error + (a.low + b.low)
    rounded = high + low
    return TwoFloat(rounded, low - (rounded - high))


def total(x: jax.Array) -> TwoFloat:
    """The sum of x over its first axis."""
    zero = TwoFloat(jnp.float32(0), jnp.float32(0))
    return TwoFloat(*jax.lax.reduce(TwoFloat(x, jnp.zeros_like(x)), zero, add, (0,)))


def batch_sums(
    x: jax.Array, mask: jax.Array, group: int = 1, co_activation: bool = False
) -> dict[str, TwoFloat]:
    """The sums of one batch, of images whose mask is not 0.

    Args:
      x: (b n u), float.
      mask: (b,).

    Returns:
      'norms' (3 u): L1, L2 and active of each group of images, summed over the groups; and
      'co_activation' (u u): over how many tokens both units are above zero, exact up to 2^24.
    """
    b, n, u = x.shape
    x, on, counted = x.astype(jnp.float32), x > 0, (mask > 0)[:, None, None]
    of_image = [jnp.abs(x).sum(axis=1), jnp.square(x).sum(axis=1), on.sum(axis=1, dtype=x.dtype)]
    of_image = jnp.where(counted, jnp.stack(of_image, axis=1), 0)
    l1, square, active = of_image.reshape(b // group, group, 3, u).sum(axis=1).swapaxes(0, 1)
    sums = {'norms': total(jnp.stack([l1, jnp.sqrt(square), active], axis=1))}
    if co_activation:
        tokens = (on & counted).reshape(b * n, u).astype(jnp.float32)
        sums[CO_ACTIVATION] = TwoFloat(tokens.T @ tokens, jnp.zeros((u, u), jnp.float32))
    return sums


def _is_sum(x: Any) -> bool:
    return isinstance(x, TwoFloat)


def _of_one_size(
    batches: Iterable[tuple[np.ndarray, np.ndarray]], size: int, group: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches cut into parts of one size, the last one of each filled up with masked images."""
    for images, mask in batches:
        if len(images) % group:
            raise UserError(
                f'a batch of {len(images)} images is not a multiple of group {group}; '
                'give batches that are.'
            )
        for i in range(0, len(images), size):
            part = np.asarray(images[i : i + size]), np.float32(mask[i : i + size])
            rows = size - len(part[0])
            yield tuple(np.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)) for x in part)
