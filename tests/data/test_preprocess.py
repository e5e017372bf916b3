import numpy as np
import pytest
from PIL import Image

from jetmoe_jax.data import preprocess
from jetmoe_jax.errors import UserError


def random_image(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def resize(image, height, width):
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def train(image, augment, seed=0, image_size=9, **kwargs):
    rng = np.random.default_rng(seed)
    return preprocess.train_transform(image, rng, image_size=image_size, augment=augment, **kwargs)


@pytest.mark.parametrize('shape', [(31, 17), (17, 31), (5, 5), (3, 200), (1, 1)])
@pytest.mark.parametrize('augment', preprocess.AUGMENTATIONS)
@pytest.mark.parametrize('image_size', [7, (9, 5)])
def test_any_image_becomes_the_asked_size(shape, augment, image_size):
    height, width = (7, 7) if image_size == 7 else image_size

    for result in (
        train(random_image(*shape), augment, image_size=image_size),
        preprocess.eval_transform(random_image(*shape), image_size=image_size),
    ):
        assert result.shape == (height, width, 3)
        assert result.dtype == np.uint8


def test_square_image_at_crop_fraction_one_is_only_resized():
    image = random_image(8, 8)

    result = preprocess.eval_transform(image, image_size=15, crop_fraction=1.0)

    np.testing.assert_array_equal(result, resize(image, 15, 15))


def test_evaluation_resizes_the_short_side_to_8_7_and_cuts_out_the_centre():
    image = random_image(40, 61)

    result = preprocess.eval_transform(image, image_size=14)  # covers 16: 16 x int(24.4)

    np.testing.assert_array_equal(result, resize(image, 16, 24)[1:15, 5:19])


def test_evaluation_rounds_the_covered_size_down_as_timm_does():
    image = random_image(300, 300)

    result = preprocess.eval_transform(image, image_size=224, crop_fraction=0.9)  # 248.9

    np.testing.assert_array_equal(result, resize(image, 248, 248)[12:236, 12:236])


def test_none_is_the_evaluation_transform():
    image = random_image(20, 30)

    np.testing.assert_array_equal(
        train(image, 'none', crop_fraction=0.75),
        preprocess.eval_transform(image, image_size=9, crop_fraction=0.75),
    )


def test_shift_moves_by_at_most_an_eighth_and_repeats_the_border():
    image = random_image(16, 16)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode='edge')
    windows = {padded[y : y + 16, x : x + 16].tobytes(): (y, x) for y in range(5) for x in range(5)}

    seen = {
        windows[train(image, 'shift', seed, image_size=16, crop_fraction=1.0).tobytes()]
        for seed in range(200)
    }

    assert len(seen) == 25


def test_crop_flip_without_a_crop_is_the_image_or_its_mirror_image():
    image = random_image(9, 9)
    results = [
        train(image, 'crop_flip', seed, scale=(1.0, 1.0), ratio=(1.0, 1.0)) for seed in range(200)
    ]

    plain = sum(np.array_equal(result, image) for result in results)
    mirrored = sum(np.array_equal(result, image[:, ::-1]) for result in results)

    assert plain + mirrored == 200
    assert 70 < mirrored < 130


def test_random_boxes_have_the_asked_area_and_aspect():
    rng = np.random.default_rng(0)
    boxes = np.array(
        [preprocess._random_box((300, 500), rng, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(500)]
    )

    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 500
    assert boxes[:, 3].max() <= 300
    areas, aspects = widths * heights / 150_000, widths / heights
    assert 0.078 < areas.min() < 0.12
    assert areas.max() > 0.6
    assert 0.74 < aspects.min() < 0.8
    assert 1.25 < aspects.max() < 1.35
    assert np.median(aspects) == pytest.approx(1.0, abs=0.06)  # log-uniform


def test_a_box_that_never_fits_becomes_the_central_one_with_an_allowed_aspect():
    box = preprocess._random_box((9, 90), np.random.default_rng(0), (1.0, 1.0), (3 / 4, 4 / 3))

    assert box == (39, 0, 51, 9)


def test_randaugment_changes_what_crop_flip_gives():
    image = random_image(30, 30)
    differ = [
        not np.array_equal(train(image, 'crop_flip', seed), train(image, 'randaugment', seed))
        for seed in range(20)
    ]

    assert any(differ)


@pytest.mark.parametrize('augment', ['shift', 'crop_flip', 'randaugment'])
def test_training_images_are_a_function_of_the_generator(augment):
    image = random_image(30, 40)

    first, again = (
        [train(image, augment, seed, image_size=16).tobytes() for seed in range(9)]
        for _ in range(2)
    )

    assert first == again
    assert len(set(first)) > 3


def test_unknown_augmentation_lists_the_known_ones():
    with pytest.raises(UserError, match="'flip', expected one of none, shift, crop_flip, rand"):
        train(random_image(5, 5), 'flip')


@pytest.mark.parametrize('crop_fraction', [0, 1.2])
def test_crop_fraction_outside_of_its_range_is_refused(crop_fraction):
    with pytest.raises(UserError, match='crop_fraction'):
        preprocess.eval_transform(random_image(5, 5), image_size=3, crop_fraction=crop_fraction)
