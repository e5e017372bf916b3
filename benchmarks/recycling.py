"""What recycling costs: the statistics, V-JetMoE-T by every strategy, and a billion parameters.

    python benchmarks/recycling.py [--only=statistics,tiny,base] [--rounds=5]

statistics: the pass over images beside the plain forward pass of the same ViT-S (224 pixels, 16
images), in turn. tiny: V-JetMoE-T from a ViT-S and a ViT-T, statistics given. base: a V-JetMoE of
ViT-S's width from a ViT-B, into a file and into a folder. Every recycling has a process of its own;
memory is its peak. All weights are random.
"""

import argparse
import re
import statistics as stats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, load_checkpoint, save_checkpoint
from jetmoe_jax.models.parameters import param_shapes, unflatten
from jetmoe_jax.models.registry import create_model
from jetmoe_jax.recycling.collect import IMAGES_AT_ONCE, Collector
from jetmoe_jax.recycling.recipe import STRATEGIES
from jetmoe_jax.recycling.statistics import CO_ACTIVATION, METRICS, Statistics, fingerprint
from jetmoe_jax.recycling.strategies import recycle

RATIO, SECONDS, TINY_GB, BASE_GB = 1.15, 10, 6, 20  # the limits


def random_checkpoint(name: str, rng: np.random.Generator) -> Checkpoint:
    """A dense model of the registry with random weights."""
    model = create_model(name)
    shapes = param_shapes(model)
    params = {k: 0.02 * rng.standard_normal(v.shape, np.float32) for k, v in shapes.items()}
    return Checkpoint(model, params, LoadReport(name))


def random_statistics(checkpoint: Checkpoint, rng: np.random.Generator) -> Statistics:
    """Positive statistics of the shapes that calibration would give, in eight communities."""
    values = {}
    for block, (d, h) in checkpoint.model.blocks.items():
        for position, units in (('mlp_input', d), ('mlp_act', h), ('attn_proj_input', d)):
            at = {metric: rng.random(units) + 0.1 for metric in METRICS}
            if position != 'attn_proj_input':
                chance = rng.random((2000, 8)).repeat(units // 8, axis=1)  # shared by a community
                on = rng.random((2000, units)) < chance
                at[CO_ACTIVATION] = on.T.astype(np.float32) @ on.astype(np.float32)
            values.setdefault(block, {})[position] = at
    return Statistics(values, images=1, fingerprint=fingerprint(checkpoint.params))


def statistics_pass(rounds: int) -> None:
    """Prints the ratio of the statistics pass to the forward pass."""
    rng = np.random.default_rng(0)
    checkpoint = random_checkpoint('vit_small_patch16_224', rng)
    images = rng.standard_normal((IMAGES_AT_ONCE, 224, 224, 3), np.float32)
    mask = np.ones(IMAGES_AT_ONCE, np.float32)
    collector = Collector(checkpoint, devices=jax.devices()[:1])
    params = jax.device_put(unflatten(checkpoint.params))
    forward = jax.jit(lambda params, images: checkpoint.model.apply({'params': params}, images))

    def collect() -> None:
        collector.add(images, mask)
        jax.block_until_ready(collector.totals)

    passes = {
        'forward': lambda: jax.block_until_ready(forward(params, images)),
        'statistics': collect,
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for round_ in range(rounds + 1):
        for name, run in passes.items():
            began = time.perf_counter()
            run()
            if round_:  # the first one compiles
                seconds[name].append(time.perf_counter() - began)
    plain, collecting = (stats.median(of_pass) for of_pass in seconds.values())
    print(
        f'statistics of {IMAGES_AT_ONCE} images {collecting:.3f} s, their forward pass '
        f'{plain:.3f} s: {collecting / plain:.3f} times (limit {RATIO})'
    )


def tiny(strategy: str, folder: Path) -> None:
    """In a process of its own: prints seconds and peak memory."""
    small, same = (load_checkpoint(folder / f'{name}.safetensors') for name in ('small', 'tiny'))
    statistics = Statistics.load(folder / 'small.npz')
    successor = create_model('vjetmoe_t')
    branches = [same] if strategy == 'branch_train_mix' else []
    began = time.perf_counter()
    recycle(successor, small, same, branches=branches, strategy=strategy, statistics=statistics)
    print(time.perf_counter() - began, _peak())


def every_strategy(folder: Path) -> None:
    """Prints a line for each strategy."""
    rng = np.random.default_rng(0)
    for name in ('small', 'tiny'):
        checkpoint = random_checkpoint(f'vit_{name}_patch16_224', rng)
        save_checkpoint(folder / f'{name}.safetensors', checkpoint)
        if name == 'small':
            random_statistics(checkpoint, rng).save(folder / 'small.npz')
    print(f'V-JetMoE-T, statistics given (limits {SECONDS} s, {TINY_GB} GB)')
    for strategy in STRATEGIES:
        command = [sys.executable, __file__, '--tiny', strategy, str(folder)]
        seconds, peak = map(float, subprocess.check_output(command, text=True).split())
        print(f'  {strategy:18}{seconds:6.2f} s  {peak:5.2f} GB')


def billion(folder: Path) -> None:
    """Prints what the command takes for V-JetMoE-S out of a ViT-B, to a file and to a folder."""
    rng = np.random.default_rng(0)
    checkpoint = random_checkpoint('vit_base_patch16_224', rng)
    save_checkpoint(folder / 'base.safetensors', checkpoint)
    values = {
        block: {position: {'L2': at['L2']} for position, at in of_block.items()}
        for block, of_block in random_statistics(checkpoint, rng).values.items()
    }
    Statistics(values, 1, fingerprint(checkpoint.params)).save(folder / 'base.npz')
    print(f'V-JetMoE-S, 98 + 196 experts, from ViT-B (limit {BASE_GB} GB)')
    for output in ('out.safetensors', 'out'):
        command = [sys.executable, '-m', 'jetmoe_jax.recycle', '--model=vjetmoe_s']
        command += [f'--dense={folder}/base.safetensors', f'--statistics={folder}/base.npz']
        out = subprocess.check_output([*command, f'--output={folder}/{output}'], text=True)
        kind = 'file' if output.endswith('.safetensors') else 'folder'
        print(f'  {kind:18}{out.splitlines()[-1]}')


def _peak() -> float:
    """Peak resident memory in GB. getrusage would count what the parent had before the fork."""
    status = Path('/proc/self/status').read_text()
    return int(re.search(r'VmHWM:\s+(\d+)', status)[1]) / 1e6


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--only', default='statistics,tiny,base')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--tiny', nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        return tiny(options.tiny[0], Path(options.tiny[1]))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(','):
            if name == 'statistics':
                statistics_pass(options.rounds)
            else:
                {'tiny': every_strategy, 'base': billion}[name](Path(folder))


if __name__ == '__main__':
    main()
