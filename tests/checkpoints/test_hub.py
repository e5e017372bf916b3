"""Tests of timm's names on the hub, against a cache of its layout, without the network."""

import json

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from jetmoe_jax.checkpoints import hub
from jetmoe_jax.checkpoints.files import read_state_dict, write_state_dict
from jetmoe_jax.checkpoints.hub import is_hub_name
from jetmoe_jax.errors import UserError

NAME = 'vit_small_patch16_224.augreg_in21k'
OLD, NEW = 'a' * 40, 'b' * 40
CONFIG = {
    'architecture': 'vit_small_patch16_224',
    'num_classes': 10,
    'global_pool': 'token',
    'pretrained_cfg': {'input_size': [3, 32, 32], 'mean': [0.5, 0.4, 0.3], 'std': [0.2, 0.3, 0.4]},
}
VIT = {'patch_embed.proj.weight': np.ones((6, 3, 2, 2), np.float32)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with two revisions of one model, and no network."""
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    model = tmp_path / f'models--timm--{NAME}'
    for value, revision in ((1, OLD), (2, NEW)):
        folder = model / 'snapshots' / revision
        write_state_dict(folder / 'model.safetensors', {k: value * v for k, v in VIT.items()})
        (folder / 'config.json').write_text(json.dumps(CONFIG))
    (model / 'refs').mkdir()
    (model / 'refs' / 'main').write_text(NEW)
    return model


def first(state):
    return state.tensors['patch_embed.proj.weight'].flat[0]


def rewrite_config(cache, **entries):
    (cache / 'snapshots' / NEW / 'config.json').write_text(json.dumps(CONFIG | entries))


@pytest.mark.parametrize('name', [NAME, f'timm/{NAME}'])
def test_a_cached_model_is_read_with_its_preprocessing_and_pooling(cache, name):
    state = read_state_dict(name)
    assert first(state) == 2
    assert state.path == name
    assert state.hints == dict(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), pool='token')


def test_weights_and_configuration_are_asked_for_at_the_pinned_revision(cache, monkeypatch):
    asked = []

    def answer(repo, file, revision):
        asked.append((repo, file, revision))
        return str(cache / 'snapshots' / OLD / file)

    monkeypatch.setattr(hub, 'hf_hub_download', answer)
    read_state_dict(NAME, revision='v1')
    files = ('model.safetensors', 'config.json')
    assert asked == [(f'timm/{NAME}', file, 'v1') for file in files]


def test_a_pinned_revision_is_read(cache):
    assert first(read_state_dict(NAME, revision=OLD)) == 1


def test_an_existing_path_wins_over_a_name(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    with pytest.raises(UserError, match='is a folder'):
        read_state_dict(NAME)


@pytest.mark.parametrize('revision', [None, 'c' * 40, 'v1'])
def test_what_is_not_cached_says_which_file_to_download_and_where_to_give_it(cache, revision):
    name = 'vit_other' if revision is None else NAME
    with pytest.raises(UserError) as error:
        read_state_dict(name, revision=revision)
    message = str(error.value)
    expected = [
        'HF_HUB_OFFLINE',
        f'timm/{name}',
        'model.safetensors',
        '--config.dense=PATH',
        'INPUT',
    ]
    assert all(part in message for part in expected + [revision or ''])


@pytest.mark.parametrize(
    ('failure', 'message'),
    [
        (RevisionNotFoundError, "no revision 'v1'"),
        (RepositoryNotFoundError, 'check the name and its tag'),
        (ConnectionError, 'the Hugging Face hub cannot be reached'),
    ],
)
def test_what_the_hub_answers_is_told(cache, monkeypatch, failure, message):
    def fail(*args, **kwargs):
        raise failure.__new__(failure)

    monkeypatch.setattr(hub, 'hf_hub_download', fail)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    with pytest.raises(UserError, match=message):
        read_state_dict(NAME, revision='v1')


def test_a_model_without_a_configuration_is_read_without_hints(cache):
    (cache / 'snapshots' / NEW / 'config.json').unlink()
    assert read_state_dict(NAME).hints == {}


def test_heads_of_another_width_than_64_are_known_by_name_or_arguments(cache):
    rewrite_config(cache, architecture='vit_huge_patch14_224')
    assert read_state_dict(NAME).hints['num_heads'] == 16
    rewrite_config(cache, model_args={'num_heads': 2})
    assert read_state_dict(NAME).hints['num_heads'] == 2


def test_the_size_of_images_is_given_where_they_are_not_square(cache):
    rewrite_config(cache, pretrained_cfg={'input_size': [3, 32, 48]})
    assert read_state_dict(NAME).hints == dict(pool='token', image_size=(32, 48))


def test_a_convnext_gets_no_attributes_of_a_vit(cache):
    rewrite_config(cache, architecture='convnext_femto', global_pool='avg')
    assert set(read_state_dict(NAME).hints) == {'mean', 'std'}


def test_another_activation_and_a_damaged_configuration_are_refused(cache):
    rewrite_config(cache, architecture='vit_base_patch16_clip_quickgelu_224')
    with pytest.raises(UserError, match="activation 'quick_gelu'; only GELU"):
        read_state_dict(NAME)
    (cache / 'snapshots' / NEW / 'config.json').write_text('{"archi')
    with pytest.raises(UserError, match='config.json is not valid JSON'):
        read_state_dict(NAME)


def test_names_of_timm_are_told_from_other_words():
    names = [
        'timm/anything-x.y',
        NAME,
        'deit3_small_patch16_224.fb_in22k_ft_in1k',
        'convnext_femto',
    ]
    assert all(is_hub_name(name) for name in names)
    assert not any(
        is_hub_name(name) for name in ['vit', 'runs/vit_x', 'model.ckpt', 'resnet50', '']
    )
