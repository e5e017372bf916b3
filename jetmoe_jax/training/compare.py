"""A recycled model beside the same model from random weights: same recipe, budget and seed."""

import copy
import logging
from pathlib import Path

from ml_collections import ConfigDict

from jetmoe_jax.analysis.curves import comparison_table, plot_curves
from jetmoe_jax.training.logs import read_curve
from jetmoe_jax.training.loop import train

RANDOM_FOLDER = 'random'

logger = logging.getLogger(__name__)


def train_beside_random(config: ConfigDict, workdir: str | Path) -> str:
    """Trains the config in `workdir` and its random twin in `workdir/random`.

    Returns:
      a table of both runs' validation accuracy; `workdir/curves.png` shows the same.
    """
    workdir = Path(workdir)
    twin = copy.deepcopy(config)
    twin.init, twin.compare_random = 'random', False
    logger.info('Training the %s model.', config.init)
    train(config, workdir)
    logger.info('Training the same model from random weights.')
    train(twin, workdir / RANDOM_FOLDER)
    curves = {config.init: read_curve(workdir), 'random': read_curve(workdir / RANDOM_FOLDER)}
    plot_curves(curves, workdir / 'curves.png', f'{config.model} on {Path(config.data.name).name}')
    return comparison_table(curves)
