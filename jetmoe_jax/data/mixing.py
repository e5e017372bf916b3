"""What happens to a batch on the device, inside the jitted train step: pure functions of a key.

b images, k classes; images are NHWC. The numbers do not depend on how the batch is sharded.
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
        images: normalised, (b, H, W, c), any float type.
        probability: with which an image gets a box, independently.

    Returns:
        The images, same shape and type; the noise is N(0, 1) per pixel and channel.
    """
    b, height, width, _ = images.shape
    keys = jax.random.split(rng, 6)
    draws = (b, ERASE_ATTEMPTS)
    area = (
        height
        * width
        * jax.random.uniform(keys[0], draws, minval=ERASE_AREA[0], maxval=ERASE_AREA[1])
    )
    log_aspect = jax.random.uniform(
        keys[1], draws, minval=math.log(ERASE_ASPECT[0]), maxval=math.log(ERASE_ASPECT[1])
    )
    aspect = jnp.exp(log_aspect)
    box_heights = jnp.round(jnp.sqrt(area * aspect))
    box_widths = jnp.round(jnp.sqrt(area / aspect))
    fits = (box_heights < height) & (box_widths < width)
    first = jnp.argmax(fits, axis=1, keepdims=True)
    box_height = jnp.take_along_axis(box_heights, first, axis=1)
    box_width = jnp.take_along_axis(box_widths, first, axis=1)

    top = jnp.floor(jax.random.uniform(keys[2], (b, 1)) * (height - box_height + 1))
    left = jnp.floor(jax.random.uniform(keys[3], (b, 1)) * (width - box_width + 1))
    chosen = jax.random.bernoulli(keys[4], probability, (b, 1)) & fits.any(axis=1, keepdims=True)
    y, x = jnp.arange(height), jnp.arange(width)
    rows = (y >= top) & (y < top + box_height) & chosen
    columns = (x >= left) & (x < left + box_width)
    erased = rows[:, :, None, None] & columns[:, None, :, None]
    noise = jax.random.normal(keys[5], images.shape, images.dtype)
    return jnp.where(erased, noise, images)


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
    switch_key, mixup_key, cutmix_key = jax.random.split(rng, 3)
    shape = images.shape[1:3]
    # Both are a weight per pixel; the label's weight is its mean.
    if cutmix_alpha <= 0:
        weights, kept = _mixup_weights(mixup_key, shape, mixup_alpha)
    elif mixup_alpha <= 0:
        weights, kept = _cutmix_weights(cutmix_key, shape, cutmix_alpha)
    else:
        use_cutmix = jax.random.bernoulli(switch_key, switch_probability)
        cutmix = _cutmix_weights(cutmix_key, shape, cutmix_alpha)
        mixup = _mixup_weights(mixup_key, shape, mixup_alpha)
        weights, kept = (jnp.where(use_cutmix, c, m) for c, m in zip(cutmix, mixup, strict=True))
    return _blend(images, weights[:, :, None]), _blend(labels, kept)


def _mixup_weights(
    rng: jax.Array, shape: tuple[int, int], alpha: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the image's weight per pixel (H, W), and its mean."""
    kept = jax.random.beta(rng, alpha, alpha)
    return jnp.full(shape, kept), kept


def _cutmix_weights(
    rng: jax.Array, shape: tuple[int, int], alpha: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the image's weight per pixel (H, W), 0 in the box and 1 outside, and its mean."""
    beta_key, y_key, x_key = jax.random.split(rng, 3)
    side = jnp.sqrt(1 - jax.random.beta(beta_key, alpha, alpha))
    height, width = shape
    half_height, half_width = jnp.floor(height * side) // 2, jnp.floor(width * side) // 2
    centre_y = jax.random.randint(y_key, (), 0, height)
    centre_x = jax.random.randint(x_key, (), 0, width)
    y, x = jnp.arange(height)[:, None], jnp.arange(width)
    rows = (y >= centre_y - half_height) & (y < centre_y + half_height)
    columns = (x >= centre_x - half_width) & (x < centre_x + half_width)
    weights = jnp.where(rows & columns, 0.0, 1.0)
    return weights, weights.mean()


def _blend(values: jax.Array, weights: jax.Array) -> jax.Array:
    mixed = weights * values + (1 - weights) * values[::-1]
    return mixed.astype(values.dtype)
