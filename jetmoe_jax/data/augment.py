"""RandAugment (Cubuk et al., 2020, arXiv:1909.13719) on Pillow images.

The setting is the one that timm calls `rand-m9-mstd0.5-inc1`: two ops per image, drawn with
replacement, each applied with probability 1/2 at a magnitude from N(9, 0.5) clipped to [0, 10],
from the "increasing" set, in which a higher level always changes the image more.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

MAX_LEVEL = 10.0


class Op(NamedTuple):
    """One operation of RandAugment.

    Attributes:
        apply: (image, argument, fill) -> image of the same size; `fill` is an RGB colour.
        argument: level in [0, 10] -> the argument of `apply`.
        signed: whether the sign of the level is drawn at random first.
    """

    apply: Callable[[Image.Image, float, tuple[int, int, int]], Image.Image]
    argument: Callable[[float], float]
    signed: bool = False


def rand_augment(
    image: Image.Image,
    rng: np.random.Generator,
    *,
    num_ops: int = 2,
    magnitude: float = 9.0,
    magnitude_std: float = 0.5,
    probability: float = 0.5,
    fill: tuple[int, int, int] = (124, 116, 104),
) -> Image.Image:
    """Applies `num_ops` random ops to an RGB image; the size stays.

    Args:
        image: an RGB image.
        rng: the only source of randomness.
        num_ops: ops drawn, with replacement.
        magnitude: mean level of an op, of 10.
        magnitude_std: standard deviation of the level.
        probability: with which each of the drawn ops is applied.
        fill: colour of the pixels that geometric ops uncover; ImageNet's mean.
    """
    names = tuple(OPS)
    for name in rng.choice(names, num_ops):
        if rng.random() < probability:
            level = float(np.clip(rng.normal(magnitude, magnitude_std), 0.0, MAX_LEVEL))
            sign = -1.0 if rng.random() < 0.5 else 1.0
            image = apply_op(image, name, level, sign=sign, fill=fill)
    return image


def apply_op(
    image: Image.Image,
    name: str,
    level: float,
    *,
    sign: float = 1.0,
    fill: tuple[int, int, int] = (124, 116, 104),
) -> Image.Image:
    """Applies the op `name` of `OPS` at a level in [0, 10]; `sign` counts where the op has one."""
    op = OPS[name]
    return op.apply(image, op.argument(sign * level if op.signed else level), fill)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: tuple[int, int, int]):
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill
    )


def _auto_contrast(image, _, fill):
    return ImageOps.autocontrast(image)


def _equalize(image, _, fill):
    return ImageOps.equalize(image)


def _invert(image, _, fill):
    return ImageOps.invert(image)


def _rotate(image, degrees, fill):
    return image.rotate(degrees, Image.Resampling.BICUBIC, fillcolor=fill)


def _posterize(image, bits, fill):
    # ImageOps.posterize refuses 0 bits, which level 10 asks for: nothing is left, a black image.
    return ImageOps.posterize(image, bits) if bits else Image.new('RGB', image.size)


def _solarize(image, threshold, fill):
    return ImageOps.solarize(image, threshold)


def _solarize_add(image, addend, fill):
    table = [min(255, value + addend) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _color(image, factor, fill):
    return ImageEnhance.Color(image).enhance(factor)


def _contrast(image, factor, fill):
    return ImageEnhance.Contrast(image).enhance(factor)


def _brightness(image, factor, fill):
    return ImageEnhance.Brightness(image).enhance(factor)


def _sharpness(image, factor, fill):
    return ImageEnhance.Sharpness(image).enhance(factor)


def _shear_x(image, factor, fill):
    return _affine(image, (1, factor, 0, 0, 1, 0), fill)


def _shear_y(image, factor, fill):
    return _affine(image, (1, 0, 0, factor, 1, 0), fill)


def _translate_x(image, share, fill):
    return _affine(image, (1, 0, share * image.width, 0, 1, 0), fill)


def _translate_y(image, share, fill):
    return _affine(image, (1, 0, 0, 0, 1, share * image.height), fill)


def _unused(level):
    return 0.0


def _enhance_factor(level):
    return max(0.1, 1.0 + 0.9 * level / MAX_LEVEL)


def _fraction_of(maximum):
    """level -> `maximum` at level 10, 0 at level 0, linear in between."""
    return lambda level: maximum * level / MAX_LEVEL


# The ranges are those of timm's documentation of RandAugment: at level 10 a rotation of 30 degrees,
# a shear of 0.3, a shift of 0.45 of the size, factors 0.1 or 1.9, 0 bits, threshold 0, addend 110.
OPS: dict[str, Op] = {
    'AutoContrast': Op(_auto_contrast, _unused),
    'Equalize': Op(_equalize, _unused),
    'Invert': Op(_invert, _unused),
    'Rotate': Op(_rotate, _fraction_of(30.0), signed=True),
    'Posterize': Op(_posterize, lambda level: 4 - int(4 * level / MAX_LEVEL)),
    'Solarize': Op(_solarize, lambda level: 256 - int(256 * level / MAX_LEVEL)),
    'SolarizeAdd': Op(_solarize_add, lambda level: int(110 * level / MAX_LEVEL)),
    'Color': Op(_color, _enhance_factor, signed=True),
    'Contrast': Op(_contrast, _enhance_factor, signed=True),
    'Brightness': Op(_brightness, _enhance_factor, signed=True),
    'Sharpness': Op(_sharpness, _enhance_factor, signed=True),
    'ShearX': Op(_shear_x, _fraction_of(0.3), signed=True),
    'ShearY': Op(_shear_y, _fraction_of(0.3), signed=True),
    'TranslateX': Op(_translate_x, _fraction_of(0.45), signed=True),
    'TranslateY': Op(_translate_y, _fraction_of(0.45), signed=True),
}
