"""From an image of any size to the model's size: resize, crop, flip, shift, on uint8 arrays.

Normalisation, erasing and mixing happen on the device, in `mixing`.
"""

import math

import numpy as np
from PIL import Image

from jetmoe_jax.data import augment as augment_lib
from jetmoe_jax.errors import UserError

AUGMENTATIONS = ('none', 'shift', 'crop_flip', 'randaugment')
MAX_SHIFT = 1 / 8
CROP_ATTEMPTS = 10

Size = int | tuple[int, int]


def train_transform(
    image: np.ndarray,
    rng: np.random.Generator,
    *,
    image_size: Size,
    augment: str,
    crop_fraction: float = 0.875,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> np.ndarray:
    """Makes a training image, uint8 (height, width, 3), of `image`, uint8 (H, W, 3).

    Args:
        image: any size.
        rng: the only source of randomness.
        image_size: the result's size, or (height, width).
        augment: 'none', as in evaluation; 'shift', as in evaluation and then moved by up to an
            eighth of the size, the border repeated (for digits, which a flip would spoil);
            'crop_flip', a random resized crop (Szegedy et al., 2015) and a horizontal flip of every
            second image; 'randaugment', the same followed by RandAugment.
        crop_fraction: as in `eval_transform`, for 'none' and 'shift'.
        scale: area of the random crop, as a share of the image's.
        ratio: aspect (width / height) of the random crop, drawn log-uniformly.

    Raises:
        UserError: an unknown `augment`.
    """
    check_augment(augment)
    if augment in ('none', 'shift'):
        result = eval_transform(image, image_size=image_size, crop_fraction=crop_fraction)
        return _shift(result, rng) if augment == 'shift' else result

    height, width = _pair(image_size)
    left, top, right, bottom = _random_box(image.shape[:2], rng, scale, ratio)
    crop = Image.fromarray(image[top:bottom, left:right])
    crop = crop.resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if augment == 'randaugment':
        crop = augment_lib.rand_augment(crop, rng)
    return np.array(crop)


def eval_transform(
    image: np.ndarray, *, image_size: Size, crop_fraction: float = 0.875
) -> np.ndarray:
    """Resizes and crops the centre: uint8 (H, W, 3) -> uint8 (height, width, 3).

    The image is resized (bicubic, antialiased) so that it covers floor(image_size / crop_fraction)
    with its aspect kept, and the centre of image_size is cut out, as timm does: 256 and 224 at
    7/8. At 1 a square image is only resized.

    Raises:
        UserError: `crop_fraction` is not in (0, 1].
    """
    if not 0 < crop_fraction <= 1:
        raise UserError(f'crop_fraction is {crop_fraction}, expected a number in (0, 1].')
    height, width = _pair(image_size)
    cover = math.floor(height / crop_fraction), math.floor(width / crop_fraction)
    # One side is met exactly, the other is longer, rounded down; in integers, so that no rounding
    # error costs a pixel.
    if cover[0] * image.shape[1] >= cover[1] * image.shape[0]:
        resized_height, resized_width = cover[0], cover[0] * image.shape[1] // image.shape[0]
    else:
        resized_height, resized_width = cover[1] * image.shape[0] // image.shape[1], cover[1]
    resized = np.array(
        Image.fromarray(image).resize((resized_width, resized_height), Image.Resampling.BICUBIC)
    )
    top = round((resized_height - height) / 2)
    left = round((resized_width - width) / 2)
    return resized[top : top + height, left : left + width]


def check_augment(augment: str) -> None:
    """Raises a UserError that lists the known names if `augment` is not one of them."""
    if augment not in AUGMENTATIONS:
        raise UserError(f'augment is {augment!r}, expected one of {", ".join(AUGMENTATIONS)}.')


def _pair(image_size: Size) -> tuple[int, int]:
    return (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)


def _shift(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    height, width = image.shape[:2]
    pad_y, pad_x = int(height * MAX_SHIFT), int(width * MAX_SHIFT)
    padded = np.pad(image, ((pad_y, pad_y), (pad_x, pad_x), (0, 0)), mode='edge')
    top = rng.integers(2 * pad_y + 1)
    left = rng.integers(2 * pad_x + 1)
    return padded[top : top + height, left : left + width]


def _random_box(
    shape: tuple[int, int],
    rng: np.random.Generator,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Draws (left, top, right, bottom) within an image of shape (height, width).

    Boxes that stick out are drawn again, up to ten times; then the largest central box with an
    allowed aspect is taken.
    """
    height, width = shape
    for _ in range(CROP_ATTEMPTS):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(rng.integers(width - box_width + 1))
            top = int(rng.integers(height - box_height + 1))
            return left, top, left + box_width, top + box_height

    box_width = min(width, max(1, round(height * ratio[1])))
    box_height = min(height, max(1, round(width / ratio[0])))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height
