"""Seconds to recycle V-JetMoE-T from a ViT-S and a ViT-T, statistics given.

python benchmarks/recycling.py
"""

import statistics as stats
import time

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.registry import create_model
from jetmoe_jax.recycling.statistics import METRICS, Statistics, fingerprint
from jetmoe_jax.recycling.strategies import recycle

ROUNDS = 3


def random_checkpoint(name: str, rng: np.random.Generator) -> Checkpoint:
    """A dense model of the registry with random weights."""
    model = create_model(name)
    shapes = param_shapes(model)
    params = {k: rng.standard_normal(v.shape, np.float32) for k, v in shapes.items()}
    return Checkpoint(model, params, LoadReport(name))


def random_statistics(checkpoint: Checkpoint, rng: np.random.Generator) -> Statistics:
    """Positive statistics of the shapes that calibration would give."""
    values = {
        block: {
            position: {metric: rng.random(units) + 0.1 for metric in METRICS}
            for position, units in (('mlp_input', d), ('mlp_act', h), ('attn_proj_input', d))
        }
        for block, (d, h) in checkpoint.model.blocks.items()
    }
    return Statistics(values, images=1, fingerprint=fingerprint(checkpoint.params))


def main() -> None:
    """Prints the median of a few rounds for each strategy."""
    rng = np.random.default_rng(0)
    small = random_checkpoint('vit_small_patch16_224', rng)
    tiny = random_checkpoint('vit_tiny_patch16_224', rng)
    statistics = random_statistics(small, rng)
    successor = create_model('vjetmoe_t')
    for strategy in ('importance', 'uniform'):
        seconds = []
        for seed in range(ROUNDS):
            began = time.perf_counter()
            recycle(successor, small, tiny, strategy=strategy, statistics=statistics, seed=seed)
            seconds.append(time.perf_counter() - began)
        print(f'{strategy:12} {stats.median(seconds):6.2f} s (first {seconds[0]:.2f})')


if __name__ == '__main__':
    main()
