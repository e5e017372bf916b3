"""From a file to a model and back: recorded logits, strictness, the report, exact exports."""

from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jetmoe_jax.checkpoints.architecture import infer_model
from jetmoe_jax.checkpoints.files import StateDict, read_state_dict
from jetmoe_jax.checkpoints.load import fit, load_checkpoint, save_checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import unflatten


@pytest.fixture(scope='module')
def state(reference):
    """state('name') gives the tensors of a reference file, by name."""

    def state(name):
        arrays = reference(name)
        return {k.removeprefix('state/'): v for k, v in arrays.items() if k.startswith('state/')}

    return state


@pytest.fixture
def tensors(state):
    """A small ViT with a class token: d=48, three blocks, three heads, ten classes."""
    return state('vit_token')


@pytest.fixture
def load(tmp_path):
    """load(tensors, **given) writes a file and loads it."""

    def load(tensors, **given):
        save_file(tensors, tmp_path / 'file.safetensors')
        return load_checkpoint(tmp_path / 'file.safetensors', **given)

    return load


def logits_of(checkpoint, fixture):
    images = fixture['x_nchw'].transpose(0, 2, 3, 1)
    return jax.jit(checkpoint.model.apply)({'params': unflatten(checkpoint.params)}, images)


def assert_close(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize(
    'name, given',
    [
        ('vit_token', {}),
        ('vit_avg', {}),
        ('vit_layerscale_reg4_noembedclass', {}),
        ('vit_qknorm_prenorm', {}),
        ('moe_jetpack_vit', {}),
        ('vit_dynamic_48', dict(image_size=48)),  # its position embedding is of 32 px
    ],
)
def test_a_file_gives_the_recorded_logits(reference, state, load, name, given):
    checkpoint = load(state(name), num_heads=3, **given)
    assert_close(logits_of(checkpoint, reference(name)), reference(name)['logits'])
    assert all(value.dtype == np.float32 for value in checkpoint.params.values())


def test_the_released_combine_function_is_the_default_and_another_can_be_given(
    reference, state, load
):
    fixture, released = reference('moe_jetpack_vit'), state('moe_jetpack_vit')
    softmax = load(released, num_heads=3, moe=dict(combine='softmax'))
    assert softmax.model.moe['combine'] == 'softmax'
    assert np.abs(logits_of(softmax, fixture) - fixture['logits']).max() > 1e-3


def test_the_report_counts_every_tensor_of_the_file(state, load):
    for name in ('vit_token', 'moe_jetpack_vit'):
        checkpoint = load(state(name), num_heads=3)
        assert sorted(checkpoint.report.used) == sorted(state(name))
        assert not (checkpoint.report.left_out or checkpoint.report.fresh)
        assert checkpoint.report.table().splitlines() == [
            checkpoint.report.source,
            f'  used as they are    {len(state(name))}',
        ]


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_become_float32_without_another_loss(tensors, load, dtype):
    rounded = {name: value.astype(dtype) for name, value in tensors.items()}
    params = load(rounded, num_heads=3).params
    assert all(value.dtype == np.float32 for value in params.values())
    np.testing.assert_array_equal(params['pos_embed'], rounded['pos_embed'].astype(np.float32))
    np.testing.assert_array_equal(
        params['blocks_2/mlp/fc1/kernel'],
        rounded['blocks.2.mlp.fc1.weight'].astype(np.float32).T,
    )


@pytest.mark.parametrize('name', ['blocks.1.mlp.fc1.bias', 'norm.weight', 'head.bias'])
def test_a_missing_tensor_is_named(tensors, load, name):
    del tensors[name]
    with pytest.raises(UserError, match=rf'file\.safetensors: tensor {name} .*is missing'):
        load(tensors, num_heads=3)


@pytest.mark.parametrize('name', ['blocks.1.attn.rope', 'decoder.weight', 'head.pre_logits.weight'])
def test_a_tensor_without_a_place_is_named_with_its_shape(tensors, load, name):
    tensors[name] = np.zeros((3, 5), np.float32)
    with pytest.raises(UserError) as error:
        load(tensors, num_heads=3)
    assert f'tensor {name} (3, 5) has no place in the model' in str(error.value)


def test_a_head_of_a_bias_alone_is_left_out_by_name(tensors, load):
    del tensors['head.weight']
    checkpoint = load(tensors, num_heads=3)
    assert checkpoint.model.num_classes == 0
    assert 'head.bias' in checkpoint.report.left_out


@pytest.mark.parametrize(
    'name, shape, expected',
    [
        ('blocks.2.attn.qkv.weight', (143, 48), '(144, 48)'),
        ('blocks.1.mlp.fc2.weight', (192, 48), '(48, 192)'),
        ('head.bias', (9,), '(10,)'),
        ('norm.weight', (1, 48), '(48,)'),
        ('patch_embed.proj.bias', (47,), '(48,)'),
        ('cls_token', (1, 2, 48), '(1, 1, 48)'),
    ],
)
def test_a_wrong_shape_is_told_with_the_tensor_and_both_shapes(
    tensors, load, name, shape, expected
):
    tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(UserError) as error:
        load(tensors, num_heads=3)
    assert f'tensor {name} has shape {shape}, the model expects {expected}' in str(error.value)


def test_wrong_heads_are_told_where_the_shapes_can_tell_them(state, load):
    with pytest.raises(UserError, match=r'k_norm\.\w+ has shape \(16,\), .* check experts'):
        load(state('vit_qknorm_prenorm'), num_heads=4)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tensors, load, value):
    tensors['blocks.1.norm1.bias'] = tensors['blocks.1.norm1.bias'].copy()
    tensors['blocks.1.norm1.bias'][3] = value
    with pytest.raises(UserError, match=r'tensor blocks\.1\.norm1\.bias has NaN or infinite'):
        load(tensors, num_heads=3)
    params = load(tensors, num_heads=3, allow_nonfinite=True).params
    np.testing.assert_array_equal(params['blocks_1/norm1/bias'], tensors['blocks.1.norm1.bias'])


def test_average_pooling_may_take_the_class_tokens_norm(reference, state, load):
    norm = {f'norm.{leaf}': f'fc_norm.{leaf}' for leaf in ('weight', 'bias')}
    tensors = state('vit_avg')
    tensors |= {name: tensors.pop(theirs) for name, theirs in norm.items()}

    checkpoint = load(tensors, num_heads=3, pool='avg')

    assert_close(logits_of(checkpoint, reference('vit_avg')), reference('vit_avg')['logits'])
    assert checkpoint.report.adapted.keys() == norm.keys()
    assert not set(checkpoint.report.used) & norm.keys()


def test_heads_that_nothing_told_are_reported_as_assumed(state, load):
    wider = {48: 64, 144: 192, 192: 256}
    tensors = {
        name: np.zeros([wider.get(size, size) for size in value.shape], np.float32)
        for name, value in state('vit_token').items()
    }
    lines = load(tensors).report.table().splitlines()
    assert lines[-1] == '  assumed             num_heads 1: heads 64 wide, as is usual'
    assert load(tensors, num_heads=2).report.assumed == []


def test_another_class_count_makes_a_fresh_head_and_says_so(tensors, load):
    checkpoint = load(tensors, num_heads=3, num_classes=7)
    other_seed = load(tensors, num_heads=3, num_classes=7, seed=1)
    assert checkpoint.model.num_classes == 7
    assert checkpoint.params['head/kernel'].shape == (48, 7)
    assert checkpoint.params['head/kernel'].std() > 0.01
    assert not checkpoint.params['head/bias'].any()
    assert (checkpoint.params['head/kernel'] != other_seed.params['head/kernel']).all()
    np.testing.assert_array_equal(checkpoint.params['pos_embed'], tensors['pos_embed'])
    assert checkpoint.report.table().splitlines()[1:] == [
        f'  used as they are    {len(tensors) - 2}',
        '  left out            head.bias: 10 classes, the model has 7',
        '  left out            head.weight: 10 classes, the model has 7',
        '  freshly initialised head/bias',
        '  freshly initialised head/kernel',
    ]


def test_no_classes_leave_the_head_out_and_make_none(tensors, load):
    checkpoint = load(tensors, num_heads=3, num_classes=0)
    assert not any(path.startswith('head') for path in checkpoint.params)
    assert checkpoint.report.left_out.keys() == {'head.weight', 'head.bias'}
    assert checkpoint.report.fresh == []


def test_a_file_without_a_head_can_be_given_one(tensors, load):
    headless = {name: value for name, value in tensors.items() if not name.startswith('head')}
    assert load(headless, num_heads=3).model.num_classes == 0
    checkpoint = load(headless, num_heads=3, num_classes=3)
    assert checkpoint.params['head/kernel'].shape == (48, 3)
    assert sorted(checkpoint.report.fresh) == ['head/bias', 'head/kernel']


def test_the_same_class_count_keeps_the_head(tensors, load):
    checkpoint = load(tensors, num_heads=3, num_classes=10)
    np.testing.assert_array_equal(checkpoint.params['head/kernel'], tensors['head.weight'].T)


def test_a_resampled_position_embedding_is_reported_with_both_grids(tensors, load):
    checkpoint = load(tensors, num_heads=3, image_size=(24, 40))
    assert checkpoint.params['pos_embed'].shape == (1, 16, 48)
    np.testing.assert_array_equal(
        checkpoint.params['pos_embed'][:, 0], tensors['pos_embed'][:, 0], 'the class token moved'
    )
    line = '  adapted             pos_embed: 4x4 -> 3x5 patches, bicubic'
    assert line in checkpoint.report.table().splitlines()
    assert 'pos_embed' not in checkpoint.report.used


def test_what_the_reader_left_out_is_in_the_report(tensors):
    state = StateDict('file', tensors, left_out={'mask_token': 'for pre-training only'})
    _, report = fit(infer_model(tensors, 'file', num_heads=3), state)
    assert '  left out            mask_token: for pre-training only' in report.table().splitlines()


@pytest.mark.parametrize('name', ['vit_layerscale_reg4_noembedclass', 'moe_jetpack_vit'])
def test_an_export_has_the_names_shapes_and_bytes_of_the_import(tmp_path, state, load, name):
    path, tensors = tmp_path / 'out.safetensors', state(name)
    checkpoint = load(tensors, num_heads=3)
    save_checkpoint(path, checkpoint)
    exported = read_state_dict(path).tensors
    assert exported.keys() == tensors.keys()
    for tensor, value in tensors.items():
        assert exported[tensor].shape == value.shape, tensor
        assert exported[tensor].dtype == value.dtype, tensor
        assert exported[tensor].tobytes() == value.tobytes(), tensor


def test_what_is_saved_is_loaded_again_with_its_hints(tmp_path, state, load):
    path = tmp_path / 'out.safetensors'
    # Everything that shapes cannot tell is unlike its default.
    untold = dict(combine='softmax', query_l2norm=False)
    loaded = load(state('moe_jetpack_vit'), num_heads=3, moe=untold)
    first = replace(
        loaded,
        mean=(0.25, 0.5, 0.75),
        std=(0.5, 0.125, 1.0),
        crop_fraction=0.9,
        class_names=('zebra', 'yak', 'ñandú', *'abcdefg'),  # a name for each of 10 classes
    )
    save_checkpoint(path, first)

    again = load_checkpoint(path)

    assert again.model == first.model
    for name in ('mean', 'std', 'crop_fraction', 'class_names'):
        assert getattr(again, name) == getattr(first, name)
    assert again.params.keys() == first.params.keys()
    for name, value in first.params.items():
        assert again.params[name].tobytes() == value.tobytes(), name


def test_what_the_caller_gives_wins_over_a_files_hints(tmp_path, tensors, load):
    path = tmp_path / 'out.safetensors'
    first = load(tensors, num_heads=3)
    save_checkpoint(path, first)
    assert load_checkpoint(path).model.num_heads == 3
    assert load_checkpoint(path, num_heads=4).model.num_heads == 4


def test_an_export_in_float16_is_the_rounded_one(tmp_path, state, load):
    path = tmp_path / 'half.safetensors'
    tensors = state('moe_jetpack_vit')
    first = load(tensors, num_heads=3)
    save_checkpoint(path, first, np.float16)
    exported = read_state_dict(path).tensors
    assert exported.keys() == tensors.keys()
    for name, value in exported.items():
        assert value.dtype == np.float16
        np.testing.assert_array_equal(value, tensors[name].astype(np.float16))


def test_preprocessing_is_imagenets_when_the_file_says_nothing(tensors, load):
    checkpoint = load(tensors, num_heads=3)
    assert checkpoint.mean == (0.485, 0.456, 0.406)
    assert checkpoint.std == (0.229, 0.224, 0.225)
