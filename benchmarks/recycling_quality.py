"""What the recycling strategies are worth: the quickstart's model fine-tuned from each of them.

    python benchmarks/recycling_quality.py [--steps=240] [--seeds=3] [--strategies=random,uniform]

A row is a way to start. 'probe' is the accuracy of a ridge classifier on the pooled features before
any training; the accuracies after 10%, 25%, 50% and 100% of the steps follow. All are of the
validation images, mean and standard deviation over seeds. A seed settles draws, router, head, the
images' order and augmentation, noise and drop path, for every row alike. The recipe is the
quickstart's, with a tenth of the steps as warm-up, and every head is fresh. The task is its digits,
each turned by some quarters: as they stand, the probe alone is at 97%, and rows cannot differ.

Selections take experts from the ViT of 96 channels; upcyclings copy the MLP of the ViT of 48, which
is the model's own width and gives all of them what is no expert. 'random_weights' has nothing of
either, the two dense rows are the ViTs themselves. 'branch_train_mix' needs a second checkpoint of
48 channels, which does not ship: --branch=BRANCH gives it, for instance the shipped one trained on:

    python -m jetmoe_jax.main --config=configs/pretrain_digits.py:width=48 --config.init=dense \
        --config.dense=jetmoe_jax/checkpoints/weights/digits_vit_48.safetensors \
        --config.seed=1 --config.epochs=20 --workdir=BRANCH
"""

from jetmoe_jax import huge_pages

if __name__ == '__main__':
    huge_pages.restart()

import argparse
import itertools
import platform
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from sklearn.linear_model import RidgeClassifier
from tqdm import tqdm

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.checkpoints.workdir import open_checkpoint
from jetmoe_jax.data.loader import Batch, eval_batches, train_loader
from jetmoe_jax.data.mixing import normalise
from jetmoe_jax.data.preprocess import eval_transform, train_transform
from jetmoe_jax.data.sources import Source, open_source
from jetmoe_jax.models.parameters import FlatParams, init_params, param_shapes, unflatten
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling.calibration import calibrate
from jetmoe_jax.recycling.strategies import recycle
from jetmoe_jax.training.evaluate import evaluate
from jetmoe_jax.training.initial import prepare_recycling
from jetmoe_jax.training.optimizer import make_optimizer, make_schedule
from jetmoe_jax.training.sharding import make_mesh
from jetmoe_jax.training.state import abstract_state, create_state
from jetmoe_jax.training.step import make_eval_step, make_train_step

FRACTIONS = (0.1, 0.25, 0.5, 1.0)
COLUMNS = ('probe', *(f'{fraction:.0%}' for fraction in FRACTIONS))
RIDGE = 1.0
QUICKSTART = Path(__file__).parents[1] / 'configs' / 'quickstart.py'

# Row -> arguments of `recycle`; the others come after.
RECYCLED: dict[str, dict[str, Any]] = {
    'random': {'strategy': 'random'},
    'uniform': {'strategy': 'uniform'},
    'importance_L2': {'strategy': 'importance', 'metric': 'L2'},
    'importance_L1': {'strategy': 'importance', 'metric': 'L1'},
    'importance_active': {'strategy': 'importance', 'metric': 'active'},
    'graph': {'strategy': 'graph'},
    'sparse_upcycling': {'strategy': 'sparse_upcycling'},
    'drop_upcycling': {'strategy': 'drop_upcycling'},
    'noise_upcycling': {'strategy': 'noise_upcycling'},
    'branch_train_mix': {'strategy': 'branch_train_mix'},
    'from_scratch': {'strategy': 'from_scratch'},
}
ROWS = (*RECYCLED, 'random_weights', 'dense_48', 'dense_96')


class Turned:
    """A source whose images are turned by 0 to 3 quarters, drawn for each image once."""

    def __init__(self, source: Source):
        self.name, self.class_names = source.name, source.class_names
        self._source = source
        self._turns = np.random.default_rng(0).integers(4, size=len(source))

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> dict[str, Any]:
        example = self._source[i]
        return example | {'image': np.rot90(example['image'], self._turns[i])}


class Trainer:
    """Trains one model from any parameters; its functions are compiled once."""

    def __init__(self, model: Model, donor: Checkpoint, config: ConfigDict, steps: int):
        self.model, self.steps = model, steps
        self.mesh = make_mesh()
        schedule = make_schedule(config.optimizer, steps, steps_per_epoch=steps)
        self.optimizer = make_optimizer(config.optimizer, schedule, model.blocks)
        state = abstract_state(param_shapes(model), self.optimizer, self.mesh)
        mean, std = donor.mean, donor.std
        self.step = make_train_step(
            model, self.optimizer, schedule, config, mean, std, self.mesh, state
        )
        self.eval_step = make_eval_step(model, mean, std, self.mesh)

        @jax.jit
        def features(params: Any, images: jax.Array) -> jax.Array:
            images = normalise(images, mean, std)
            _, sown = model.apply({'params': params}, images, mutable=['intermediates'])
            return sown['intermediates']['pooled'][0]

        self.features = features

    def probe(self, params: FlatParams, train: list[Batch], val: list[Batch]) -> float:
        """Validation accuracy of a ridge classifier on the pooled features."""
        params = jax.device_put(unflatten(params))
        sets = []
        for batches in (train, val):
            real = np.concatenate([batch['mask'] for batch in batches]) > 0
            features = [np.asarray(self.features(params, batch['image'])) for batch in batches]
            labels = np.concatenate([batch['label'] for batch in batches])
            sets.append((np.concatenate(features)[real], labels[real]))
        return RidgeClassifier(alpha=RIDGE).fit(*sets[0]).score(*sets[1])

    def accuracies(
        self, params: FlatParams, batches: list[Batch], val: list[Batch], seed: int, bar: tqdm
    ) -> list[float]:
        """Validation accuracy after each of FRACTIONS of the steps."""
        state = create_state(params, self.optimizer, seed, self.mesh)
        checkpoints = [max(round(fraction * self.steps), 1) for fraction in FRACTIONS]
        at = {}
        for i, batch in enumerate(batches, start=1):
            state, _ = self.step(state, {k: batch[k] for k in ('image', 'label')})
            if i in checkpoints:
                copies = [dict(batch) for batch in val]  # `evaluate` takes things out of them
                at[i] = evaluate(self.eval_step, state.params, copies, self.mesh)['top1']
            bar.update()
        return [at[i] for i in checkpoints]


class Quickstart:
    """The quickstart's data, checkpoints, statistics and models."""

    def __init__(self, steps: int, branch: str, names: list[str]):
        self.config = runpy.run_path(str(QUICKSTART))['get_config']()
        name = self.config.data.name
        self.train, self.val = (Turned(open_source(name, split)) for split in ('train', 'val'))
        self.config.optimizer.warmup_epochs = 0.1  # to the schedule all steps are one epoch
        overrides = self.config.model_overrides.to_dict()
        overrides['num_classes'] = len(self.train.class_names)
        plan = prepare_recycling(self.config, overrides)
        self.donors = plan.donors
        self.branch = open_checkpoint(branch) if branch else None
        self.statistics = None
        if any(name.startswith(('importance', 'graph')) for name in names):
            self.statistics = calibrate(
                plan.donors.predecessor,
                self.train,
                images=self.config.recycle.calibration_images,
                crop_fraction=self.config.data.crop_fraction,
                co_activation='graph' in names,
            )
        drop_path = plan.model.drop_path
        self.dense = {'dense_48': plan.donors.same_size, 'dense_96': plan.donors.predecessor}
        models = {k: dense.model.clone(drop_path=drop_path) for k, dense in self.dense.items()}
        models['moe'] = plan.model
        self.trainers = {
            k: Trainer(model, self.dense.get(k, plan.donors.dense), self.config, steps)
            for k, model in models.items()
        }

    def trainer(self, name: str) -> Trainer:
        """Of the model of a row."""
        return self.trainers.get(name, self.trainers['moe'])

    def params(self, name: str, seed: int) -> FlatParams:
        """A row's parameters before training."""
        model = self.trainer(name).model
        if name == 'random_weights':
            return init_params(model, seed)
        if name in self.dense:
            # From another seed than the pre-training, which fitted the features to its first head.
            return self.dense[name].params | init_params(
                model, 1000 + seed, ('head/kernel', 'head/bias')
            )
        params, _ = recycle(
            model,
            self.donors.predecessor,
            self.donors.same_size,
            branches=[self.branch] if name == 'branch_train_mix' else (),
            statistics=self.statistics,
            seed=seed,
            **RECYCLED[name],
        )
        return params

    def training_batches(self, seed: int, steps: int) -> list[Batch]:
        """The batches of a run."""
        transform = partial(train_transform, augment=self.config.data.augment, **self._size())
        loader = train_loader(self.train, transform, batch_size=self.config.batch_size, seed=seed)
        batches = list(itertools.islice(loader, steps))
        loader.close()
        return batches

    def plain_batches(self, source: Source) -> list[Batch]:
        """All images of a source."""
        transform = partial(eval_transform, **self._size())
        return list(eval_batches(source, transform, batch_size=self.config.batch_size))

    def _size(self) -> dict[str, Any]:
        return {
            'image_size': self.trainers['moe'].model.image_shape,
            'crop_fraction': self.config.data.crop_fraction,
        }


def measure(names: list[str], steps: int, seeds: int, branch: str) -> dict[str, np.ndarray]:
    """Row -> (seeds, columns) accuracies."""
    task = Quickstart(steps, branch, names)
    train, val = task.plain_batches(task.train), task.plain_batches(task.val)
    results: dict[str, list[list[float]]] = {name: [] for name in names}
    with tqdm(total=len(names) * seeds * steps, unit='step', smoothing=0.05) as bar:
        for seed in range(seeds):
            batches = task.training_batches(seed, steps)
            for name in names:
                bar.set_description(f'{name}, seed {seed}')
                trainer, params = task.trainer(name), task.params(name, seed)
                probe = trainer.probe(params, train, val)
                row = [probe, *trainer.accuracies(params, batches, val, seed, bar)]
                results[name].append(row)
                text = '  '.join(f'{100 * value:5.1f}' for value in row)
                tqdm.write(f'seed {seed}  {name:18}{text}', file=sys.stderr)
    return {name: np.array(rows) for name, rows in results.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--steps', type=int, default=240)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--strategies', help=f'of {", ".join(ROWS)}; all by default')
    parser.add_argument('--branch', default='', help='the checkpoint that branch_train_mix adds')
    options = parser.parse_args()

    default = [name for name in ROWS if options.branch or name != 'branch_train_mix']
    names = options.strategies.split(',') if options.strategies else default
    if unknown := set(names) - set(ROWS):
        parser.error(f'no strategy {", ".join(unknown)}; the strategies are {", ".join(ROWS)}')
    if 'branch_train_mix' in names and not options.branch:
        parser.error('branch_train_mix needs a second checkpoint of 48 channels: give --branch')
    if min(options.steps, options.seeds) < 1:
        parser.error('--steps and --seeds are counts of at least 1')
    began = time.monotonic()
    results = measure(names, options.steps, options.seeds, options.branch)
    device = jax.devices()[0]
    print(
        f'{len(jax.devices())} x {device.device_kind} ({platform.machine()}), jax '
        f'{jax.__version__}, {options.steps} steps, {options.seeds} seeds, '
        f'{(time.monotonic() - began) / 60:.0f} min; validation accuracy, %\n'
    )
    print(f'| start | {" | ".join(COLUMNS)} |')
    print('| --- ' * (1 + len(COLUMNS)) + '|')
    for name, rows in results.items():
        spread = rows.std(axis=0, ddof=min(len(rows) - 1, 1))
        cells = zip(100 * rows.mean(axis=0), 100 * spread, strict=True)
        print(f'| {name} | ' + ' | '.join(f'{m:.1f} ± {s:.1f}' for m, s in cells) + ' |')


if __name__ == '__main__':
    main()
