"""Logits of files, folders and arrays are those of the model on the images they hold."""

import jax
import numpy as np
import pytest
from PIL import Image

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.errors import UserError
from jetmoe_jax.inference import predict_inputs
from jetmoe_jax.models.parameters import init_params, unflatten
from jetmoe_jax.models.vit import ViT

MEAN, STD = (0.25, 0.5, 0.75), (0.5, 0.125, 1.0)
HEIGHT, WIDTH = 8, 12


@pytest.fixture(scope='module')
def checkpoint():
    model = ViT(image_size=(HEIGHT, WIDTH), patch_size=4, width=6, depth=1, num_heads=2,
                num_classes=5)  # fmt: skip
    rng = np.random.default_rng(0)
    params = {k: v + rng.normal(0, 0.3, v.shape).astype(v.dtype)
              for k, v in init_params(model, 0).items()}  # fmt: skip
    return Checkpoint(model, params, LoadReport('test'), MEAN, STD, crop_fraction=1.0)


@pytest.fixture(scope='module')
def apply(checkpoint):
    """Normalised images (b 8 12 3) -> logits, by the model itself."""
    apply = jax.jit(checkpoint.model.apply)
    return lambda images: apply({'params': unflatten(checkpoint.params)}, images)


@pytest.fixture(scope='module')
def pixels():
    """Seven images of exactly the model's size, which no preprocessing changes."""
    return np.random.default_rng(1).integers(0, 256, (7, HEIGHT, WIDTH, 3), np.uint8)


def normalised(pixels):
    return ((pixels / 255 - np.array(MEAN)) / np.array(STD)).astype(np.float32)


def save_image(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return str(path)


def test_files_folders_and_arrays_keep_their_order_and_give_the_models_logits(
    checkpoint, apply, pixels, tmp_path
):
    single = save_image(tmp_path / 'z.png', pixels[0])
    array = tmp_path / 'three.npy'
    np.save(array, normalised(pixels[1:4]))
    nested = [
        save_image(tmp_path / 'folder' / name, image)
        for name, image in zip(['a.png', 'c.png', 'sub/b.png'], pixels[4:], strict=True)
    ]
    inputs = [single, array, tmp_path / 'folder']

    paths, logits = predict_inputs(checkpoint, inputs, batch_size=3)

    assert paths == [single, *(f'{array}[{i}]' for i in range(3)), *nested]
    np.testing.assert_allclose(logits, apply(normalised(pixels)), atol=1e-5)


@pytest.mark.parametrize('batch_size', [1, 7, 100])
def test_the_batch_size_changes_nothing(checkpoint, apply, pixels, tmp_path, batch_size):
    np.save(tmp_path / 'a.npy', normalised(pixels))
    paths, logits = predict_inputs(checkpoint, [str(tmp_path / 'a.npy')], batch_size=batch_size)
    assert len(paths) == len(logits) == 7
    np.testing.assert_allclose(logits, apply(normalised(pixels)), atol=1e-5)


def test_an_array_is_used_as_it_is(checkpoint, apply, tmp_path):
    images = np.random.default_rng(2).normal(0, 30, (3, HEIGHT, WIDTH, 3)).astype(np.float32)
    np.save(tmp_path / 'a.npy', images)
    _, logits = predict_inputs(checkpoint, [tmp_path / 'a.npy'])
    np.testing.assert_allclose(logits, apply(images), rtol=1e-5, atol=1e-5)


def test_an_image_of_another_size_is_resized_and_cropped(checkpoint, apply, tmp_path):
    # A constant image stays what it is, however it is resized and cropped.
    grey = np.full((31, 17, 3), (10, 100, 200), np.uint8)
    save_image(tmp_path / 'a.png', grey)
    _, logits = predict_inputs(checkpoint, [tmp_path / 'a.png'])
    expected = apply(normalised(np.broadcast_to(grey[0, 0], (1, HEIGHT, WIDTH, 3))))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_same_image_may_be_named_twice(checkpoint, pixels, tmp_path):
    path = save_image(tmp_path / 'a.png', pixels[0])
    paths, logits = predict_inputs(checkpoint, [path, path])
    assert paths == [path, path]
    np.testing.assert_array_equal(logits[0], logits[1])


def message_of(checkpoint, *inputs):
    with pytest.raises(UserError) as error:
        predict_inputs(checkpoint, inputs)
    return str(error.value)


@pytest.mark.parametrize(
    'array, found',
    [
        (np.zeros((3, WIDTH, HEIGHT, 3), np.float32), 'float32 (3, 12, 8, 3)'),
        (np.zeros((3, 3, HEIGHT, WIDTH), np.float32), 'float32 (3, 3, 8, 12)'),
        (np.zeros((HEIGHT, WIDTH, 3), np.float32), 'float32 (8, 12, 3)'),
        (np.zeros((3, HEIGHT, WIDTH, 3), np.float64), 'float64 (3, 8, 12, 3)'),
        (np.zeros((3, HEIGHT, WIDTH, 3), np.uint8), 'uint8 (3, 8, 12, 3)'),
    ],
)
def test_an_array_that_does_not_fit_is_told_with_what_would(checkpoint, tmp_path, array, found):
    np.save(tmp_path / 'a.npy', array)
    message = message_of(checkpoint, tmp_path / 'a.npy')
    assert f'a.npy holds {found}, the model takes float32 (images, 8, 12, 3)' in message


def test_an_array_of_no_images_is_refused(checkpoint, tmp_path):
    np.save(tmp_path / 'a.npy', np.zeros((0, HEIGHT, WIDTH, 3), np.float32))
    assert message_of(checkpoint, tmp_path / 'a.npy').endswith('a.npy holds no image.')


@pytest.mark.parametrize('keep', [0, 5, 200])
def test_a_damaged_array_is_named(checkpoint, tmp_path, keep):
    np.save(tmp_path / 'a.npy', np.zeros((3, HEIGHT, WIDTH, 3), np.float32))
    data = (tmp_path / 'a.npy').read_bytes()
    (tmp_path / 'a.npy').write_bytes(data[:keep])
    message = message_of(checkpoint, tmp_path / 'a.npy')
    assert f'{tmp_path}/a.npy cannot be read as an array' in message


@pytest.mark.parametrize('name', ['nothing.png', 'nothing.npy', 'nothing'])
def test_what_does_not_exist_is_named(checkpoint, pixels, tmp_path, name):
    good = save_image(tmp_path / 'good.png', pixels[0])
    assert str(tmp_path / name) in message_of(checkpoint, good, tmp_path / name)


def test_an_unreadable_image_in_a_folder_is_named(checkpoint, pixels, tmp_path):
    good = save_image(tmp_path / 'a.png', pixels[0])
    (tmp_path / 'b.png').write_bytes((tmp_path / 'a.png').read_bytes()[:60])
    message = message_of(checkpoint, tmp_path)
    assert f'cannot read the image {tmp_path}/b.png' in message
    assert good not in message


def test_a_folder_without_images_and_no_inputs_are_refused(checkpoint, tmp_path):
    (tmp_path / 'notes.txt').write_text('nothing here')
    assert f'the folder {tmp_path} holds no images' in message_of(checkpoint, tmp_path)
    assert message_of(checkpoint) == 'no image is given; name images, folders or .npy files.'
