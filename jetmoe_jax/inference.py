"""Logits of images, files or arrays, by a checkpoint's model with its own preprocessing."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.data.preprocess import eval_transform
from jetmoe_jax.data.sources import check_images, find_images, read_image
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import unflatten


def predict_inputs(
    checkpoint: Checkpoint, inputs: Sequence[str | Path], *, batch_size: int = 32
) -> tuple[list[str], np.ndarray]:
    """Logits of everything that the inputs name.

    Args:
      inputs: image files, folders (every image below them), and `.npy` files of normalised images,
        float32 (b height width 3), which are used as they are.

    Returns:
      paths, one for each image (`x.npy[3]` for the fourth of an array), and logits (images k).

    Raises:
      UserError: an input is missing or unreadable, or an array does not fit the model.
    """
    if not inputs:
        raise UserError('no image is given; name images, folders or .npy files.')
    height, width = checkpoint.model.image_shape
    paths: list[str] = []
    arrays: list[np.ndarray | str] = []
    for item in map(Path, inputs):
        if item.suffix == '.npy':
            images = _read_array(item, (height, width, 3))
            paths += [f'{item}[{i}]' for i in range(len(images))]
            arrays += list(images)
        else:
            files = find_images(item)
            paths += files
            arrays += files

    check_images([a for a in arrays if isinstance(a, str)])

    params = jax.device_put(unflatten(checkpoint.params))
    apply = jax.jit(lambda images: checkpoint.model.apply({'params': params}, images))

    def batches() -> Iterator[tuple[int, np.ndarray]]:
        for first in range(0, len(arrays), batch_size):
            batch = [_to_image(a, checkpoint) for a in arrays[first : first + batch_size]]
            padding = [np.zeros_like(batch[0])] * (batch_size - len(batch) if first else 0)
            yield len(batch), np.stack(batch + padding)

    logits = []
    total = -(-len(arrays) // batch_size)
    for count, images in tqdm(
        batches(), 'predicting', total, unit='batch', leave=False, disable=None
    ):
        logits.append(np.asarray(apply(jnp.asarray(images)))[:count])
    logits = np.concatenate(logits)
    if not np.isfinite(logits).all():
        first = paths[int(np.argmin(np.isfinite(logits).all(axis=1)))]
        raise UserError(
            f'the logits of {first} are not finite; look at that input and the weights.'
        )
    return paths, logits


def _to_image(image: np.ndarray | str, checkpoint: Checkpoint) -> np.ndarray:
    """A path -> a normalised image (height width 3); an array stays as it is."""
    if isinstance(image, np.ndarray):
        return image
    pixels = eval_transform(
        read_image(image),
        image_size=checkpoint.model.image_shape,
        crop_fraction=checkpoint.crop_fraction,
    )
    return (np.float32(pixels) / 255 - np.float32(checkpoint.mean)) / np.float32(checkpoint.std)


def _read_array(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    try:
        images = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f'{path} cannot be read as an array: {error}.') from error
    if not isinstance(images, np.ndarray):
        raise UserError(f'{path} holds several arrays; save one as a .npy.')
    if images.ndim != 4 or images.shape[1:] != shape or images.dtype != np.float32:
        raise UserError(
            f'{path} holds {images.dtype} {images.shape}, the model takes float32 (images, '
            f'{", ".join(map(str, shape))}); resize them or give --image_size.'
        )
    if not len(images):
        raise UserError(f'{path} holds no image.')
    return images
