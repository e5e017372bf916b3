"""The model that a config asks for, and its initial parameters: recycled, random or dense."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.checkpoints.workdir import open_checkpoint
from jetmoe_jax.data.loader import eval_batches
from jetmoe_jax.data.preprocess import eval_transform
from jetmoe_jax.data.sources import Source, normalisation
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, init_params, unflatten
from jetmoe_jax.models.registry import Model, create_model
from jetmoe_jax.recycling.selection import generator
from jetmoe_jax.recycling.statistics import Statistics, collect_statistics
from jetmoe_jax.recycling.strategies import check_donors, check_family, inherit, recycle

CALIBRATION_BATCH = 64


@dataclass
class Start:
    """A model, its preprocessing, and how to make its first parameters (unless restarted)."""

    model: Model
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reports: list[LoadReport]
    make_params: Callable[[], FlatParams]


def prepare(config: ConfigDict, source: Source, workdir: Path) -> Start:
    """Reads the dense checkpoints and settles the model; the long work is left to `make_params`.

    Raises:
      UserError: a checkpoint cannot be read or does not fit the model.
    """
    overrides = config.model_overrides.to_dict() | {
        'num_classes': len(source.class_names),
        'dtype': jnp.dtype(config.dtype),
    }
    if config.init == 'dense':
        dense = open_checkpoint(config.dense, seed=config.seed, **overrides)
        return Start(dense.model, dense.mean, dense.std, [dense.report], lambda: dense.params)

    size = {k: v for k, v in overrides.items() if k == 'image_size'}
    predecessor = open_checkpoint(config.dense, **size) if config.dense else None
    same_size = open_checkpoint(config.dense_same, **size) if config.dense_same else None
    donor = same_size or predecessor
    mean, std = (donor.mean, donor.std) if donor else normalisation(config.data.name)
    reports = [dense.report for dense in (predecessor, same_size) if dense]
    model = create_model(config.model, **overrides)
    for checkpoint in filter(None, (predecessor, same_size)):
        check_family(model, checkpoint)
    if donor:
        model = inherit(model, donor.model, given=overrides)
    if config.init == 'random':
        return Start(model, mean, std, reports, partial(init_params, model, config.seed))
    check_donors(model, predecessor, same_size, config.recycle.strategy, config.recycle.non_experts)
    if config.recycle.statistics:
        Statistics.load(config.recycle.statistics).check(predecessor.model)
    make_params = partial(_recycle, config, source, workdir, model, predecessor, same_size)
    return Start(model, mean, std, reports, make_params)


def _recycle(
    config: ConfigDict,
    source: Source,
    workdir: Path,
    model: Model,
    predecessor: Checkpoint,
    same_size: Checkpoint | None,
) -> FlatParams:
    statistics = None
    if config.recycle.statistics:
        statistics = Statistics.load(config.recycle.statistics)
    elif 'importance' in (config.recycle.strategy, config.recycle.non_experts):
        statistics = calibrate(
            predecessor,
            source,
            images=config.recycle.calibration_images,
            crop_fraction=config.data.crop_fraction,
            seed=config.seed,
        )
    params, record = recycle(
        model,
        predecessor,
        same_size,
        strategy=config.recycle.strategy,
        non_experts=config.recycle.non_experts,
        statistics=statistics,
        seed=config.seed,
    )
    record.save(workdir / 'recycling')
    if statistics:
        statistics.save(workdir / 'statistics.npz')
    return params


def calibrate(
    predecessor: Checkpoint, source: Source, *, images: int, crop_fraction: float, seed: int
) -> Statistics:
    """Statistics of a dense model over `images` random images of a source, or all it has."""
    if images < 1:
        raise UserError(f'config.recycle.calibration_images is {images}; give at least 1.')
    chosen = generator(seed).permutation(len(source))[:images]
    transform = partial(
        eval_transform, image_size=predecessor.model.image_shape, crop_fraction=crop_fraction
    )
    batch_size = min(CALIBRATION_BATCH, len(chosen))
    loader = eval_batches(Subset(source, chosen), transform, batch_size=batch_size)
    total = -(-len(chosen) // batch_size)
    mean, std = np.float32(predecessor.mean), np.float32(predecessor.std)
    batches = (
        ((np.float32(batch['image']) / 255 - mean) / std, batch['mask'])
        for batch in tqdm(loader, 'calibrating', total, unit='batch', leave=False, disable=None)
    )
    return collect_statistics(predecessor.model, unflatten(predecessor.params), batches)


class Subset:
    """Some of a source's examples."""

    def __init__(self, source: Source, indices: np.ndarray):
        self.name, self.class_names = source.name, source.class_names
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: int) -> dict:
        return self._source[int(self._indices[i])]
