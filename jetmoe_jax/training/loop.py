"""One training run, from top to bottom: data, model, state, restore, loop, evaluate."""

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import parameter_overview
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from jetmoe_jax.analysis.cost import model_cost
from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.checkpoints.workdir import (
    CheckpointStore,
    check_same_model,
    in_use,
    load_workdir,
    meta_of,
)
from jetmoe_jax.data.loader import eval_batches, train_loader
from jetmoe_jax.data.preprocess import check_augment, eval_transform, train_transform
from jetmoe_jax.data.sources import check_images, open_source
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_shapes, unflatten
from jetmoe_jax.training.config import OPERATIONAL, check_config
from jetmoe_jax.training.evaluate import evaluate
from jetmoe_jax.training.initial import prepare
from jetmoe_jax.training.logs import Rate, RunLog
from jetmoe_jax.training.optimizer import make_optimizer, make_schedule
from jetmoe_jax.training.sharding import (
    check_batch,
    make_mesh,
    pad_experts,
    shard_batch,
    tree_shardings,
)
from jetmoe_jax.training.state import abstract_state, create_state, from_items, to_items
from jetmoe_jax.training.step import make_eval_step, make_train_step

Metrics = dict[str, float]

logger = logging.getLogger(__name__)


def train(config: ConfigDict, workdir: str | Path) -> Metrics:
    """Trains what the config says, going on from the workdir's newest checkpoint if it has one.

    Whatever ends it, what is being written is finished first, and workers and files are closed.

    Returns:
      the last evaluation: 'loss', 'top1', 'top5' on the validation images.

    Raises:
      UserError: something in the config, the data, a checkpoint or the workdir is wrong; nothing
        that was in the workdir is changed then.
    """
    with contextlib.ExitStack() as opened:
        return _train(config, Path(workdir), opened)


def _train(config: ConfigDict, workdir: Path, opened: contextlib.ExitStack) -> Metrics:
    check_config(config)
    check_augment(config.data.augment)
    mesh = make_mesh(config.mesh.expert)
    check_batch(config.batch_size, mesh)

    # Data.
    train_source, val_source = _sources(config)
    steps_per_epoch = len(train_source) / config.batch_size
    steps = max(round(config.epochs * steps_per_epoch), 1)
    eval_every = max(round(config.eval_every_epochs * steps_per_epoch), 1)
    save_every = max(round(config.checkpoint_every_epochs * steps_per_epoch), 1)

    # Model.
    start = prepare(config, train_source, workdir)
    model = start.model
    shapes = param_shapes(model)
    size = dict(image_size=model.image_shape, crop_fraction=config.data.crop_fraction)
    batches = train_loader(
        train_source,
        partial(train_transform, augment=config.data.augment, **size),
        batch_size=config.batch_size,
        seed=config.seed,
        workers=config.data.workers,
    )
    opened.callback(batches.close)
    validation = partial(
        eval_batches,
        val_source,
        partial(eval_transform, **size),
        batch_size=config.batch_size,
        workers=config.data.workers,
    )
    described = Checkpoint(
        model,
        {},
        LoadReport(str(workdir)),
        start.mean,
        start.std,
        config.data.crop_fraction,
        train_source.class_names,
    )
    meta = meta_of(described) | {'config': _to_json(config)}

    # State: of the newest checkpoint, or new.
    schedule = make_schedule(config.optimizer, steps, steps_per_epoch)
    optimizer = make_optimizer(config.optimizer, schedule, model.blocks)
    opened.enter_context(in_use(workdir))
    store = CheckpointStore(workdir, keep=config.keep_checkpoints)
    opened.callback(store.close)
    restored = store.latest_step()
    if restored is not None:
        _check_same_run(workdir, store.meta(restored), meta)
        logger.info('Going on from step %d of %s.', restored, workdir)
        target = abstract_state(shapes, optimizer, mesh, ema=config.ema_decay > 0)
        state = from_items(store.restore(restored, **to_items(target)))
        batches.set_state(store.data_state(restored))
    else:
        for report in start.reports:
            logger.info('%s', report.table())
        began = time.monotonic()
        state = create_state(
            start.make_params(), optimizer, config.seed, mesh, ema=config.ema_decay > 0
        )
        logger.info('Initial parameters (%s): %.1f s.', config.init, time.monotonic() - began)
        overview = parameter_overview.get_parameter_overview(state.params, include_stats=False)
        (workdir / 'parameters.txt').write_text(overview + '\n')
    logger.info(
        '%s: %s. %d training and %d validation images, %d steps of %d.',
        config.model if config.init != 'dense' else config.dense,
        model_cost(model),
        len(train_source),
        len(val_source),
        steps,
        config.batch_size,
    )

    # Loop.
    train_step = make_train_step(
        model, optimizer, schedule, config, start.mean, start.std, mesh, state
    )
    eval_step = make_eval_step(model, start.mean, start.std, mesh)
    first = restored or 0
    log = RunLog(workdir, keep_until=restored)
    opened.callback(log.close)
    rate = Rate(first, steps, config.batch_size)

    def validate() -> Metrics:
        params = state.params if state.ema is None else state.ema
        return evaluate(eval_step, params, validation(), mesh)

    def validate_and_log(step: int) -> Metrics:
        result = validate()
        log.write(step, {f'val_{k}': v for k, v in result.items()})
        logger.info(
            'step %d/%d  validation: top-1 %.1f%%, top-5 %.1f%%, loss %.4f',
            step, steps, 100 * result['top1'], 100 * result['top5'], result['loss'],
        )  # fmt: skip
        return result

    def save(step: int, result: Metrics | None) -> None:
        records = {'meta': meta, 'data': batches.get_state()}
        store.save(step, to_items(state), records, result)

    def check_finite(step: int, metrics: Mapping[str, Any], ids: np.ndarray) -> None:
        if not all(math.isfinite(metrics[k]) for k in ('loss', 'grad_norm', 'param_norm')):
            raise UserError(_not_finite(step, metrics, ids, train_source, store))

    def say_where_it_goes_on(kind: type | None, *_: Any) -> None:
        if kind is KeyboardInterrupt:
            logger.info('The same command goes on from step %d.', store.latest_step())

    opened.push(say_where_it_goes_on)
    previous = None
    if restored is None:
        save(0, validate_and_log(0))
    logger.info('The first step compiles the training step.')
    for step in range(first + 1, steps + 1):
        batch = next(batches)
        ids = batch.pop('index')
        state, metrics = train_step(state, shard_batch(batch, mesh))
        if previous is not None:  # a step late, so that the device has work meanwhile
            check_finite(step - 1, *previous)
        previous = (metrics, ids)
        logs = step % config.log_every_steps == 0 or step in (1, steps)
        saves = step % save_every == 0 or step == steps
        evaluates = step % eval_every == 0 or step == steps
        if logs or saves:  # what is saved is good
            metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
            check_finite(step, metrics, ids)
        if logs:
            images_per_second, left = rate(step)
            log.write(step, metrics | {'images_per_second': images_per_second})
            logger.info(
                'step %d/%d  loss %.4f  grad norm %.2f  lr %.2e  %.0f images/s  %s left',
                step, steps, metrics['loss'], metrics['grad_norm'], metrics['lr'],
                images_per_second, left,
            )  # fmt: skip
        result = validate_and_log(step) if evaluates else None
        if saves:
            save(step, result)
    if first == steps:  # the run had been finished before
        result = validate()
    return result


def evaluate_workdir(config: ConfigDict, workdir: str | Path) -> Metrics:
    """Evaluates a workdir's newest checkpoint on the config's validation images.

    Raises:
      UserError: the workdir has no checkpoint, or it belongs to other classes.
    """
    check_config(config, needs_dense=False)
    mesh = make_mesh(config.mesh.expert)
    check_batch(config.batch_size, mesh)
    saved = load_workdir(workdir, ema=config.ema_decay > 0, dtype=jnp.dtype(config.dtype))
    source = open_source(config.data.name, 'val', skip_unreadable=config.data.skip_unreadable)
    if tuple(saved.class_names) != tuple(source.class_names):
        raise UserError(
            f'{workdir} was trained for {len(saved.class_names)} classes, {config.data.name} has '
            f'{len(source.class_names)} or other names; evaluate on the data it was trained for.'
        )
    transform = partial(
        eval_transform, image_size=saved.model.image_shape, crop_fraction=saved.crop_fraction
    )
    batches = eval_batches(source, transform, batch_size=config.batch_size)
    params = unflatten(pad_experts(saved.params, mesh))
    params = jax.device_put(params, tree_shardings(params, mesh))
    step = make_eval_step(saved.model, saved.mean, saved.std, mesh)
    return evaluate(step, params, batches, mesh)


def _sources(config: ConfigDict) -> tuple[Any, Any]:
    """Training and validation images, every file of them readable."""
    skip = config.data.skip_unreadable
    sources = [
        open_source(config.data.name, split, skip_unreadable=skip) for split in ('train', 'val')
    ]
    if not skip:
        for source in sources:
            check_images(getattr(source, 'paths', ()))
    return tuple(sources)


def _to_json(config: ConfigDict) -> dict[str, Any]:
    return {
        k: _to_json(v) if isinstance(v, ConfigDict) else list(v) if isinstance(v, tuple) else v
        for k, v in config.items()
    }


def _check_same_run(workdir: Path, stored: dict[str, Any], meta: dict[str, Any]) -> None:
    """Refuses to go on with a checkpoint that this config would not have made."""
    if 'config' not in stored:
        raise UserError(
            f'{workdir} holds a converted checkpoint, no training run; give it as config.dense '
            'and choose another --workdir.'
        )
    check_same_model(workdir, stored['model'], meta['model'])
    before_of = flatten_dict(stored['config'], keep_empty_nodes=True, sep='.')
    for key, value in flatten_dict(meta['config'], keep_empty_nodes=True, sep='.').items():
        before = before_of.get(key)
        if key not in OPERATIONAL and before != value:
            raise UserError(
                f'{workdir} holds a run with config.{key} = {before}, this one has {value}; '
                'choose another --workdir, or give the same config to go on.'
            )


def _not_finite(step: int, metrics: Metrics, ids: Any, source: Any, store: CheckpointStore) -> str:
    names = ', '.join(source[int(i)]['id'] for i in ids[:8])
    return (
        f'the loss is {float(metrics["loss"])} at step {step} (gradient norm '
        f'{float(metrics["grad_norm"])}, parameter norm {float(metrics["param_norm"])}); the '
        f"batch's images begin with {names}; the last good checkpoint is step "
        f'{store.latest_step()} in {store.folder}; lower the learning rate or look at those images.'
    )
