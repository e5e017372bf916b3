"""Evaluation: accuracy and loss of a model over a whole data set."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jetmoe_jax.training.sharding import shard_batch


def evaluate(
    eval_step: Callable, params: Any, batches: Iterable[dict[str, np.ndarray]], mesh: Mesh
) -> dict[str, float]:
    """Means over all images: 'loss', and the accuracies 'top1' and 'top5' in [0, 1]."""
    totals: dict[str, float] = {}
    for batch in tqdm(batches, 'evaluating', unit='batch', leave=False, disable=None):
        del batch['index']
        sums = jax.device_get(eval_step(params, shard_batch(batch, mesh)))
        totals = {k: totals.get(k, 0.0) + float(v) for k, v in sums.items()}
    count = totals.pop('count')
    return {k: v / count for k, v in totals.items()}
