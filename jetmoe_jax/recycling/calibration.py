"""Calibration: statistics of a dense checkpoint over images of a data source."""

import logging
from functools import partial

import jax
import numpy as np
from tqdm import tqdm

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.data.loader import eval_batches
from jetmoe_jax.data.mixing import normalise
from jetmoe_jax.data.preprocess import eval_transform
from jetmoe_jax.data.sources import Source
from jetmoe_jax.errors import UserError
from jetmoe_jax.recycling.collect import IMAGES_AT_ONCE, collect_statistics
from jetmoe_jax.recycling.selection import generator
from jetmoe_jax.recycling.statistics import Statistics

logger = logging.getLogger(__name__)


def calibrate(
    predecessor: Checkpoint,
    source: Source,
    *,
    images: int,
    crop_fraction: float,
    seed: int = 0,
    co_activation: bool = False,
) -> Statistics:
    """Statistics of a dense model over `images` random images of a source, or all it has.

    Args:
      crop_fraction: of the resized image's short side, as in evaluation.
      seed: of the choice of images.
      co_activation: also what the strategy 'graph' needs.

    Raises:
      UserError: there is no image to take, or one cannot be read.
    """
    chosen = calibration_images(source, images, seed)
    size = predecessor.model.image_shape
    transform = partial(eval_transform, image_size=size, crop_fraction=crop_fraction)
    batch_size = IMAGES_AT_ONCE * jax.device_count()  # fewer images are filled up to that
    loader = eval_batches(chosen, transform, batch_size=batch_size)
    batches = -(-len(chosen) // batch_size)
    logger.info('Calibrating on %d images of %d x %d pixels.', len(chosen), *size)
    loader = tqdm(loader, 'calibrating', batches, unit='batch', leave=False, disable=None)
    return collect_statistics(
        predecessor,
        ((batch['image'], batch['mask']) for batch in loader),
        co_activation=co_activation,
        transform=partial(normalise, mean=predecessor.mean, std=predecessor.std),
        origin=dict(
            data=source.name,
            image_size=list(size),
            crop_fraction=crop_fraction,
            mean=list(predecessor.mean),
            std=list(predecessor.std),
        ),
    )


def calibration_images(source: Source, images: int, seed: int = 0) -> 'Subset':
    """`images` random images of a source, or all it has, in random order.

    Raises:
      UserError: there is no image to take.
    """
    if images < 1 or len(source) < 1:
        raise UserError(
            f'{images} calibration images are asked for and {source.name} has {len(source)}; '
            'both must be at least 1.'
        )
    return Subset(source, generator(seed).permutation(len(source))[:images])


class Subset:
    """Some of a source's examples."""

    def __init__(self, source: Source, indices: np.ndarray):
        self.name, self.class_names = source.name, source.class_names
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: int) -> dict:
        return self._source[int(self._indices[i])]
