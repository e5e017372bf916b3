"""A whole run: kill it and go on, bit for bit; and refuse a workdir of something else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.training.loop import train

CONFIG = """
from jetmoe_jax.training.config import default_config

def get_config(arg=None):
    c = default_config()
    c.model_overrides = dict(image_size=8, patch_size=4, width=12, depth=2, num_heads=3,
                             moe_blocks=(1,), drop_path=0.1,
                             moe=dict(core_experts=2, universal_experts=4))
    c.init = 'random'
    c.data.name = 'digits'
    c.data.augment = 'shift'
    c.data.crop_fraction = 1.0
    c.batch_size = 48
    c.epochs = 2.0
    c.eval_every_epochs = 0.3
    c.checkpoint_every_epochs = 0.2
    c.optimizer.lr = 2e-3
    c.optimizer.warmup_epochs = 0.2
    c.log_every_steps = 1
    return c
"""


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    """Starting and compiling are what takes time here: compile once, and hardly optimise."""
    return os.environ | {
        'XLA_FLAGS': '--xla_backend_optimization_level=0',
        'JAX_COMPILATION_CACHE_DIR': str(tmp_path_factory.mktemp('compiled')),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp('config') / 'tiny.py'
    path.write_text(CONFIG)
    return path


def command(config, workdir, *more):
    main = [sys.executable, '-m', 'jetmoe_jax.main']
    return [*main, f'--config={config}', f'--workdir={workdir}', *more]


@pytest.fixture(scope='module')
def run(config, environment):
    def run(workdir, *more):
        return subprocess.run(
            command(config, workdir, *more), env=environment, capture_output=True, text=True
        )

    return run


def records(workdir):
    path = Path(workdir) / 'metrics.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(workdir):
    return {r['step']: r['loss'] for r in records(workdir) if 'loss' in r}


@pytest.fixture(scope='module')
def uninterrupted(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('whole')
    done = run(workdir)
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.parametrize(
    'logged', [1, 23]
)  # before the first checkpoint but the initial, and later
def test_a_killed_run_goes_on_bit_for_bit(
    config, run, environment, uninterrupted, tmp_path, logged
):
    process = subprocess.Popen(
        command(config, tmp_path), env=environment, stdout=subprocess.DEVNULL, text=True
    )
    while process.poll() is None and len(losses(tmp_path)) < logged:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = max(losses(tmp_path))
    assert killed_at < 60, 'the run ended before it was killed'

    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'Going on from step' in done.stdout
    expected = losses(uninterrupted)
    assert len(expected) == 60
    assert losses(tmp_path) == expected
    assert [r for r in records(tmp_path) if 'val_top1' in r] == [
        r for r in records(uninterrupted) if 'val_top1' in r
    ]


def test_a_finished_run_evaluates_again_and_changes_nothing(run, uninterrupted):
    before = (uninterrupted / 'metrics.jsonl').read_bytes()
    again, evaluated = run(uninterrupted), run(uninterrupted, '--mode=eval')
    line = next(x for x in again.stdout.splitlines() if x.startswith('validation: top-1'))
    assert line in evaluated.stdout
    last = [r for r in records(uninterrupted) if 'val_top1' in r][-1]
    assert f'top-1 {last["val_top1"]:.2%}' in line
    assert (uninterrupted / 'metrics.jsonl').read_bytes() == before


def files(workdir):
    """Everything in a workdir but TensorBoard's files, which each run opens anew."""
    paths = sorted(p for p in workdir.rglob('*') if p.is_file() and 'tfevents' not in p.name)
    return {str(path): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'model_overrides.width': 24}, 'holds a checkpoint of another model: its width is 12'),
        ({'model_overrides.widht': 24}, "'widht' does not exist; the nearest known one is 'width'"),
        ({'optimizer.lr': 0.5}, 'holds a run with config.optimizer.lr = 0.002, this one has 0.5'),
        ({'data.augment': 'flip'}, "augment is 'flip'"),
        ({'data.name': 'no/such/folder'}, 'there is no data set or folder no/such/folder'),
        ({'batch_size': 9999 * 8}, 'has only 1437 training images'),
        ({'batch_size': 41}, 'config.batch_size is 41 and there are 8 devices'),
        ({'init': 'recycled', 'dense': 'no.safetensors'}, 'no.safetensors'),
    ],
)
def test_mistakes_are_named_and_leave_the_workdir_alone(config, uninterrupted, changes, message):
    namespace = {}
    exec(config.read_text(), namespace)
    changed = namespace['get_config']()
    changed.model_overrides.unlock()
    for key, value in changes.items():
        *parents, last = key.split('.')
        node = changed
        for parent in parents:
            node = node[parent]
        node[last] = value
    before = files(uninterrupted)
    with pytest.raises(UserError) as error:
        train(changed, uninterrupted)
    assert message in str(error.value)
    assert files(uninterrupted) == before


def test_a_loss_that_is_not_finite_stops_at_once_and_names_the_step(config, tmp_path):
    namespace = {}
    exec(config.read_text(), namespace)
    changed = namespace['get_config']()
    changed.optimizer.lr = 1e30
    changed.log_every_steps = 1000
    with pytest.raises(UserError, match=r'at step [123] .*; the last good checkpoint is step 0 in'):
        train(changed, tmp_path)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--config.batch_sise=3'], "'batch_sise' does not exist; the nearest known one is"),
        (['--config.batch_size=many'], 'many'),
        (['stray'], "'stray' is not a flag"),
        (['--config.data.augment=flip'], "augment is 'flip'"),
    ],
)
def test_the_command_tells_a_mistake_in_one_line_and_exits_1(run, tmp_path, arguments, message):
    failed = run(tmp_path, *arguments)
    assert failed.returncode == 1
    errors = failed.stderr.strip().splitlines()
    assert len(errors) == 1 and message in errors[0], failed.stderr
