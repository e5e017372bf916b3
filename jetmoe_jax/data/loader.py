"""Batches of a source by Grain: deterministic, resumable anywhere, sharded per host.

The training stream is a pure function of (source, seed, position): element p is an image of epoch
p // len(source), augmented by a generator seeded with p. The iterator's whole state is therefore
one number, and neither the count of workers nor that of hosts changes what a global batch holds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from jetmoe_jax.data.sources import Source
from jetmoe_jax.errors import UserError

Batch = dict[str, np.ndarray]

READ_THREADS = 8
WORKER_BATCHES = 2  # batches that a worker process holds ready


class TrainIterator(Iterator[Batch]):
    """An endless iterator over this host's share of the global batches; made by `train_loader`."""

    def __init__(self, stream: grain.MapDataset, batch_size: int, workers: int):
        self._stream = stream
        self._batch_size = batch_size
        self._workers = workers
        self._position = 0
        self._batches = None

    def __next__(self) -> Batch:
        if self._batches is None:  # not before it is needed: set_state would stop the workers again
            ours = self._stream[self._position + jax.process_index() :: jax.process_count()]
            self._batches = _iterate(ours, self._batch_size, self._workers)
        batch = next(self._batches)
        self._position += self._batch_size
        return batch

    def get_state(self) -> dict[str, int]:
        """Returns the position of the next batch, JSON-able; the same on every host."""
        return {'examples': self._position}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a state of `get_state`; the batches that followed it follow again, exactly."""
        self.close()
        self._position = int(state['examples'])

    def close(self) -> None:
        """Stops threads and worker processes; the next `next` starts them again."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def train_loader(
    source: Source,
    transform: Callable[[np.ndarray, np.random.Generator], np.ndarray],
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
) -> TrainIterator:
    """Returns an endless iterator of training batches, reshuffled every epoch.

    Epochs follow each other without a gap, so a batch may hold the end of one and the start of the
    next, and no example is ever dropped.

    Args:
        source: the images.
        transform: (image, generator) -> uint8 (H, W, 3), the same size for every image; picklable
            (a `functools.partial` of `preprocess.train_transform`) where workers > 0.
        batch_size: of all hosts together; each gets batch_size / hosts examples (b below).
        seed: of the order and of the augmentation.
        workers: worker processes; 0 reads with threads of this process.

    Returns:
        An iterator of {'image': uint8 (b, H, W, 3), 'label': int32 (b,), 'index': int64 (b,)},
        `index` into the source, with `get_state`, `set_state` and `close`.

    Raises:
        UserError: batch_size is larger than the source or not a multiple of the hosts; and, while
            iterating, an unreadable image.
    """
    _check_batch_size(batch_size)
    if batch_size > len(source):
        raise UserError(
            f'the batch size is {batch_size}, but {source.name} has only {len(source)} training '
            'images; use a batch size of at most that.'
        )

    def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**example, 'image': transform(example['image'], rng)}

    stream = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()
    stream = stream.map(_reader(source)).random_map(augment)
    return TrainIterator(stream, batch_size, workers)


def eval_batches(
    source: Source,
    transform: Callable[[np.ndarray], np.ndarray],
    *,
    batch_size: int,
    workers: int = 0,
) -> Iterator[Batch]:
    """Returns an iterator of every example once, in order; the last batch is padded.

    Every host gets the same number of batches.

    Args:
        source: the images.
        transform: image -> uint8 (H, W, 3), the same size for every image.
        batch_size: of all hosts together; each gets batch_size / hosts examples (b below).
        workers: worker processes; 0 reads with threads of this process.

    Returns:
        An iterator of {'image': uint8 (b, H, W, 3), 'label': int32 (b,), 'index': int64 (b,),
        'mask': float32 (b,)}; where the mask is 0 the image is black, the label 0, the index -1.

    Raises:
        UserError: batch_size is not a multiple of the hosts, or an image is unreadable.
    """
    _check_batch_size(batch_size)
    read = _reader(source)
    blank = np.zeros_like(transform(source[0]['image']))

    def example_or_padding(index: int) -> dict[str, Any]:
        if index >= len(source):
            return {
                'image': blank,
                'label': np.int32(0),
                'index': np.int64(-1),
                'mask': np.float32(0),
            }
        example = read(index)
        return {**example, 'image': transform(example['image']), 'mask': np.float32(1)}

    padded_length = -(-len(source) // batch_size) * batch_size
    examples = grain.MapDataset.range(padded_length).map(example_or_padding)
    return _iterate(examples[jax.process_index() :: jax.process_count()], batch_size, workers)


def _check_batch_size(batch_size: int) -> None:
    hosts = jax.process_count()
    if batch_size < 1 or batch_size % hosts:
        raise UserError(
            f'the batch size is {batch_size}, expected a positive multiple of the number of '
            f'hosts, {hosts}.'
        )


def _reader(source: Source) -> Callable[[int], dict[str, Any]]:
    def read(index: int) -> dict[str, Any]:
        example = source[index]
        return {
            'image': example['image'],
            'label': np.int32(example['label']),
            'index': np.int64(index),
        }

    return read


def _iterate(examples: grain.MapDataset, batch_size: int, workers: int) -> grain.DatasetIterator:
    """Batches the examples of this host; the workers' number changes the speed, not the batches."""
    b = batch_size // jax.process_count()
    if workers == 0:
        # Threads share the examples of one batch, so that the first is ready soon.
        options = grain.ReadOptions(
            num_threads=READ_THREADS, prefetch_buffer_size=max(2 * b, READ_THREADS)
        )
        return iter(examples.to_iter_dataset(options).batch(b))
    if not flags.FLAGS.is_parsed():
        # Grain's worker processes read absl flags, which only a command run by absl has parsed.
        flags.FLAGS.mark_as_parsed()
    # Grain deals elements to the workers in turn; dealing whole batches keeps each batch together.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    processes = grain.MultiprocessingOptions(workers, per_worker_buffer_size=WORKER_BATCHES)
    return iter(examples.batch(b).to_iter_dataset(options).mp_prefetch(processes))
