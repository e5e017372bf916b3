"""recycle as a user runs it: what it writes, that it is whole or absent, how it fails."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, load_checkpoint, save_checkpoint
from jetmoe_jax.checkpoints.workdir import load_workdir
from jetmoe_jax.data.sources import open_source
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling import run as recycling_run
from jetmoe_jax.recycling import strategies
from jetmoe_jax.recycling.statistics import Statistics
from jetmoe_jax.recycling.strategies import recycle
from jetmoe_jax.training import initial
from jetmoe_jax.training.config import default_config, override_recycling
from jetmoe_jax.training.initial import prepare, write_recycled

WIDE = ViT(image_size=8, patch_size=4, width=12, depth=2, num_heads=2, num_classes=3)
RECIPE = """
from jetmoe_jax.training.config import default_config, parse_arg

def get_config(arg=None):
    arg = parse_arg(arg, dense='', data='')
    c = default_config()
    c.dense, c.data.name = arg.dense, arg.data
    c.model_overrides.update(width=6, depth=2, num_heads=1, moe_blocks=(0, 1))
    c.model_overrides.moe = dict(core_experts=2, universal_experts=3)
    return c
"""
BESIDE = {'record.json', 'record.npz', 'summary.html'}


def write_dense(folder):
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=v.shape).astype('f4') for k, v in param_shapes(WIDE).items()}
    save_checkpoint(folder / 'wide.safetensors', Checkpoint(WIDE, params, LoadReport('made')))


def config_of(folder, **given):
    """The recipe's config, with values that the command's flags would give."""
    scope = {}
    exec(RECIPE, scope)
    config = scope['get_config'](f'dense={folder / "wide.safetensors"}')
    return override_recycling(config, given)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('recycle')
    write_dense(folder)
    (folder / 'recipe.py').write_text(RECIPE)
    return folder


def start(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope='module')
def done(folder):
    """The command, with a recipe, flags that change it, and images: its output's lines."""
    done = start(
        '-m',
        'jetmoe_jax.recycle',
        f'--config={folder}/recipe.py:dense={folder}/wide.safetensors',
        '--data=digits',
        '--metric=L1',
        '--calibration_images=40',
        '--seed=3',
        f'--output={folder}/new/out',
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope='module')
def recycled(done, folder):
    """The same by the library: a checkpoint without files, and the record."""
    statistics = Statistics.load(folder / 'new/out/statistics.npz')
    wide = load_checkpoint(folder / 'wide.safetensors')
    model = load_workdir(folder / 'new/out').model
    params, record = recycle(model, wide, statistics=statistics, metric='L1', seed=3)
    return Checkpoint(model, params, LoadReport('recycled')), record, statistics


def test_a_folder_holds_the_checkpoint_that_the_library_makes(done, folder, recycled):
    out = folder / 'new' / 'out'
    checkpoint, record, _ = recycled
    names = {path.name for path in out.iterdir()}
    assert names == BESIDE | {'checkpoints', 'statistics.npz'}
    written = load_workdir(out)
    assert written.class_names == open_source('digits', 'train').class_names
    assert written.params.keys() == checkpoint.params.keys()
    for path, value in checkpoint.params.items():
        assert written.params[path].tobytes() == value.tobytes(), path
    with np.load(out / 'record.npz') as arrays:
        assert arrays.keys() == record.arrays().keys()
        for name, index in record.arrays().items():
            np.testing.assert_array_equal(arrays[name], index)
    assert not list(out.parent.glob('*.partial'))


def test_the_command_says_what_it_did(done, folder, recycled):
    model = recycled[0].model
    count = sum(leaf.size for leaf in param_shapes(model).values())
    assert done[0] == f'{folder}/wide.safetensors'
    text = '\n'.join(done)
    assert 'importance by L1, seed 3' in text
    assert 'collected over 40 images of digits' in text
    assert f'{count:,} parameters, ' in text
    assert f'wrote {folder}/new/out/summary.html' in done
    assert 's, peak memory ' in done[-1] and done[-1].endswith(' GB')
    summary = (folder / 'new/out/summary.html').read_text()
    assert 'mean over 40 images' in summary  # of the relative errors
    assert '<td>blocks_1</td>' in summary


def test_a_file_is_written_in_parts_with_the_bytes_of_the_whole(folder, recycled, tmp_path):
    checkpoint, _, statistics = recycled
    statistics.save(tmp_path / 'given.npz')
    given = dict(metric='L1', statistics=f'{tmp_path}/given.npz', seed=3, num_classes=10)
    paths = write_recycled(config_of(folder, **given), tmp_path / 'a.b.safetensors')
    assert paths[0] == tmp_path / 'a.b.safetensors'
    written = {path.name for path in tmp_path.iterdir()} - {'given.npz'}
    assert written == {path.name for path in paths}
    assert written == {'a.b.safetensors'} | {f'a.b.{name}' for name in BESIDE}
    save_checkpoint(tmp_path / 'whole.safetensors', checkpoint)
    expected = (tmp_path / 'whole.safetensors').read_bytes()
    assert paths[0].read_bytes() == expected


def zeros(model, seed, paths):
    shapes = param_shapes(model)
    return {path: np.zeros(shapes[path].shape, np.float32) for path in paths}


@pytest.fixture
def no_compiling(monkeypatch):
    monkeypatch.setattr(strategies, 'init_params', zeros)


@pytest.mark.parametrize('name, error', [('out', KeyboardInterrupt), ('out.safetensors', OSError)])
def test_what_is_interrupted_leaves_nothing(
    folder, tmp_path, monkeypatch, no_compiling, name, error
):
    def interrupted(path, **_):
        assert len(list(tmp_path.iterdir())) == 1  # everything is under one other name
        raise error

    monkeypatch.setattr(recycling_run, 'write_summary', interrupted)
    with pytest.raises(error):
        write_recycled(config_of(folder, strategy='uniform'), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_is_killed_is_absent_and_can_be_made_again(folder, tmp_path, no_compiling):
    killed = start(__file__, folder, tmp_path / 'out')
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['out.partial']
    assert (tmp_path / 'out.partial' / 'checkpoints').is_dir()  # it was far
    write_recycled(config_of(folder, strategy='uniform'), tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['out']
    assert load_workdir(tmp_path / 'out').model.moe_paths == ('blocks_0', 'blocks_1')


def test_an_output_that_exists_is_refused_before_any_work(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(initial, 'prepare_recycling', None)
    for name in ('out', 'out.safetensors'):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=f'{name} exists already; choose another --output'):
            write_recycled(config_of(folder, strategy='uniform'), tmp_path / name)


@pytest.mark.parametrize('layer', ['spheromoe', 'soft'])
def test_a_folder_starts_a_training_run(folder, tmp_path, no_compiling, layer):
    given = dict(strategy='uniform', layer=layer, experts='2+3' if layer == 'spheromoe' else '5')
    write_recycled(config_of(folder, num_classes=10, **given), tmp_path / 'out')
    config = default_config()
    config.init, config.dense, config.data.name = 'dense', str(tmp_path / 'out'), 'digits'
    config.model_overrides.drop_path = 0.1
    started = prepare(config, open_source('digits', 'train'), tmp_path)
    expected = load_workdir(tmp_path / 'out').params
    params = started.make_params()
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(params[path], value)


@pytest.mark.parametrize(
    'given, classes',
    [({}, 3), ({'data': 'digits'}, 10), ({'data': 'digits', 'num_classes': 4}, 4)],
)
def test_classes_are_those_asked_for_or_the_datas_or_the_checkpoints(
    folder, tmp_path, monkeypatch, given, classes
):
    plans = []
    monkeypatch.setattr(
        initial, 'write_recycling', lambda _, plan, *rest, **more: plans.append(plan)
    )
    write_recycled(config_of(folder, strategy='uniform', **given), tmp_path / 'out')
    assert plans[0].model.num_classes == classes


def test_values_given_beside_a_config_change_it_alone(folder):
    before = config_of(folder)
    after = config_of(
        folder, strategy='graph', branches=['a', 'b'], image_size=32, data='digits', seed=5
    )
    assert (after.recycle.strategy, after.recycle.branches) == ('graph', ('a', 'b'))
    assert (after.model_overrides.image_size, after.data.name, after.seed) == (32, 'digits', 5)
    assert after.model_overrides.moe == before.model_overrides.moe
    assert after.optimizer == before.optimizer
    more = config_of(folder, experts='4+7').model_overrides.moe
    assert more.to_dict() == {'core_experts': 4, 'universal_experts': 7}
    other = config_of(folder, layer='token_choice', experts='9').model_overrides.moe
    assert other.to_dict() == {'layer': 'token_choice', 'num_experts': 9}
    alone = override_recycling(default_config(), {'dense': 'x', 'model': 'cjetmoe_f'})
    assert (alone.model, alone.dense, alone.init) == ('cjetmoe_f', 'x', 'recycled')


@pytest.mark.parametrize(
    'given, name, message',
    [
        ({}, 'out', "strategy 'importance' needs statistics .*wide.* --statistics=.* --data="),
        ({'strategy': 'graph'}, 'out', "strategy 'graph' needs statistics"),
        ({'experts': '5'}, 'out', r'experts=5: write CORE\+UNIVERSAL'),
        ({'experts': '2+3', 'layer': 'soft'}, 'out', r'experts=2\+3: this layer has one kind'),
        ({'dense': ''}, 'out', "give the predecessor's by --dense"),
        ({'ratio': 2.0}, 'out', 'config.recycle.ratio is 2'),
        ({'strategy': 'uniform'}, 'out.npz', 'only .safetensors files and folders are written'),
        (
            {'strategy': 'uniform', 'layer': 'soft', 'experts': '5'},
            'out.safetensors',
            'has no name .*; write a folder instead',
        ),
        ({'strategy': 'uniform', 'data': 'nowhere'}, 'out', 'nowhere'),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(folder, tmp_path, given, name, message):
    with pytest.raises(UserError, match=message):
        write_recycled(config_of(folder, **given), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_mistake_on_the_command_line_gets_one_line_and_exit_code_1(folder, tmp_path):
    dense = f'--dense={folder}/wide.safetensors'
    failed = start('-m', 'jetmoe_jax.recycle', dense, f'--output={tmp_path}/out')
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: '), failed.stderr
    assert 'wide.safetensors' in lines[0]  # it is narrower than V-JetMoE-T
    assert not list(tmp_path.iterdir())


if __name__ == '__main__':
    import pathlib

    strategies.init_params = zeros
    recycling_run.write_summary = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    write_recycled(
        config_of(pathlib.Path(sys.argv[1]), strategy='uniform'), pathlib.Path(sys.argv[2])
    )
