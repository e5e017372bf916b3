"""One streaming pass over images: a dense model's statistics, summed on the devices.

One jitted forward pass a batch measures every block and position; nothing is kept per image. Each
device adds up its own images, and the devices' sums meet at the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, flatten, unflatten
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling.statistics import (
    CO_ACTIVATION,
    METRICS,
    POSITIONS,
    Statistics,
    fingerprint,
)

# A device takes so many images at a time, whatever the batch: the same compiled pass gives each
# image the same rounding.
IMAGES_AT_ONCE = 16


def collect_statistics(
    checkpoint: Checkpoint,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    origin: Mapping[str, Any] | None = None,
    **options: Any,
) -> Statistics:
    """Statistics of a dense model over batches of (images, mask).

    Args:
      checkpoint, **options: the arguments of `Collector`.
      batches: the arguments of `Collector.add`.
      origin: what is known of the images, to be kept with the statistics.
    """
    collector = Collector(checkpoint, **options)
    for images, mask in batches:
        collector.add(images, mask)
    return collector.statistics(origin)


class Collector:
    """The sums of a pass, on all devices.

    Args:
      checkpoint: a dense ViT or ConvNeXt.
      group: images that share a norm; the result does not depend on the batch size if that is a
        multiple of it. The released code's norms are over whole batches.
      co_activation: also how often any two units of a position are above zero together.
      transform: makes normalised images of those that are given, on the device.
      devices: all there are, when None.

    Attributes:
      totals: {block: {position: sums of `batch_sums`}}, with an axis of devices in front.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        group: int = 1,
        co_activation: bool = False,
        transform: Callable[[jax.Array], jax.Array] = lambda images: images,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.checkpoint = checkpoint
        self.totals = None
        self._group, self._images, self._groups = group, 0, 0
        self._share = group * -(-IMAGES_AT_ONCE // group)  # images of a device
        self._mesh = Mesh(jax.devices() if devices is None else devices, ('data',))
        self._by_device = NamedSharding(self._mesh, P('data'))
        self._params = jax.device_put(checkpoint.params, NamedSharding(self._mesh, P()))

        def measure(params: FlatParams, images: jax.Array, mask: jax.Array) -> Any:
            sown = sow(checkpoint.model, params, transform(images))
            return jax.tree.map(lambda x: batch_sums(x, mask, group, co_activation), sown)

        def add_batch(totals: Any, *batch: Any) -> Any:
            mine = jax.tree.map(lambda x: x[0], totals)
            sums = jax.tree.map(add, mine, measure(*batch), is_leaf=_is_sum)
            return jax.tree.map(lambda x: x[None], sums)

        specs = (P('data'), P(), P('data'), P('data'))
        self._measure = measure
        self._add_batch = jax.jit(
            jax.shard_map(
                add_batch, mesh=self._mesh, in_specs=specs, out_specs=P('data'), check_vma=False
            ),
            donate_argnums=0,
        )

    def add(self, images: np.ndarray, mask: np.ndarray) -> None:
        """Adds a batch.

        Args:
          images: (b height width 3); on several hosts each gives its own share, of one size.
          mask: (b,) of 0 and 1: which images count.

        Raises:
          UserError: the batch is not a multiple of `group`.
        """
        images, mask = np.asarray(images), np.asarray(mask, np.float32)
        if len(images) % self._group:
            raise UserError(
                f'a batch of {len(images)} images is not a multiple of group {self._group}; '
                'give batches that are.'
            )
        self._images += int(mask.sum())
        self._groups += int(mask.reshape(-1, self._group).any(axis=1).sum())
        size = self._share * len(self._mesh.local_devices)
        for i in range(0, len(images), size):
            part = [_filled_up(x[i : i + size], size) for x in (images, mask)]
            if self.totals is None:
                self.totals = self._zeros(*part)
            placed = [jax.make_array_from_process_local_data(self._by_device, x) for x in part]
            self.totals = self._add_batch(self.totals, self._params, *placed)

    def statistics(self, origin: Mapping[str, Any] | None = None) -> Statistics:
        """What was added, as means over groups of images.

        Raises:
          UserError: there was no image.
        """
        counts = multihost_utils.process_allgather(np.array([self._images, self._groups]))
        images, groups = counts.reshape(-1, 2).sum(axis=0)
        if not groups:
            raise UserError('there is no calibration image; give at least one.')

        def mean(two: TwoFloat) -> np.ndarray:
            of_devices = [multihost_utils.process_allgather(x, tiled=True) for x in two]
            return sum(np.asarray(x, np.float64).sum(axis=0) for x in of_devices) / groups

        values = jax.tree.map(mean, self.totals, is_leaf=_is_sum)
        for of_block in values.values():
            for position, means in of_block.items():
                norms = dict(zip(METRICS, means.pop('norms'), strict=True))
                of_block[position] = norms | means
        origin = {'checkpoint': self.checkpoint.report.source, **(origin or {})}
        return Statistics(values, int(images), fingerprint(self.checkpoint.params), origin)

    def _zeros(self, images: np.ndarray, mask: np.ndarray) -> Any:
        shapes = jax.eval_shape(
            self._measure, self._params, images[: self._share], mask[: self._share]
        )
        return jax.tree.map(
            lambda x: jnp.zeros((self._mesh.size, *x.shape), device=self._by_device), shapes
        )


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


def _filled_up(x: np.ndarray, rows: int) -> np.ndarray:
    """x with zeros behind it, up to a number of rows."""
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
