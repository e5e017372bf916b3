import functools
import itertools
import json

import jax
import numpy as np
import pytest
from PIL import Image

from jetmoe_jax.data import loader, preprocess, sources
from jetmoe_jax.errors import UserError

COUNT = 7
TRAIN = functools.partial(preprocess.train_transform, image_size=(5, 6), augment='crop_flip')
EVAL = functools.partial(preprocess.eval_transform, image_size=(5, 6))


@pytest.fixture(scope='module')
def source():
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 9, 11), np.uint8)
    return sources.ArraySource('tiny', images, np.arange(COUNT) % 3, np.arange(COUNT), 'abc')


def train(source, *, batch_size=3, seed=0, workers=0):
    return loader.train_loader(source, TRAIN, batch_size=batch_size, seed=seed, workers=workers)


def take(batches, count):
    return [jax.tree.map(np.array, batch) for batch in itertools.islice(batches, count)]


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    jax.tree.map(np.testing.assert_array_equal, batches, expected)


def test_training_batches_have_the_documented_arrays(source):
    (batch,) = take(train(source), 1)

    assert {k: (v.dtype, v.shape) for k, v in batch.items()} == {
        'image': (np.uint8, (3, 5, 6, 3)),
        'label': (np.int32, (3,)),
        'index': (np.int64, (3,)),
    }
    np.testing.assert_array_equal(batch['label'], batch['index'] % 3)


def test_every_epoch_holds_every_example_once_in_another_order(source):
    indices = np.concatenate([batch['index'] for batch in take(train(source), 7)])

    epochs = indices.reshape(3, COUNT)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(COUNT), (3, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_decides_order_and_augmentation(source):
    assert_same(take(train(source, seed=3), 4), take(train(source, seed=3), 4))
    first, other = (take(train(source, seed=seed), 4) for seed in (3, 4))
    assert any(np.any(a['index'] != b['index']) for a, b in zip(first, other, strict=True))


def test_an_example_is_augmented_anew_in_every_epoch(source):
    batches = take(train(source, batch_size=COUNT), 3)

    images = {batch['image'][list(batch['index']).index(2)].tobytes() for batch in batches}

    assert len(images) == 3


def test_state_resumes_exactly_with_threads_and_with_worker_processes(source):
    whole = take(train(source), 6)
    batches = train(source)
    take(batches, 2)
    state = json.loads(json.dumps(batches.get_state()))
    rest = take(batches, 4)
    assert_same(rest, whole[2:])

    batches.set_state(state)  # back, in the same iterator
    assert_same(take(batches, 4), rest)

    with_workers = train(source, workers=2)
    with_workers.set_state(state)
    assert_same(take(with_workers, 4), rest)
    assert with_workers.get_state() == batches.get_state()
    with_workers.close()


def test_hosts_share_the_global_batch(source, monkeypatch):
    whole = take(train(source, batch_size=6), 3)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    shares = []
    for host in range(2):
        monkeypatch.setattr(jax, 'process_index', lambda host=host: host)
        batches = train(source, batch_size=6)
        take(batches, 1)
        batches.set_state(batches.get_state())
        shares.append(take(batches, 2))

    for batch, *parts in zip(whole[1:], *shares, strict=True):
        joined = jax.tree.map(
            lambda *leaves: np.stack(leaves, 1).reshape(6, *leaves[0].shape[1:]), *parts
        )
        assert_same([joined], [batch])


def test_batch_size_above_the_number_of_images_is_refused(source):
    with pytest.raises(UserError, match='batch size is 8, but tiny has only 7'):
        train(source, batch_size=8)


@pytest.mark.parametrize('batch_size', [0, 3])
def test_batch_size_that_the_hosts_cannot_share_is_refused(source, monkeypatch, batch_size):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)

    with pytest.raises(UserError, match=f'batch size is {batch_size}, expected .* multiple'):
        train(source, batch_size=batch_size)
    with pytest.raises(UserError, match='multiple'):
        loader.eval_batches(source, EVAL, batch_size=batch_size)


def test_evaluation_gives_every_example_once_in_order_and_pads_the_last_batch(source):
    batches = take(loader.eval_batches(source, EVAL, batch_size=3), 99)

    np.testing.assert_array_equal(
        [batch['index'] for batch in batches], [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    )
    np.testing.assert_array_equal(
        [batch['mask'] for batch in batches], [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    )
    assert batches[2]['mask'].dtype == np.float32
    assert not batches[2]['image'][1:].any()
    np.testing.assert_array_equal(batches[1]['image'][2], EVAL(source[5]['image']))
    np.testing.assert_array_equal(batches[1]['label'], [0, 1, 2])


def test_evaluation_gives_every_host_as_many_batches(source, monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 4)
    indices = []
    for host in range(4):
        monkeypatch.setattr(jax, 'process_index', lambda host=host: host)
        batches = take(loader.eval_batches(source, EVAL, batch_size=4), 99)
        indices.append([int(batch['index'][0]) for batch in batches])

    assert indices == [[0, 4], [1, 5], [2, 6], [3, -1]]


@pytest.mark.parametrize('workers', [0, 1])
def test_the_error_of_an_unreadable_image_comes_through(tmp_path, workers):
    folder = tmp_path / 'train' / 'ant'
    folder.mkdir(parents=True)
    for i in range(3):
        Image.new('RGB', (8, 8)).save(folder / f'{i}.png')
    source = sources.open_source(str(tmp_path), 'train')
    (folder / '1.png').write_bytes(b'broken')

    batches = train(source, workers=workers)
    with pytest.raises(UserError, match='ant/1.png'):
        take(batches, 1)
    batches.close()
