"""The model that a config asks for, and its initial parameters: recycled, random or dense."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from ml_collections import ConfigDict

from jetmoe_jax.checkpoints.load import LoadReport
from jetmoe_jax.checkpoints.workdir import open_checkpoint
from jetmoe_jax.data.sources import Source, normalisation
from jetmoe_jax.models.parameters import FlatParams, init_params
from jetmoe_jax.models.registry import Model, create_model
from jetmoe_jax.recycling.calibration import calibrate
from jetmoe_jax.recycling.checks import check_donors, check_family, check_statistics
from jetmoe_jax.recycling.recipe import Donors, Recipe, needed_statistics
from jetmoe_jax.recycling.statistics import CO_ACTIVATION, Statistics
from jetmoe_jax.recycling.strategies import inherit, recycled_parts
from jetmoe_jax.training.config import recipe_of


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
    branches = tuple(open_checkpoint(path, **size) for path in config.recycle.branches)
    reports += [branch.report for branch in branches]
    donors, recipe = Donors(predecessor, same_size, branches), recipe_of(config)
    check_donors(model, donors, recipe)
    statistics = None
    if config.recycle.statistics and needed_statistics(model, donors, recipe):
        statistics = Statistics.load(config.recycle.statistics)
        check_statistics(model, donors, recipe, statistics)
    make_params = partial(_recycle, config, source, workdir, model, donors, recipe, statistics)
    return Start(model, mean, std, reports, make_params)


def _recycle(
    config: ConfigDict,
    source: Source,
    workdir: Path,
    model: Model,
    donors: Donors,
    recipe: Recipe,
    statistics: Statistics | None,
) -> FlatParams:
    needs = needed_statistics(model, donors, recipe)
    if needs and statistics is None:
        statistics = calibrate(
            donors.predecessor,
            source,
            images=config.recycle.calibration_images,
            crop_fraction=config.data.crop_fraction,
            seed=config.seed,
            co_activation=any(metric == CO_ACTIVATION for _, _, metric in needs),
        )
    record, parts = recycled_parts(model, donors, recipe, statistics)
    params = {path: value for part in parts for path, value in part.items()}
    record.save(workdir / 'recycling')
    if statistics:
        statistics.save(workdir / 'statistics.npz')
    return params
