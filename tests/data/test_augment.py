import numpy as np
import pytest
from PIL import Image

from jetmoe_jax.data import augment

FILL = (1, 2, 3)


@pytest.fixture
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (13, 11, 3), np.uint8))


def apply(image, name, level, sign=1.0):
    return np.asarray(augment.apply_op(image, name, level, sign=sign, fill=FILL))


def test_there_are_the_fifteen_ops_of_the_increasing_set():
    assert len(augment.OPS) == 15


@pytest.mark.parametrize('name', augment.OPS)
@pytest.mark.parametrize('level', [0.0, 4.5, 10.0])
def test_every_op_keeps_size_and_mode(image, name, level):
    result = augment.apply_op(image, name, level, sign=-1.0)

    assert (result.size, result.mode) == (image.size, 'RGB')


@pytest.mark.parametrize(
    'name', sorted(set(augment.OPS) - {'AutoContrast', 'Equalize', 'Invert', 'Posterize'})
)
def test_level_zero_changes_nothing_and_level_nine_does(image, name):
    np.testing.assert_array_equal(apply(image, name, 0.0), image)
    assert np.any(apply(image, name, 9.0) != np.asarray(image))


@pytest.mark.parametrize('level, bits', [(0.0, 4), (2.5, 3), (9.0, 1), (10.0, 0)])
def test_posterize_keeps_the_highest_bits(image, level, bits):
    expected = np.asarray(image) & (256 - 2 ** (8 - bits))

    np.testing.assert_array_equal(apply(image, 'Posterize', level), expected)


def test_solarize_inverts_values_from_the_threshold_on(image):
    values = np.asarray(image)

    expected = np.where(values >= 256 - 230, 255 - values, values)
    np.testing.assert_array_equal(apply(image, 'Solarize', 9.0), expected)


def test_solarize_add_brightens_the_dark_half(image):
    values = np.asarray(image).astype(int)

    expected = np.where(values < 128, np.minimum(values + 99, 255), values)
    np.testing.assert_array_equal(apply(image, 'SolarizeAdd', 9.0), expected)


def test_invert_and_auto_contrast():
    image = Image.fromarray(np.linspace(50, 150, 21).astype(np.uint8).repeat(3).reshape(3, 7, 3))

    np.testing.assert_array_equal(apply(image, 'Invert', 9.0), 255 - np.asarray(image))
    stretched = apply(image, 'AutoContrast', 9.0)
    assert (stretched.min(), stretched.max()) == (0, 255)


def test_brightness_factor_is_a_tenth_or_1_9_at_level_ten():
    image = Image.new('RGB', (5, 3), (100, 50, 200))

    np.testing.assert_array_equal(apply(image, 'Brightness', 10.0, -1.0)[0, 0], (10, 5, 20))
    np.testing.assert_array_equal(apply(image, 'Brightness', 10.0, 1.0)[0, 0], (190, 95, 255))


def test_color_and_contrast_shrink_to_a_tenth_about_each_pixels_grey_and_the_mean_grey():
    image = Image.new('RGB', (6, 4), (100, 50, 200))
    image.paste((20, 40, 60), (0, 0, 3, 4))
    values, grey = np.asarray(image), np.asarray(image.convert('L'))[:, :, None]

    for name, centre in (('Color', grey), ('Contrast', grey.mean())):
        expected = centre + 0.1 * (values - 1.0 * centre)
        np.testing.assert_allclose(apply(image, name, 10.0, -1.0), expected, atol=1.01)


def test_sharpness_smooths_or_sharpens_and_keeps_the_mean(image):
    values = np.asarray(image)
    smooth, sharp = (apply(image, 'Sharpness', 9.0, sign) for sign in (-1.0, 1.0))

    assert smooth.std() < values.std() < sharp.std()
    assert smooth.mean() == pytest.approx(values.mean(), abs=2)


@pytest.mark.parametrize('name, axis', [('TranslateX', 1), ('TranslateY', 0)])
def test_translation_moves_by_a_share_of_the_size_and_fills(name, axis):
    values = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)

    result = apply(Image.fromarray(values), name, 10.0)  # 0.45 of 20 is 9 pixels

    result, values = np.moveaxis(result, axis, 0), np.moveaxis(values, axis, 0)
    np.testing.assert_array_equal(result[:11], values[9:])
    np.testing.assert_array_equal(result[11:], np.broadcast_to(FILL, (9, 20, 3)))


def test_rotation_fills_the_corners_and_keeps_the_centre():
    result = apply(Image.new('RGB', (21, 21), (200, 200, 200)), 'Rotate', 10.0)

    np.testing.assert_array_equal(result[0, 0], FILL)
    np.testing.assert_array_equal(result[10, 10], (200, 200, 200))


def test_shear_x_moves_rows_in_proportion_to_their_height():
    values = np.zeros((21, 21, 3), np.uint8)
    values[:, 10] = 255

    result = apply(Image.fromarray(values), 'ShearX', 10.0)[:, :, 1].argmax(axis=1)

    assert result[0] - result[20] == pytest.approx(0.3 * 20, abs=1)


def test_rand_augment_is_a_function_of_its_generator(image):
    def run(seed):
        return np.asarray(augment.rand_augment(image, np.random.default_rng(seed)))

    np.testing.assert_array_equal(run(3), run(3))
    assert len({run(seed).tobytes() for seed in range(20)}) > 8


def test_rand_augment_leaves_the_quarter_of_images_that_no_op_is_applied_to(image):
    rng = np.random.default_rng(0)
    unchanged = np.mean(
        [np.array_equal(augment.rand_augment(image, rng), image) for _ in range(400)]
    )

    assert 0.19 < unchanged < 0.36  # 1/4, and some ops that happen to change nothing


def test_probability_zero_is_the_identity(image):
    result = augment.rand_augment(image, np.random.default_rng(0), probability=0.0)

    np.testing.assert_array_equal(result, image)
