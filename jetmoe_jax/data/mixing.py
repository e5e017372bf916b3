"""What happens to a batch on the device, inside the jitted train step: pure functions of a key.

b images, k classes; images are NHWC. How a batch is sharded changes nothing but the rounding.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

ERASE_AREA = (0.02, 1 / 3)
ERASE_ASPECT = (0.3, 1 / 0.3)
ERASE_ATTEMPTS = 10


def normalise(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Returns (images / 255 - mean) / std in float32.

    Args:
        images: (b, H, W, 3), uint8 or float, in [0, 255].
        mean: per channel, of images in [0, 1].
        std: likewise.
    """
    mean, std = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    return (images.astype(jnp.float32) / 255 - mean) / std


def random_erase(rng: jax.Array, images: jax.Array, probability: float) -> jax.Array:
    """Random erasing (Zhong et al., 2020, arXiv:1708.04896): a box of an image becomes noise.

    The box has U(0.02, 1/3) of the image's area and a log-uniform aspect in [0.3, 1/0.3]; up to ten
    boxes are drawn until one fits into the image (as timm does); if none does, the image stays.

    Args:
        rng: a key.
        images: normalised, (b, H, W, c), any float type; c is at most 3.
        probability: with which an image gets a box, independently.

    Returns:
        The images, same shape and type; the noise is N(0, 1) per pixel and channel.
    """
    b, height, width, _ = images.shape
    shape_key, place_key, noise_key = jax.random.split(rng, 3)
    area, aspect = jax.random.uniform(shape_key, (2, b, ERASE_ATTEMPTS))
    area = height * width * (ERASE_AREA[0] + area * (ERASE_AREA[1] - ERASE_AREA[0]))
    aspect = ERASE_ASPECT[0] * (ERASE_ASPECT[1] / ERASE_ASPECT[0]) ** aspect
    box_heights = jnp.round(jnp.sqrt(area * aspect))
    box_widths = jnp.round(jnp.sqrt(area / aspect))
    fits = (box_heights < height) & (box_widths < width)
    first = jnp.argmax(fits, axis=1, keepdims=True)
    box_height = jnp.take_along_axis(box_heights, first, axis=1)
    box_width = jnp.take_along_axis(box_widths, first, axis=1)

    top, left, chance = jax.random.uniform(place_key, (3, b, 1))
    top = jnp.floor(top * (height - box_height + 1))
    left = jnp.floor(left * (width - box_width + 1))
    chosen = (chance < probability) & fits.any(axis=1, keepdims=True)
    y, x = jnp.arange(height), jnp.arange(width)
    rows = (y >= top) & (y < top + box_height) & chosen
    columns = (x >= left) & (x < left + box_width)
    erased = rows[:, :, None, None] & columns[:, None, :, None]
    return jnp.where(erased, _normal_noise(noise_key, images.shape).astype(images.dtype), images)


def _normal_noise(rng: jax.Array, shape: tuple[int, int, int, int]) -> jax.Array:
    """Noise N(0, 1) in 1024 steps of equal probability, float32 (b, H, W, c), for up to 3 channels.

    Ten random bits a value are enough for noise, and drawing bits is most of what it costs.
    """
    b, height, width, channels = shape
    bits = jax.random.bits(rng, (b, height, width, 1)) >> (
        10 * jnp.arange(channels, dtype='uint32')
    )
    uniform = ((bits & 1023).astype(jnp.float32) + 0.5) / 512 - 1
    return math.sqrt(2) * jax.lax.erf_inv(uniform)


def mixup_cutmix(
    rng: jax.Array,
    images: jax.Array,
    labels: jax.Array,
    mixup_alpha: float,
    cutmix_alpha: float,
    switch_probability: float = 0.5,
) -> tuple[jax.Array, jax.Array]:
    """Mixes image i with image b-1-i, by mixup or by cutmix, with one lambda for the batch.

    Mixup (Zhang et al., 2018, arXiv:1710.09412) blends the pair by lambda ~ Beta(alpha, alpha);
    cutmix (Yun et al., 2019, arXiv:1905.04899) pastes a box of about (1 - lambda) of the partner's
    area, clipped at the border, and lambda becomes the share of pixels that is really left. That
    the batch is mixed with its own reverse follows timm's batch mode.

    Args:
        rng: a key.
        images: (b, H, W, c), float.
        labels: (b, k), float, each row a distribution.
        mixup_alpha: static; 0 turns mixup off.
        cutmix_alpha: static; 0 turns cutmix off.
        switch_probability: that a batch gets cutmix, where both are on.

    Returns:
        Images and labels of the same shapes and types; the arguments themselves where both are off.
    """
    if mixup_alpha <= 0 and cutmix_alpha <= 0:
        return images, labels
    if mixup_alpha > 0 and cutmix_alpha > 0:
        cutmix_probability = switch_probability
    else:
        cutmix_probability = float(cutmix_alpha > 0)
    switch_key, beta_key, box_key = jax.random.split(rng, 3)
    use_cutmix = jax.random.bernoulli(switch_key, cutmix_probability)
    alpha = jnp.where(use_cutmix, cutmix_alpha, mixup_alpha)
    lam = jax.random.beta(beta_key, alpha, alpha)
    outside = ~_cutmix_box(box_key, images.shape[1:3], lam)
    images = jax.lax.cond(
        use_cutmix,
        lambda images: jnp.where(outside[:, :, None], images, images[::-1]),
        lambda images: _blend(images, lam),
        images,
    )
    return images, _blend(labels, jnp.where(use_cutmix, outside.mean(), lam))


def _cutmix_box(rng: jax.Array, shape: tuple[int, int], lam: jax.Array) -> jax.Array:
    """Draws a box of about 1 - lam of the area: bool (H, W), clipped where it sticks out."""
    size = jnp.array(shape)
    half = jnp.floor(size * jnp.sqrt(1 - lam)) // 2
    centre = jax.random.randint(rng, (2,), 0, size)
    y, x = (jnp.arange(length) for length in shape)
    rows = (y >= centre[0] - half[0]) & (y < centre[0] + half[0])
    columns = (x >= centre[1] - half[1]) & (x < centre[1] + half[1])
    return rows[:, None] & columns


def _blend(values: jax.Array, weights: jax.Array) -> jax.Array:
    mixed = weights * values + (1 - weights) * values[::-1]
    return mixed.astype(values.dtype)
