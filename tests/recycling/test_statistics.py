"""Calibration statistics: against recorded ones and float64, and whatever the devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.data.sources import ArraySource
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling.calibration import calibrate
from jetmoe_jax.recycling.collect import TwoFloat, add, batch_sums, collect_statistics, total
from jetmoe_jax.recycling.statistics import Statistics, fingerprint

MODEL = ViT(image_size=8, patch_size=4, width=6, depth=2, num_heads=2, mlp_ratio=2, num_classes=3)
IMAGES = np.random.default_rng(1).normal(size=(11, 8, 8, 3)).astype('f4')


def random_checkpoint(seed=0):
    rng = np.random.default_rng(seed)
    params = {k: rng.normal(size=v.shape).astype('f4') for k, v in param_shapes(MODEL).items()}
    return Checkpoint(MODEL, params, LoadReport(f'dense {seed}'))


@pytest.fixture(scope='module')
def dense():
    return random_checkpoint()


def collect(dense, batch, devices=None):
    parts = [IMAGES[i : i + batch] for i in range(0, len(IMAGES), batch)]
    batches = [(part, np.ones(len(part), 'f4')) for part in parts]
    return collect_statistics(dense, batches, co_activation=True, devices=devices)


@pytest.fixture(scope='module')
def statistics(dense):
    return collect(dense, 11)


def flat(statistics):
    return {
        (block, position, metric): value
        for block, of_block in statistics.values.items()
        for position, of_position in of_block.items()
        for metric, value in of_position.items()
    }


def sums_over(batches, zero, sum_of):
    """All batches summed by one compiled loop, like the steps of a pass."""
    step = lambda carry, x: (sum_of(carry, x), None)  # noqa: E731
    return jax.jit(lambda xs: jax.lax.scan(step, zero, xs)[0])(batches)


def test_sums_of_thousands_of_batches_are_those_of_float64():
    rng = np.random.default_rng(0)
    batches = rng.lognormal(sigma=2, size=(2000, 15, 7)).astype('f4')
    expected = batches.astype('f8').sum(axis=(0, 1))
    zero = jnp.zeros(7)
    two = sums_over(batches, TwoFloat(zero, zero), lambda s, x: add(s, total(x)))
    ours = np.asarray(two.high, 'f8') + np.asarray(two.low, 'f8')
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    plain = sums_over(batches, zero, lambda s, x: s + x.sum(axis=0))
    assert np.max(np.abs(np.asarray(plain, 'f8') / expected - 1)) > 1e-7


def test_counts_stay_exact_above_what_float32_holds():
    batches = np.full((2000, 1, 1), 2**15 + 1, 'f4')
    zero = jnp.zeros(1)
    two = sums_over(batches, TwoFloat(zero, zero), lambda s, x: add(s, total(x)))
    assert int(two.high[0]) + int(two.low[0]) == 2000 * (2**15 + 1)
    assert int(sums_over(batches, zero, lambda s, x: s + x[0])[0]) != 2000 * (2**15 + 1)


def test_a_batchs_sums_are_norms_and_counts_of_each_image():
    x = np.random.default_rng(0).normal(size=(5, 3, 7)).astype('f4')
    mask = np.array([1, 1, 0, 1, 1], 'f4')
    x[2] = np.nan  # masked images do not count, whatever they are
    sums = jax.jit(lambda x: batch_sums(x, mask, co_activation=True))(x)
    kept = x[mask > 0].astype('f8')
    norms = [np.abs(kept).sum(1), np.sqrt((kept**2).sum(1)), (kept > 0).sum(1)]
    np.testing.assert_allclose(sums['norms'].high, np.sum(norms, axis=1), rtol=1e-6)
    tokens = (kept > 0).reshape(-1, 7).astype('f8')
    np.testing.assert_array_equal(sums['co_activation'].high, tokens.T @ tokens)


@pytest.mark.parametrize('batch, devices', [(11, 1), (4, 3), (3, 8), (1, 1)])
def test_neither_batch_size_nor_devices_change_the_statistics(dense, statistics, batch, devices):
    other = collect(dense, batch, jax.devices()[:devices])
    assert other.images == 11
    assert other.fingerprint == statistics.fingerprint
    for key, value in flat(statistics).items():
        np.testing.assert_allclose(flat(other)[key], value, rtol=1e-6, err_msg=str(key))


def test_all_blocks_and_positions_are_measured_at_once(statistics):
    assert list(statistics.values) == ['blocks_0', 'blocks_1']
    shapes = {key[1:]: value.shape for key, value in flat(statistics).items()}
    assert shapes['mlp_act', 'co_activation'] == (12, 12)
    assert shapes['attn_proj_input', 'L1'] == shapes['mlp_input', 'L2'] == (6,)
    together = statistics.of('blocks_1', 'mlp_act', 'co_activation')
    np.testing.assert_allclose(
        np.diag(together), statistics.of('blocks_1', 'mlp_act', 'active'), rtol=1e-12
    )


def test_statistics_survive_saving_and_say_what_they_are_of(tmp_path, statistics, dense):
    statistics.save(tmp_path / 's.npz')
    loaded = Statistics.load(tmp_path / 's.npz')
    for key, value in flat(statistics).items():
        np.testing.assert_array_equal(flat(loaded)[key], value)
    assert loaded.images == 11
    assert loaded.origin == {'checkpoint': 'dense 0'}
    loaded.check(dense, [('blocks_1', 'mlp_act', 'co_activation'), ('blocks_0', 'mlp_input', 'L1')])
    (tmp_path / 'cut.npz').write_bytes((tmp_path / 's.npz').read_bytes()[:500])
    with pytest.raises(UserError, match='cut.npz cannot be read as saved statistics.*again'):
        Statistics.load(tmp_path / 'cut.npz')


def changed(statistics, block, position, metric, value):
    values = {b: {p: dict(m) for p, m in at.items()} for b, at in statistics.values.items()}
    if value is None:
        del values[block][position][metric]
    else:
        values[block][position][metric] = value
    return dataclasses.replace(statistics, values=values)


@pytest.mark.parametrize(
    'metric, value, message',
    [
        ('L2', None, 'no L2 for mlp_act of blocks_1 of dense 0; collect them again'),
        ('co_activation', None, 'no co_activation for mlp_act .* again with co-activation'),
        ('L2', np.ones(5), r'have \(5,\) as L2 for mlp_act of blocks_1, dense 0 has 12 units'),
        ('L1', np.zeros(12), 'only zero values as L1 for mlp_act of blocks_1; check'),
        ('active', np.full(12, np.nan), 'NaN, .* as active for mlp_act of blocks_1'),
    ],
)
def test_values_that_cannot_be_used_are_refused(dense, statistics, metric, value, message):
    statistics = changed(statistics, 'blocks_1', 'mlp_act', metric, value)
    statistics.check(dense, [('blocks_0', 'mlp_act', metric)])
    with pytest.raises(UserError, match=message):
        statistics.check(dense, [('blocks_1', 'mlp_act', metric)])


def test_statistics_of_another_checkpoint_are_refused(statistics):
    with pytest.raises(UserError, match="are of dense 0 with fingerprint '.{12}', dense 1 has"):
        statistics.check(random_checkpoint(1), [('blocks_0', 'mlp_act', 'L2')])


def test_a_fingerprint_is_of_names_and_values_but_not_their_order(dense):
    params = dense.params
    reverse = dict(reversed(params.items()))
    assert fingerprint(reverse) == fingerprint(params)
    other = params | {'cls_token': np.nextafter(params['cls_token'], np.float32(9))}
    assert fingerprint(other) != fingerprint(params)


def test_no_images_and_uneven_groups_are_refused(dense):
    with pytest.raises(UserError, match='there is no calibration image'):
        collect_statistics(dense, [])
    with pytest.raises(UserError, match='a batch of 11 images is not a multiple of group 4'):
        collect_statistics(dense, [(IMAGES, np.ones(11))], group=4)


def source_of(count):
    images = np.random.default_rng(2).integers(0, 256, (5, 8, 8), dtype=np.uint8)
    return ArraySource('spots', images, np.zeros(5, int), np.arange(count), ('spot',))


def test_a_calibration_set_smaller_than_a_batch_is_one_batch(dense):
    source = source_of(3)
    statistics = calibrate(dense, source, images=1000, crop_fraction=1.0, seed=1)
    assert statistics.images == 3
    assert statistics.origin == dict(
        checkpoint='dense 0',
        data='spots',
        image_size=[8, 8],
        crop_fraction=1.0,
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
    )
    images = np.stack([source[i]['image'] for i in range(3)]) / np.float32(255)
    images = np.float32((images - dense.mean) / dense.std)
    expected = collect_statistics(dense, [(images, np.ones(3, 'f4'))])
    for key, value in flat(expected).items():
        np.testing.assert_allclose(flat(statistics)[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('images, there_are', [(0, 3), (5, 0)])
def test_no_calibration_images_are_refused(dense, images, there_are):
    message = f'{images} calibration images are asked for and spots has {there_are}'
    with pytest.raises(UserError, match=message):
        calibrate(dense, source_of(there_are), images=images, crop_fraction=1.0)
