"""Seconds and memory of a training step: a dense ViT-T beside MoE models of the same cost.

    python benchmarks/step_time.py [--batch=32] [--dtype=float32] [--rounds=5] [--models=a,b]

Forward pass, forward and backward pass, and the whole step (augmentation on the device, gradient,
clipping, AdamW) as the published recipe trains, with its dropouts and noise. Models take turns in
every round; the table has the medians, each in seconds, and what compiling the step took. Memory is
the compiler's account of the whole step: parameters, optimiser state and temporaries.
"""

from jetmoe_jax import huge_pages

if __name__ == '__main__':
    huge_pages.restart()

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jetmoe_jax.models.parameters import init_params
from jetmoe_jax.models.registry import Model, create_model
from jetmoe_jax.moe.spheromoe import setting
from jetmoe_jax.training.config import default_config
from jetmoe_jax.training.optimizer import make_optimizer, make_schedule
from jetmoe_jax.training.sharding import make_mesh, shard_batch
from jetmoe_jax.training.state import create_state
from jetmoe_jax.training.step import make_train_step

HALF = (0.5, 0.5, 0.5)
DROPOUTS = {'dropout': 0.4, 'expert_dropout': 0.1}
MOES = {
    'V-JetMoE-T': setting('released'),
    'V-JetMoE-T softmax': setting('released') | {'combine': 'softmax'},
    'Soft MoE 197': {'layer': 'soft', 'num_experts': 197} | DROPOUTS,
    'token choice 32': {'layer': 'token_choice', 'num_experts': 32, 'dropout': 0.4},
}
MODELS = ('ViT-T', *MOES)


def make_model(name: str, dtype: str) -> Model:
    """A model of the table, for 224 px and 1,000 classes."""
    shared = dict(drop_path=0.1, dtype=jnp.dtype(dtype))
    if name == 'ViT-T':
        return create_model('vit_tiny_patch16_224', **shared)
    counts = {'core_experts': 98, 'universal_experts': 196} if 'layer' not in MOES[name] else {}
    return create_model('vjetmoe_t', moe=MOES[name] | counts, **shared)


class Case:
    """One model's three functions, compiled, on a batch of random images."""

    def __init__(self, name: str, batch: int, dtype: str):
        model = make_model(name, dtype)
        config, mesh = default_config(), make_mesh()
        schedule = make_schedule(config.optimizer, steps=1000, steps_per_epoch=10)
        optimizer = make_optimizer(config.optimizer, schedule, model.blocks)
        self.state = create_state(init_params(model, 0), optimizer, 0, mesh)
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (batch, 224, 224, 3), np.uint8)
        labels = rng.integers(0, model.num_classes, batch).astype(np.int32)
        self.batch = shard_batch({'image': images, 'label': labels}, mesh)

        def loss(params, images):
            rngs = {'dropout': jax.random.key(0), 'noise': jax.random.key(1)}
            logits = model.apply({'params': params}, images / 127.5 - 1, True, rngs=rngs)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

        images = self.batch['image'].astype(jnp.float32)
        self.forward = jax.jit(loss).lower(self.state.params, images).compile()
        self.backward = jax.jit(jax.grad(loss)).lower(self.state.params, images).compile()
        self.images = images
        step = make_train_step(model, optimizer, schedule, config, HALF, HALF, mesh, self.state)
        lowered = step.lower(self.state, self.batch)
        began = time.perf_counter()
        self.step = lowered.compile()
        self.compile_seconds = time.perf_counter() - began
        memory = self.step.memory_analysis()
        self.gigabytes = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9

    def run_step(self) -> jax.Array:
        """The whole step; the state goes on."""
        self.state, metrics = self.step(self.state, self.batch)
        return metrics['param_norm']

    def functions(self) -> dict[str, Callable[[], jax.Array]]:
        """What is timed, by the table's columns."""
        return {
            'forward': lambda: self.forward(self.state.params, self.images),
            'forward + backward': lambda: self.backward(self.state.params, self.images),
            'step': self.run_step,
        }


def measure(cases: dict[str, Case], rounds: int) -> dict[tuple[str, str], float]:
    """Median seconds by (model, function), after one round that is not counted."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_ in tqdm(range(rounds + 1), 'rounds', leave=False, disable=None):
        for name, case in cases.items():
            for function, call in case.functions().items():
                began = time.perf_counter()
                jax.block_until_ready(call())
                if round_:
                    seconds.setdefault((name, function), []).append(time.perf_counter() - began)
    return {key: statistics.median(values) for key, values in seconds.items()}


def main() -> None:
    """Prints the table."""
    on_cpu = jax.default_backend() == 'cpu'
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--batch', type=int, default=32 if on_cpu else 256)
    parser.add_argument('--dtype', default='float32' if on_cpu else 'bfloat16')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--models', default=','.join(MODELS), help=f'of {", ".join(MODELS)}')
    options = parser.parse_args()

    names = options.models.split(',')
    if unknown := set(names) - set(MODELS):
        parser.error(f'no model {", ".join(unknown)}; the models are {", ".join(MODELS)}')
    cases = {
        name: Case(name, options.batch, options.dtype)
        for name in tqdm(names, 'compiling', leave=False, disable=None)
    }
    medians = measure(cases, options.rounds)
    device = jax.devices()[0]
    print(
        f'{len(jax.devices())} x {device.device_kind} ({platform.machine()}), batch '
        f'{options.batch}, {options.dtype}, jax {jax.__version__}; medians of {options.rounds}'
    )
    functions = ('forward', 'forward + backward', 'step')
    print(f'{"":19}' + ''.join(f'{f:>20}' for f in functions) + '  / first   compile   memory')
    for name, case in cases.items():
        ratio = medians[name, 'step'] / medians[names[0], 'step']
        print(
            f'{name:19}'
            + ''.join(f'{medians[name, f]:18.3f} s' for f in functions)
            + f'{ratio:9.2f}{case.compile_seconds:8.1f} s{case.gigabytes:6.1f} GB'
        )


if __name__ == '__main__':
    main()
