import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.data import mixing

KEY = jax.random.key(0)
# XLA takes seconds to optimise random numbers for a CPU, and these run once.
FAST_COMPILE = {'xla_backend_optimization_level': 0}
CASES = range(9)  # of the batches below, those that are looked at closely


def example_batch():
    """Returns 5 images of 33 x 47, and labels of 3 classes; image 2 is its own partner."""
    images = np.random.default_rng(0).normal(size=(5, 33, 47, 3)).astype(np.float32)
    return images, np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]]


@functools.cache
def erase(probability):
    """Erases boxes of 400 images of 40 x 60, all of whose pixels are 7."""
    return np.asarray(_erase(np.full((400, 40, 60, 1), 7, np.float32), probability))


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def _erase(images, probability):
    return mixing.random_erase(KEY, images, probability)


@functools.cache
def mix(mixup_alpha, cutmix_alpha, switch_probability=0.5):
    """Mixes the example batch with 400 keys; returns images (400, 5, 33, 47, 3), labels."""
    keys = jax.random.split(KEY, 400)
    return jax.tree.map(np.asarray, _mix(mixup_alpha, cutmix_alpha, keys, switch_probability))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST_COMPILE)
def _mix(mixup_alpha, cutmix_alpha, keys, switch_probability):
    def mix_one(key):
        return mixing.mixup_cutmix(
            key, *example_batch(), mixup_alpha, cutmix_alpha, switch_probability
        )

    return jax.vmap(mix_one)(keys)


def test_normalise_of_uint8():
    images = np.array([[[[0, 255, 51]]]], np.uint8)

    result = mixing.normalise(images, (0.5, 0.5, 0.1), (0.5, 0.25, 0.1))

    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result[0, 0, 0], [-1, 2, 1], rtol=1e-6)


def changed_boxes(images, result):
    """Returns (height, width) of the changed part of every image, having checked it is a box."""
    sizes = []
    for changed in np.any(result != images, axis=-1):
        rows, columns = changed.any(axis=1), changed.any(axis=0)
        np.testing.assert_array_equal(changed, rows[:, None] & columns)
        for line in (rows, columns):
            assert np.abs(np.diff(line.astype(int), prepend=0, append=0)).sum() in (0, 2)
        sizes.append((rows.sum(), columns.sum()))
    return np.array(sizes)


def test_random_erase_fills_boxes_of_the_published_sizes_with_unit_noise():
    result = erase(1.0)

    heights, widths = changed_boxes(7, result).T
    areas, aspects = heights * widths / 2400, heights / widths
    assert heights.min() > 0
    assert 0.015 < areas.min() < 0.05
    assert 0.3 < areas.max() < 0.35
    assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.03)
    assert 0.25 < aspects.min() < 0.45
    assert 2.2 < aspects.max() < 3.8
    noise = result[result != 7]
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)


def test_random_erase_reaches_every_border():
    changed = erase(1.0)[..., 0] != 7

    assert changed.any(axis=(0, 1)).all()
    assert changed.any(axis=(0, 2)).all()


@pytest.mark.parametrize('probability', [0.0, 0.25])
def test_random_erase_chooses_a_share_of_the_images(probability):
    chosen = np.any(erase(probability) != 7, axis=(1, 2, 3))

    assert chosen.mean() == pytest.approx(probability, abs=0.06)


def test_both_alphas_zero_return_the_arguments_themselves():
    images, labels = example_batch()

    result = mixing.mixup_cutmix(KEY, images, labels, 0.0, 0.0)

    assert result[0] is images
    assert result[1] is labels


@pytest.mark.parametrize('case', CASES)
def test_mixup_alone_blends_images_and_labels_by_the_same_lambda(case):
    images, labels = example_batch()

    mixed_images, mixed_labels = (values[case] for values in mix(0.5, 0.0))

    lam = mixed_labels[0, 0]
    assert 0 <= lam <= 1
    np.testing.assert_allclose(mixed_images, lam * images + (1 - lam) * images[::-1], atol=1e-5)
    np.testing.assert_allclose(mixed_labels, lam * labels + (1 - lam) * labels[::-1], atol=1e-6)
    np.testing.assert_allclose(mixed_labels.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize('case', CASES)
def test_cutmix_alone_pastes_a_box_and_labels_by_the_share_of_pixels(case):
    images, labels = example_batch()

    mixed_images, mixed_labels = (values[case] for values in mix(0.0, 1.0))

    assert np.all((mixed_images == images) | (mixed_images == images[::-1]))
    sizes = changed_boxes(images, mixed_images)
    assert np.all(sizes[[1, 3, 4]] == sizes[0])
    lam = 1 - sizes[0].prod() / (33 * 47)
    np.testing.assert_allclose(mixed_labels, lam * labels + (1 - lam) * labels[::-1], atol=1e-6)
    np.testing.assert_allclose(mixed_labels.sum(axis=1), 1, atol=1e-6)


def test_lambda_of_mixup_follows_the_beta_distribution():
    lam = mix(0.5, 0.0)[1][:, 0, 0]

    assert np.mean(lam) == pytest.approx(0.5, abs=0.06)
    assert np.var(lam) == pytest.approx(1 / (4 * (2 * 0.5 + 1)), abs=0.02)


def test_cutmix_keeps_about_lambda_of_the_pixels():
    lam = mix(0.0, 1.0)[1][:, 0, 0]

    # A box of area a ~ U(0, 1), centred uniformly, has the share (1 - sqrt(a) / 4)^2 within the
    # border: the mean of 1 - a (1 - sqrt(a) / 4)^2 is 0.679; boxes of even sides keep a bit more.
    assert np.mean(lam) == pytest.approx(0.69, abs=0.05)


@pytest.mark.parametrize('switch_probability', [0.0, 0.3, 1.0])
def test_switch_probability_is_how_often_cutmix_is_used(switch_probability):
    images, _ = example_batch()
    mixed, _ = mix(0.8, 1.0, switch_probability)

    is_cutmix = np.all((mixed == images) | (mixed == images[::-1]), axis=(1, 2, 3, 4))

    assert np.mean(is_cutmix) == pytest.approx(switch_probability, abs=0.08)


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jetmoe_jax.data import mixing

assert jax.device_count() == 8
rng = np.random.default_rng(0)
images = rng.normal(size=(16, 9, 7, 3)).astype(np.float32)
labels = np.eye(16, dtype=np.float32)
step = jax.jit(
    lambda key, images, labels: mixing.mixup_cutmix(
        key, mixing.random_erase(key, images, 0.5), labels, 0.8, 1.0
    )
)
sharding = NamedSharding(Mesh(np.array(jax.devices()), 'data'), P('data'))
for seed in range(4):
    key = jax.random.key(seed)
    alone = step(key, images, labels)
    sharded = step(key, *jax.device_put((images, labels), sharding))
    for a, s in zip(alone, sharded):
        np.testing.assert_allclose(a, s, atol=1e-6)
"""


def test_the_numbers_do_not_depend_on_how_the_batch_is_sharded():
    flags = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
    environment = {**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
    environment['PYTHONPATH'] = os.pathsep.join(sys.path)

    result = subprocess.run(
        [sys.executable, '-c', SHARDED], env=environment, capture_output=True, text=True
    )

    assert result.returncode == 0, result.stderr
