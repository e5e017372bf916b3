import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.data import mixing

KEYS = [jax.random.key(seed) for seed in range(12)]
erase = jax.jit(mixing.random_erase)
mix = jax.jit(mixing.mixup_cutmix, static_argnums=(3, 4, 5))


def batch(b=5, height=9, width=7, k=3):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(b, height, width, 3)).astype(np.float32)
    labels = np.eye(k, dtype=np.float32)[np.arange(b) % k]
    return images, labels


def test_normalise_of_uint8():
    images = np.array([[[[0, 255, 51]]]], np.uint8)

    result = mixing.normalise(images, (0.5, 0.5, 0.1), (0.5, 0.25, 0.1))

    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result[0, 0, 0], [-1, 2, 1], rtol=1e-6)


def erased_boxes(images, result):
    """Returns (height, width) of the changed box of every image, and checks that it is a box."""
    sizes = []
    for changed in np.any(np.asarray(result) != images, axis=-1):
        rows, columns = changed.any(axis=1), changed.any(axis=0)
        np.testing.assert_array_equal(changed, rows[:, None] & columns)
        for line in (rows, columns):
            assert np.abs(np.diff(line.astype(int), prepend=0, append=0)).sum() in (0, 2)
        sizes.append((rows.sum(), columns.sum()))
    return np.array(sizes)


def test_random_erase_fills_boxes_of_the_published_sizes_with_unit_noise():
    images = np.full((300, 40, 60, 3), 7.0, np.float32)

    result = erase(KEYS[0], images, 1.0)

    heights, widths = erased_boxes(images, result).T
    areas, aspects = heights * widths / 2400, heights / widths
    assert heights.min() > 0
    assert 0.015 < areas.min() < 0.05
    assert 0.3 < areas.max() < 0.35
    assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.03)
    assert 0.25 < aspects.min() < 0.45
    assert 2.2 < aspects.max() < 3.8
    noise = np.asarray(result)[np.asarray(result) != 7]
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)


def test_random_erase_reaches_every_border():
    images = np.full((300, 8, 12, 1), 7.0, np.float32)

    touched = np.any(np.asarray(erase(KEYS[1], images, 1.0)) != 7, axis=(0, 3))

    assert touched.all()


@pytest.mark.parametrize('probability', [0.0, 0.25])
def test_random_erase_chooses_a_share_of_the_images(probability):
    images = np.full((800, 8, 8, 1), 7.0, np.float32)

    chosen = np.any(np.asarray(erase(KEYS[2], images, probability)) != 7, axis=(1, 2, 3))

    assert chosen.mean() == pytest.approx(probability, abs=0.05)


def test_both_alphas_zero_return_the_arguments_themselves():
    images, labels = batch()

    result = mixing.mixup_cutmix(KEYS[0], images, labels, 0.0, 0.0)

    assert result[0] is images
    assert result[1] is labels


def label_share(labels, mixed, image=0):
    """Returns lambda, from the label of an image whose partner is of another class."""
    return float(np.asarray(mixed)[image] @ labels[image])


@pytest.mark.parametrize('key', KEYS)
def test_mixup_alone_blends_images_and_labels_by_the_same_lambda(key):
    images, labels = batch()

    mixed_images, mixed_labels = mix(key, images, labels, 0.8, 0.0)

    share = label_share(labels, mixed_labels)
    assert 0 <= share <= 1
    np.testing.assert_allclose(mixed_images, share * images + (1 - share) * images[::-1], atol=1e-6)
    np.testing.assert_allclose(mixed_labels, share * labels + (1 - share) * labels[::-1], atol=1e-6)
    np.testing.assert_allclose(mixed_labels.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize('key', KEYS)
def test_cutmix_alone_pastes_a_box_and_labels_by_the_share_of_pixels(key):
    images, labels = batch()

    mixed_images, mixed_labels = mix(key, images, labels, 0.0, 1.0)

    ours, theirs = mixed_images == images, mixed_images == images[::-1]
    assert np.all(ours | theirs)
    sizes = erased_boxes(images, mixed_images)
    assert np.all(sizes[[0, 1, 3, 4]] == sizes[0])
    share = 1 - sizes[0].prod() / 63
    assert label_share(labels, mixed_labels) == pytest.approx(share, abs=1e-6)
    np.testing.assert_allclose(mixed_labels, share * labels + (1 - share) * labels[::-1], atol=1e-6)


def test_lambda_follows_the_beta_distribution():
    images, labels = batch(b=2, height=2, width=2)
    keys = jax.random.split(KEYS[0], 3000)

    mixed = jax.vmap(lambda key: mixing.mixup_cutmix(key, images, labels, 0.5, 0.0)[1][0, 0])(keys)

    assert np.mean(mixed) == pytest.approx(0.5, abs=0.03)
    assert np.var(mixed) == pytest.approx(1 / (4 * (2 * 0.5 + 1)), abs=0.01)


def test_cutmix_keeps_about_lambda_of_the_pixels():
    images, labels = batch(b=2, height=64, width=48)
    keys = jax.random.split(KEYS[0], 500)

    mixed = jax.vmap(lambda key: mixing.mixup_cutmix(key, images, labels, 0.0, 1.0)[1][0, 0])(keys)

    # A box of area a, centred uniformly, keeps (1 - side / 4)^2 of itself within the border, with
    # side = sqrt(a): the mean over a ~ U(0, 1) of 1 - a (1 - sqrt(a) / 4)^2 is 0.679.
    assert np.mean(mixed) == pytest.approx(0.679, abs=0.04)


@pytest.mark.parametrize('switch_probability', [0.0, 0.3, 1.0])
def test_switch_probability_is_how_often_cutmix_is_used(switch_probability):
    images, labels = batch(b=2, height=5, width=7)
    images[1] = images[0] + 1

    def is_cutmix(key):
        mixed, _ = mixing.mixup_cutmix(key, images, labels, 0.8, 1.0, switch_probability)
        return jnp.all((mixed == images) | (mixed == images[::-1]))

    used = jax.vmap(is_cutmix)(jax.random.split(KEYS[0], 400))

    assert np.mean(used) == pytest.approx(switch_probability, abs=0.08)


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
        np.testing.assert_array_equal(a, s)
"""


def test_the_numbers_do_not_depend_on_how_the_batch_is_sharded():
    flags = '--xla_force_host_platform_device_count=8'
    environment = {**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
    environment['PYTHONPATH'] = os.pathsep.join(sys.path)

    result = subprocess.run(
        [sys.executable, '-c', SHARDED], env=environment, capture_output=True, text=True
    )

    assert result.returncode == 0, result.stderr
