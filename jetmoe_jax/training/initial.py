"""The model that a config asks for, and its initial parameters: recycled, random or dense."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.checkpoints.workdir import open_checkpoint
from jetmoe_jax.data.sources import Source, normalisation, open_source
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, init_params
from jetmoe_jax.models.registry import Model, create_model
from jetmoe_jax.recycling.calibration import calibrate, calibration_images
from jetmoe_jax.recycling.checks import check_donors, check_family, check_statistics
from jetmoe_jax.recycling.recipe import Donors, needed_statistics
from jetmoe_jax.recycling.run import Recycling, check_output, write_recycling
from jetmoe_jax.recycling.statistics import CO_ACTIVATION, Statistics
from jetmoe_jax.recycling.strategies import inherit, recycled_parts
from jetmoe_jax.training.config import recipe_of

COMPARED_IMAGES = 64  # on which MoE layers are compared with the MLPs that they replace

logger = logging.getLogger(__name__)


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
    if config.init == 'recycled':
        plan = prepare_recycling(config, overrides)
        reports = [checkpoint.report for checkpoint in plan.checkpoints]
        donor = plan.donors.dense
        make_params = partial(_recycle, plan, config, source, workdir)
        return Start(plan.model, donor.mean, donor.std, reports, make_params)
    model, *checkpoints = _model_and_dense(config, overrides)
    given = [checkpoint for checkpoint in checkpoints if checkpoint]
    mean, std = (given[-1].mean, given[-1].std) if given else normalisation(config.data.name)
    reports = [checkpoint.report for checkpoint in given]
    return Start(model, mean, std, reports, partial(init_params, model, config.seed))


def prepare_recycling(config: ConfigDict, overrides: Mapping[str, Any]) -> Recycling:
    """Reads the dense checkpoints and settles the successor.

    Args:
      overrides: attributes of the successor. Without num_classes among them it has as many as the
        dense checkpoint.

    Raises:
      UserError: a checkpoint or statistics cannot be read, or do not fit the successor.
    """
    model, predecessor, same_size = _model_and_dense(config, overrides)
    size = _image_size(overrides)
    branches = tuple(open_checkpoint(path, **size) for path in config.recycle.branches)
    donors, recipe = Donors(predecessor, same_size, branches), recipe_of(config)
    check_donors(model, donors, recipe)
    statistics = None
    if config.recycle.statistics and needed_statistics(model, donors, recipe):
        statistics = Statistics.load(config.recycle.statistics)
        check_statistics(model, donors, recipe, statistics)
    return Recycling(model, donors, recipe, statistics)


def statistics_of(plan: Recycling, config: ConfigDict, source: Source | None) -> Statistics | None:
    """The statistics that a recycling needs, given or collected over the source; None if none.

    Raises:
      UserError: they are needed, and there is nothing to collect them over.
    """
    needs = needed_statistics(plan.model, plan.donors, plan.recipe)
    if not needs or plan.statistics:
        return plan.statistics
    if source is None:
        name = 'graph' if plan.recipe.strategy == 'graph' else 'importance'
        raise UserError(
            f'strategy {name!r} needs statistics of {plan.donors.predecessor.report.source}; give '
            'saved ones, --statistics=FILE.npz, or images to collect them over, --data=FOLDER.'
        )
    return calibrate(
        plan.donors.predecessor,
        source,
        images=config.recycle.calibration_images,
        crop_fraction=config.data.crop_fraction,
        seed=config.seed,
        co_activation=any(metric == CO_ACTIVATION for _, _, metric in needs),
    )


def write_recycled(config: ConfigDict, output: str | Path) -> list[Path]:
    """Recycles as a config says, into files (see `write_recycling`), with no training.

    The head has as many classes as `model_overrides` say; else as the data, or the checkpoint.

    Returns:
      the files, the checkpoint first.

    Raises:
      UserError: something is wrong with the config, a checkpoint, statistics or the output, which
        must not exist; nothing is written then.
    """
    output, data = Path(output), config.data
    check_output(output)
    overrides, source, images, names = config.model_overrides.to_dict(), None, None, ()
    if data.name:
        source = open_source(data.name, 'train', skip_unreadable=data.skip_unreadable)
        overrides = {'num_classes': len(source.class_names)} | overrides
        compared = min(config.recycle.calibration_images, COMPARED_IMAGES)
        images = calibration_images(source, compared, config.seed)
    plan = prepare_recycling(config, overrides)
    check_output(output, plan.model)
    for checkpoint in plan.checkpoints:
        logger.info('%s', checkpoint.report.table())
    statistics = statistics_of(plan, config, source)
    for name, value in plan.facts(statistics).items():
        logger.info('%-14s%s', name, value)
    if source and len(source.class_names) == plan.model.num_classes:
        names = source.class_names
    return write_recycling(
        output,
        plan,
        statistics,
        images=images,
        crop_fraction=data.crop_fraction,
        class_names=names,
    )


def _recycle(plan: Recycling, config: ConfigDict, source: Source, workdir: Path) -> FlatParams:
    statistics = statistics_of(plan, config, source)
    record, parts = recycled_parts(plan.model, plan.donors, plan.recipe, statistics)
    params = {path: value for part in parts for path, value in part.items()}
    record.save(workdir / 'recycling')
    if statistics:
        statistics.save(workdir / 'statistics.npz')
    return params


def _model_and_dense(
    config: ConfigDict, overrides: Mapping[str, Any]
) -> tuple[Model, Checkpoint | None, Checkpoint | None]:
    """The model as a variant of the dense ones; the predecessor and the same-size checkpoint."""
    size = _image_size(overrides)
    predecessor = open_checkpoint(config.dense, **size) if config.dense else None
    same_size = open_checkpoint(config.dense_same, **size) if config.dense_same else None
    donor = same_size or predecessor
    if donor:
        overrides = {'num_classes': donor.model.num_classes} | dict(overrides)
    model = create_model(config.model, **overrides)
    for checkpoint in filter(None, (predecessor, same_size)):
        check_family(model, checkpoint)
    if donor:
        model = inherit(model, donor.model, given=overrides)
    return model, predecessor, same_size


def _image_size(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name: overrides[name] for name in ('image_size',) if name in overrides}
