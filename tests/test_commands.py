"""predict and convert as a user runs them: what they write, what they print, how they fail."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from jetmoe_jax import convert
from jetmoe_jax.analysis import cost
from jetmoe_jax.checkpoints.files import read_state_dict
from jetmoe_jax.checkpoints.load import load_checkpoint
from jetmoe_jax.checkpoints.workdir import CheckpointStore, load_workdir
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import init_params, unflatten
from jetmoe_jax.models.registry import MODELS, model_spec
from jetmoe_jax.models.vit import ViT

# Everything that a file's shapes cannot tell is unlike its default.
MODEL = ViT(
    image_size=8,
    patch_size=4,
    width=12,
    depth=1,
    num_heads=3,
    num_classes=3,
    pool='avg',
    moe_blocks=(0,),
    moe=dict(core_experts=2, universal_experts=4, combine='softmax'),
)
MEAN, STD, CROP = (0.25, 0.5, 0.75), (0.5, 0.125, 1.0), 1.0
CLASSES = ('ant', 'bee', 'cow')


@pytest.fixture(scope='module')
def params():
    rng = np.random.default_rng(0)
    return {k: v + rng.normal(0, 0.3, v.shape).astype(v.dtype)
            for k, v in init_params(MODEL, 0).items()}  # fmt: skip


@pytest.fixture(scope='module')
def workdir(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    meta = dict(model=model_spec(MODEL), mean=MEAN, std=STD, crop_fraction=CROP,
                class_names=CLASSES, config={})  # fmt: skip
    store = CheckpointStore(folder)
    store.save(3, dict(params=unflatten(params)), dict(meta=meta), {'top1': 0.5})
    store.close()
    return folder


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Five images of the model's size, in a folder and, normalised, as an array."""
    folder = tmp_path_factory.mktemp('images')
    pixels = np.random.default_rng(1).integers(0, 256, (5, 8, 8, 3), np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f'{i}.png')
    array = ((pixels / 255 - np.array(MEAN)) / np.array(STD)).astype(np.float32)
    np.save(folder / 'images.npy', array)
    return folder


@pytest.fixture(scope='module')
def expected(params, images):
    apply = jax.jit(MODEL.apply)
    return np.asarray(apply({'params': unflatten(params)}, np.load(images / 'images.npy')))


def run(command, *arguments):
    return subprocess.run(
        [sys.executable, '-m', f'jetmoe_jax.{command}', *map(str, arguments)],
        env=os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'},
        capture_output=True,
        text=True,
    )


def call_convert(*arguments):
    """convert's main function, here: no process of its own, which takes two seconds to start."""
    with flagsaver.flagsaver():
        convert.main(flags.FLAGS(['convert', *map(str, arguments)]))


@pytest.fixture(scope='module')
def predicted(workdir, images, tmp_path_factory):
    """(what predict printed, what it wrote) for the folder and the array."""
    out = tmp_path_factory.mktemp('predicted') / 'new' / 'out.npz'
    done = run('predict', f'--checkpoint={workdir}', images, images / 'images.npy', '--top=2',
               f'--logits={out}')  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), dict(np.load(out))


def test_predict_writes_paths_and_logits(predicted, images, expected):
    _, written = predicted
    assert written.keys() == {'paths', 'logits'}
    array = [f'{images}/images.npy[{i}]' for i in range(5)]
    assert written['paths'].tolist() == [f'{images}/{i}.png' for i in range(5)] + array
    np.testing.assert_allclose(written['logits'], np.concatenate([expected] * 2), atol=1e-5)


def of_images(lines, images):
    """The lines that tell an image's classes, without the report around them."""
    return [line for line in lines if line.startswith(str(images)) and '.png  ' in line]


def test_predict_prints_the_best_classes_of_each_image_by_name(predicted, images, expected):
    printed, _ = predicted
    told = of_images(printed, images)
    assert len(told) == len(expected)
    for i, logits in enumerate(expected):
        p = np.exp(logits) / np.exp(logits).sum()
        first, second, _ = sorted(range(3), key=lambda k: -p[k])
        assert told[i] == (
            f'{images}/{i}.png  {CLASSES[first]} {p[first]:.1%}  {CLASSES[second]} {p[second]:.1%}'
        )
    assert printed[-2].endswith('out.npz: 10 x 3 logits')
    assert printed[-1].startswith('10 images with ')


def test_a_converted_workdir_predicts_the_same(workdir, images, predicted, expected, tmp_path):
    output, logits = tmp_path / 'new' / 'o.safetensors', tmp_path / 'out.npz'
    done = run('convert', workdir, f'--output={output}')
    assert done.returncode == 0, done.stderr
    assert f'wrote {output}' in done.stdout

    again = run('predict', f'--checkpoint={output}', images, '--top=2', f'--logits={logits}')

    assert again.returncode == 0, again.stderr
    told = of_images(again.stdout.splitlines(), images)
    assert told and told == of_images(predicted[0], images)
    np.testing.assert_allclose(np.load(logits)['logits'], expected, atol=1e-5)


def test_a_conversion_keeps_what_shapes_cannot_tell(workdir, params, tmp_path):
    call_convert(workdir, f'--output={tmp_path / "o.safetensors"}')
    checkpoint = load_checkpoint(tmp_path / 'o.safetensors')
    assert (checkpoint.mean, checkpoint.std) == (MEAN, STD)
    assert (checkpoint.crop_fraction, checkpoint.class_names) == (CROP, CLASSES)
    assert (checkpoint.model.num_heads, checkpoint.model.pool) == (3, 'avg')
    assert checkpoint.model.moe['combine'] == 'softmax'
    assert checkpoint.params.keys() == params.keys()
    for path, value in params.items():
        assert checkpoint.params[path].tobytes() == value.tobytes(), path


def test_flags_win_over_what_the_workdir_says(workdir, tmp_path):
    call_convert(workdir, f'--output={tmp_path / "o.safetensors"}', '--num_heads=4')
    assert load_checkpoint(tmp_path / 'o.safetensors').model.num_heads == 4


def test_converting_a_file_again_changes_nothing(workdir, tmp_path, capsys):
    once, twice = tmp_path / '1.safetensors', tmp_path / '2.safetensors'
    call_convert(workdir, f'--output={once}')
    call_convert(once, f'--output={twice}')
    first, second = read_state_dict(once), read_state_dict(twice)
    assert first.hints == second.hints
    assert first.tensors.keys() == second.tensors.keys()
    for name, value in first.tensors.items():
        assert second.tensors[name].tobytes() == value.tobytes(), name
    assert f'wrote {twice}' in capsys.readouterr().out


def test_a_file_becomes_a_workdir_again(workdir, params, tmp_path):
    file, again = tmp_path / 'o.safetensors', tmp_path / 'again'
    call_convert(workdir, f'--output={file}')
    call_convert(file, f'--output={again}')
    checkpoint = load_workdir(again)
    assert checkpoint.model == load_checkpoint(file).model
    assert (checkpoint.mean, checkpoint.std, checkpoint.class_names) == (MEAN, STD, CLASSES)
    for path, value in params.items():
        assert checkpoint.params[path].tobytes() == value.tobytes(), path


def test_the_list_has_every_model_with_its_cost_and_experts(monkeypatch, capsys):
    names = ('vit_tiny_patch16_224', 'vjetmoe_t')  # all of them take seven seconds
    monkeypatch.setattr(cost, 'MODELS', {name: MODELS[name] for name in names})
    call_convert('--list')
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [[names[0], '5,717,416'], [names[1], '265,411,636']]
    assert rows[0][2:] == ['1.25', 'G']
    assert rows[1][-1] == '98+196'


def test_a_damaged_workdir_gets_one_line_and_exit_code_1(workdir, images, tmp_path):
    damaged = tmp_path / 'damaged'
    subprocess.run(['cp', '-r', workdir, damaged], check=True)
    files = [path for path in damaged.rglob('*') if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

    failed = run('predict', f'--checkpoint={damaged}', images / '0.png')

    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert len(lines) == 1, f'{len(lines)} lines: {failed.stderr[:600]}'
    assert f'error: checkpoint {damaged}/checkpoints/3 cannot be read' in lines[0]


@pytest.mark.parametrize(
    'command, arguments, message',
    [
        ('predict', ['--checkpoint=no.pth', 'x.png'], 'error: there is no checkpoint no.pth'),
        ('convert', ['x.pth', '--output=o.safetensors', '--pool=max'], '--pool=max'),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_1(command, arguments, message):
    failed = run(command, *arguments)
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert len(lines) == 1 and message in lines[0], failed.stderr


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--output=o.safetensors'], '0 inputs are given; name one'),
        (['a.pth', 'b.pth', '--output=o.safetensors'], '2 inputs are given'),
        (['{workdir}'], '--output is missing; name a .safetensors file or a folder'),
        (['{workdir}', '--output={workdir}'], 'has checkpoints already; choose another --output'),
        (['no.pth', '--output=o.safetensors'], 'there is no checkpoint no.pth'),
        (['{images}', '--output=o.safetensors'], "is a folder without 'checkpoints' in it"),
    ],
)
def test_a_mistake_in_converting_is_told_and_nothing_is_written(
    workdir, images, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        call_convert(*(a.format(workdir=workdir, images=images) for a in arguments))
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())
