"""A workdir's checkpoints: what they hold, which are kept, damage, and other device counts."""

import gc
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, save_checkpoint
from jetmoe_jax.checkpoints.workdir import (
    CheckpointStore,
    check_same_model,
    in_use,
    load_workdir,
    open_checkpoint,
    save_workdir,
)
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import flatten, init_params, unflatten
from jetmoe_jax.models.registry import model_spec
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.training.sharding import make_mesh, pad_experts, tree_shardings

MODEL = ViT(
    image_size=8,
    patch_size=4,
    width=12,
    depth=2,
    num_heads=3,
    num_classes=5,
    pool='avg',
    moe_blocks=(1,),
    moe=dict(core_experts=4, universal_experts=8, combine='softmax'),
)
META = dict(
    model=model_spec(MODEL),
    mean=[0.25, 0.5, 0.75],
    std=[0.5, 0.125, 1.0],
    crop_fraction=0.9,
    class_names=['ant', 'bee', 'cow', 'dog', 'ñandú'],
    config={'seed': 3},
)
TOP1 = {0: 0.1, 3: 0.5, 5: 0.4, 7: 0.3, 9: 0.2}  # the best is neither the first nor among the last
EXPERT_KERNEL = 'blocks_1/moe/core_experts/mlp/fc1/kernel'


@pytest.fixture(scope='module')
def initial():
    return init_params(MODEL, 0)


def params_at(initial, step):
    return {path: value + np.float32(step) for path, value in initial.items()}


def train_at(step):
    rest = dict(mu=np.arange(3, dtype=np.float32) + step, count=np.int32(step))
    return dict(step=np.int32(step), opt_state=rest, rng=np.array([1, step], np.uint32))


def shapes_like(tree):
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def save(store, initial, step, top1):
    trees = dict(params=unflatten(params_at(initial, step)), train=train_at(step))
    metrics = None if top1 is None else {'top1': top1}
    store.save(step, trees, dict(data={'position': 10 * step}, meta=META), metrics)


@pytest.fixture(scope='module')
def workdir(initial, tmp_path_factory):
    """Five checkpoints were saved, by two runs; the last two and the best are kept."""
    folder = tmp_path_factory.mktemp('run')
    for steps in ((0, 3, 5), (7, 9)):
        store = CheckpointStore(folder, keep=2)
        for step in steps:
            save(store, initial, step, TOP1[step])
        store.close()
    return folder


@pytest.fixture
def damaged(workdir, tmp_path):
    return shutil.copytree(workdir, tmp_path / 'damaged')


def assert_params(checkpoint, initial, step):
    expected = params_at(initial, step)
    assert checkpoint.params.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(checkpoint.params[path], value, err_msg=path)


def steps_of(folder):
    return sorted(int(path.name) for path in (folder / 'checkpoints').iterdir())


def test_everything_that_was_saved_is_restored(workdir, initial):
    store = CheckpointStore(workdir, read_only=True)
    shapes = dict(params=shapes_like(unflatten(initial)), train=shapes_like(train_at(9)))
    trees, data, meta = store.restore(9, **shapes), store.data_state(9), store.meta(9)
    store.close()
    assert trees.keys() == shapes.keys()
    assert_params(SimpleNamespace(params=flatten(trees['params'])), initial, 9)
    jax.tree.map(np.testing.assert_array_equal, trees['train'], train_at(9))
    assert data == {'position': 90}
    assert meta == META | {'model': meta['model']}
    check_same_model(workdir, meta['model'], META['model'])


def test_the_last_and_the_best_are_kept_even_when_a_run_was_restarted(workdir):
    assert steps_of(workdir) == [3, 7, 9]


def test_checkpoints_between_evaluations_do_not_drive_out_the_best(initial, tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step, top1 in {1: None, 2: 0.5, 3: None, 4: 0.25, 5: None, 6: None}.items():
        save(store, initial, step, top1)
    store.close()
    assert steps_of(tmp_path) == [2, 5, 6]
    assert_params(load_workdir(tmp_path, best=True), initial, 2)


def test_the_newest_and_the_best_are_told_apart(workdir):
    store = CheckpointStore(workdir, read_only=True)
    found = store.latest_step(), store.best_step()
    store.close()
    assert found == (9, 3)


def test_a_workdir_gives_its_newest_checkpoint_with_its_preprocessing(workdir, initial):
    checkpoint = load_workdir(workdir)
    assert_params(checkpoint, initial, 9)
    assert checkpoint.model == MODEL
    assert checkpoint.mean == (0.25, 0.5, 0.75)
    assert checkpoint.std == (0.5, 0.125, 1.0)
    assert checkpoint.crop_fraction == 0.9
    assert checkpoint.class_names == ('ant', 'bee', 'cow', 'dog', 'ñandú')
    assert checkpoint.report.source == str(workdir / 'checkpoints' / '9')


def test_the_best_is_given_when_asked_for(workdir, initial):
    assert_params(load_workdir(workdir, best=True), initial, 3)


def test_one_checkpoint_in_a_workdir_can_be_named(workdir, initial):
    assert_params(open_checkpoint(workdir / 'checkpoints' / '7'), initial, 7)
    assert_params(open_checkpoint(workdir / 'checkpoints'), initial, 9)
    assert_params(open_checkpoint(workdir), initial, 9)


def test_attributes_that_are_given_win(workdir):
    checkpoint = load_workdir(workdir, dtype=jax.numpy.bfloat16, moe={'combine': 'entmax15'})
    assert checkpoint.model.dtype == jax.numpy.bfloat16
    assert checkpoint.model.moe['combine'] == 'entmax15'
    assert checkpoint.model.moe['core_experts'] == 4


def test_a_file_is_opened_as_one(tmp_path, initial):
    path = tmp_path / 'out.safetensors'
    save_checkpoint(path, Checkpoint(MODEL, initial, LoadReport('test')))
    assert_params(open_checkpoint(path), initial, 0)


def test_reading_changes_nothing_in_the_workdir(workdir):
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob('*')}
    load_workdir(workdir)
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob('*')} == before


def test_a_half_written_checkpoint_is_not_the_newest(damaged, initial):
    checkpoints = damaged / 'checkpoints'
    for name in ('11.orbax-checkpoint-tmp', '13.orbax-checkpoint-tmp-1700000000'):
        (checkpoints / name / 'params').mkdir(parents=True)
    before = sorted(checkpoints.iterdir())
    assert_params(load_workdir(damaged), initial, 9)
    assert sorted(checkpoints.iterdir()) == before, 'reading removed what a run may be writing'

    store = CheckpointStore(damaged, keep=2)
    latest = store.latest_step()
    save(store, initial, 11, 0.1)
    store.close()

    assert latest == 9
    assert_params(load_workdir(damaged), initial, 11)


def arrays(folder):
    """The file of a checkpoint that holds the parameters' values: the largest."""
    return max((p for p in (folder / 'params').rglob('*') if p.is_file()),
               key=lambda path: path.stat().st_size)  # fmt: skip


def metadata(folder):
    return folder / 'meta' / 'metadata'


def error_of(folder, **given):
    """The UserError's message, without its traceback, which holds on to Orbax's coroutines."""
    try:
        load_workdir(folder, **given)
    except UserError as error:
        return str(error)
    except Exception as error:
        problem = f'{type(error).__name__}: {error}'.splitlines()[0]
    else:
        problem = 'no error'
    pytest.fail(f'{problem} in place of a UserError', pytrace=False)


def delete(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b'')


# Orbax leaves its other reads unfinished when one fails; they are swept up in the same test.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('harm', [delete, cut, empty])
@pytest.mark.parametrize('part', [arrays, metadata])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_still_loads(damaged, initial, part, harm):
    harm(part(damaged / 'checkpoints' / '9'))
    message = error_of(damaged)
    gc.collect()
    assert f'{damaged}/checkpoints/9 cannot be read' in message
    assert 'go on from an earlier one' in message
    assert '\n' not in message
    assert_params(load_workdir(damaged / 'checkpoints' / '7'), initial, 7)


def test_the_moving_average_is_given_when_asked_for(initial, tmp_path):
    store = CheckpointStore(tmp_path)
    trees = dict(params=unflatten(initial), ema=unflatten(params_at(initial, 5)))
    store.save(2, trees, dict(meta=META))
    store.close()
    assert_params(open_checkpoint(tmp_path), initial, 0)
    assert_params(open_checkpoint(tmp_path, ema=True), initial, 5)


def test_a_moving_average_that_is_not_there_is_told(workdir, initial, tmp_path):
    message = error_of(workdir, ema=True)
    assert 'moving average' in message or 'ema' in message
    assert 'delete that folder' not in message, 'nothing is wrong with the checkpoint'
    path = tmp_path / 'out.safetensors'
    save_checkpoint(path, Checkpoint(MODEL, initial, LoadReport('test')))
    with pytest.raises(UserError, match='is a file; only a workdir has a moving average'):
        open_checkpoint(path, ema=True)


def test_a_checkpoint_becomes_a_workdir_and_is_never_written_over(initial, tmp_path):
    checkpoint = Checkpoint(MODEL, initial, LoadReport('test'), class_names=tuple('abcde'))
    save_workdir(tmp_path, checkpoint)
    again = load_workdir(tmp_path)
    assert_params(again, initial, 0)
    assert (again.model, again.class_names) == (MODEL, tuple('abcde'))
    with pytest.raises(UserError, match='has checkpoints already; choose another --output'):
        save_workdir(tmp_path, checkpoint)
    assert_params(load_workdir(tmp_path), initial, 0)


def test_a_workdir_is_opened_at_another_size_and_class_count(workdir, initial):
    # 16 px give a grid of 4 x 4 and the checkpoint holds a position embedding of 2 x 2.
    checkpoint = open_checkpoint(workdir, image_size=16, num_classes=3)
    assert checkpoint.params['pos_embed'].shape == (1, 17, 12)
    assert checkpoint.params['head/kernel'].shape == (12, 3)
    assert sorted(checkpoint.report.fresh) == ['head/bias', 'head/kernel']
    np.testing.assert_array_equal(
        checkpoint.params[EXPERT_KERNEL], params_at(initial, 9)[EXPERT_KERNEL]
    )
    assert checkpoint.mean == (0.25, 0.5, 0.75)


def test_a_missing_step_is_named(workdir):
    with pytest.raises(UserError, match=r'checkpoints/8'):
        load_workdir(workdir / 'checkpoints' / '8')


def test_a_folder_without_checkpoints_is_refused_and_stays_as_it_is(tmp_path):
    with pytest.raises(UserError, match="has no folder 'checkpoints'; give the --workdir"):
        load_workdir(tmp_path)
    with pytest.raises(UserError, match="is a folder without 'checkpoints' in it"):
        open_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_workdir_without_a_whole_checkpoint_says_so(tmp_path):
    (tmp_path / 'checkpoints' / '3.orbax-checkpoint-tmp').mkdir(parents=True)
    with pytest.raises(UserError, match='checkpoints holds no whole checkpoint yet; train first'):
        load_workdir(tmp_path)


def test_a_new_store_has_no_steps(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.latest_step() is None
    assert store.best_step() is None
    store.close()


def test_a_checkpoint_of_another_model_is_refused_by_the_attribute(workdir):
    other = model_spec(MODEL.clone(width=24))
    with pytest.raises(UserError, match="its width is 12, this config's is 24"):
        check_same_model(workdir, META['model'], other)


@pytest.mark.parametrize('devices, expert', [(1, 1), (8, 1), (4, 4)])
def test_a_checkpoint_of_eight_devices_is_restored_on_others(initial, tmp_path, devices, expert):
    def placed(expert, devices):
        mesh = make_mesh(expert, jax.devices()[:devices])
        trees = dict(params=initial, ema=params_at(initial, 3))
        tree = {name: unflatten(pad_experts(tree, mesh)) for name, tree in trees.items()}
        return jax.device_put(tree, tree_shardings(tree, mesh))

    before = placed(8, 8)
    kernel = flatten(before['params'])[EXPERT_KERNEL]
    assert kernel.shape[0] == 8 and initial[EXPERT_KERNEL].shape[0] == 4  # four of padding
    assert kernel.addressable_shards[0].data.shape[0] == 1
    store = CheckpointStore(tmp_path)
    store.save(2, before, dict(meta=META))
    store.close()

    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        placed(expert, devices),
    )
    store = CheckpointStore(tmp_path)
    trees = store.restore(2, **target)
    store.close()

    restored = flatten(trees['params'])
    assert len(restored[EXPERT_KERNEL].sharding.device_set) == devices
    assert restored[EXPERT_KERNEL].addressable_shards[0].data.shape[0] == 4 // expert
    for path, value in initial.items():
        np.testing.assert_array_equal(restored[path], value, err_msg=path)
        np.testing.assert_array_equal(flatten(trees['ema'])[path], value + np.float32(3))


def test_a_second_run_in_a_workdir_is_refused_until_the_first_ends(tmp_path):
    with in_use(tmp_path), pytest.raises(UserError, match='in use by another run; wait'):
        in_use(tmp_path).__enter__()
    with in_use(tmp_path):
        pass


@pytest.mark.parametrize(
    'path, shape',
    [('head/kernel', (12, 3)), (EXPERT_KERNEL, (3, 12, 48)), (EXPERT_KERNEL, (4, 12, 9))],
)
def test_an_array_of_another_shape_is_refused_unless_it_is_padding(initial, tmp_path, path, shape):
    store = CheckpointStore(tmp_path)
    store.save(
        0, dict(params=unflatten(initial | {path: np.ones(shape, np.float32)})), dict(meta=META)
    )
    store.close()
    message = f'cannot be read: its {path} is {shape}, the model has {initial[path].shape}; delete'
    with pytest.raises(UserError, match=re.escape(message)):
        load_workdir(tmp_path)
