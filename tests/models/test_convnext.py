"""ConvNeXt against values recorded from timm, and C-JetMoE-F."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.checkpoints.convnext import (
    from_tensors,
    infer_convnext,
    tensor_names,
    to_tensors,
)
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt, grouped_conv, sum_of_shifts
from jetmoe_jax.models.parameters import flatten, param_count, param_shapes, unflatten
from jetmoe_jax.models.registry import MODELS, create_model

REFERENCE = Path(__file__).parents[2] / 'third_party' / 'reference'
CATALOGUE = json.loads((REFERENCE / 'timm_catalogue.json').read_text())
MOE = dict(
    moe_blocks=((1, 1),),
    moe=dict(core_experts=(0, 3), universal_experts=(0, 5), expert_dropout=0.2, dropout=0.4),
)


def small_model(**changes):
    sizes = dict(image_size=(12, 20), patch_size=2, widths=(5, 12), depths=(1, 2), num_classes=3)
    return ConvNeXt(**(sizes | dict(layer_scale=0.5) | changes))


def small_variables(model):
    """Random parameters and images; drawn here, as compiling an initialisation takes seconds."""
    rng = np.random.default_rng(0)
    params = {
        path: (path.endswith(('scale', 'gamma', 'temperature')) + 0.2 * rng.normal(size=leaf.shape))
        for path, leaf in param_shapes(model).items()
    }
    params = {path: jnp.asarray(value, jnp.float32) for path, value in params.items()}
    images = jnp.asarray(rng.normal(size=(3, *model.image_shape, 3)), jnp.float32)
    return {'params': unflatten(params)}, images


def tensor_shapes(model):
    shapes = {}
    for path, leaf in param_shapes(model).items():
        probe = np.broadcast_to(np.float32(0), leaf.shape)
        shapes |= {n: list(v.shape) for n, v in to_tensors(path, probe, model.conv_mlp).items()}
    return shapes


def assert_close(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize('name', ['convnext', 'convnext_conv_mlp_no_ls'])
def test_logits_and_stages_agree_with_timm(reference, name):
    fixture = reference(name)
    tensors = {k.removeprefix('state/'): v for k, v in fixture.items() if k.startswith('state/')}
    model = infer_convnext(tensors, name, image_size=fixture['x_nchw'].shape[-1])
    params = {
        path: from_tensors(path, [tensors[name] for name in tensor_names(path)])
        for path in param_shapes(model)
    }
    images = jnp.asarray(fixture['x_nchw'].transpose(0, 2, 3, 1))
    forward = jax.jit(lambda p, x: model.apply({'params': p}, x, mutable=['intermediates']))
    logits, sown = forward(unflatten(params), images)
    assert model.conv_mlp == fixture['args'].get('conv_mlp', False)
    assert_close(logits, fixture['logits'])
    for stage, depth in enumerate(fixture['args']['depths']):
        ours = sown['intermediates'][f'stages_{stage}'][f'blocks_{depth - 1}']['output'][0]
        assert_close(ours.transpose(0, 3, 1, 2), fixture[f'act/stage/{stage}'])
    exported = {}
    for path, value in params.items():
        exported |= to_tensors(path, value, model.conv_mlp)
    assert set(exported) == set(tensors)
    for name, value in exported.items():
        np.testing.assert_array_equal(value, tensors[name])


@pytest.mark.parametrize('name', [name for name in CATALOGUE if name.startswith('convnext')])
def test_a_checkpoint_of_timm_is_inferred_to_its_exact_tensors(name):
    entry = CATALOGUE[name]
    tensors = {n: np.broadcast_to(np.float32(0), shape) for n, shape in entry['state'].items()}
    model = infer_convnext(tensors, name)
    variant = MODELS[name.partition('.')[0]][1]
    assert {key: getattr(model, key) for key in variant} == variant
    assert tensor_shapes(model) == entry['state']
    assert param_count(model) == entry['params']


@pytest.mark.parametrize(
    'name, millions',
    [('atto', 3.70), ('pico', 9.05), ('nano', 15.59), ('small', 50.22), ('base', 88.59)],
)
def test_variants_have_the_published_number_of_parameters(name, millions):
    model = create_model(f'convnext_{name}')
    assert param_count(model) / 1e6 == pytest.approx(millions, abs=0.005)


def test_cjetmoe_f_has_moe_layers_where_they_belong():
    model = create_model('cjetmoe_f')
    shapes = param_shapes(model)
    experts = {}
    for path, leaf in shapes.items():
        if path.endswith('_experts/mlp/fc1/kernel'):
            stage, block, _, experts_path = path.split('/')[:4]
            experts.setdefault(f'{stage}/{block}', {})[experts_path] = leaf.shape
    stage_2 = {'core_experts': (98, 192, 768), 'universal_experts': (196, 192, 192)}
    stage_3 = {'core_experts': (24, 384, 1536), 'universal_experts': (48, 384, 384)}
    assert experts == {
        'stages_2/blocks_3': stage_2,
        'stages_2/blocks_4': stage_2,
        'stages_2/blocks_5': stage_2,
        'stages_3/blocks_0': stage_3,
        'stages_3/blocks_1': stage_3,
    }
    for block in experts:
        assert not any(path.startswith(f'{block}/mlp/') for path in shapes)
        for kept in ('conv_dw/kernel', 'norm/scale', 'ls/gamma'):
            assert f'{block}/{kept}' in shapes
    assert model.grids == ((56, 56), (28, 28), (14, 14), (7, 7))


def test_cjetmoe_f_has_the_parameters_of_its_parts():
    def mlp(d, h):
        return d * h + h + h * d + d

    def moe(d, core, universal):
        router = (core + universal) * d + 2 * d + 2  # queries, their LayerNorm, T
        return router + core * mlp(d, 4 * d) + universal * mlp(d, d)

    dense = CATALOGUE['convnext_femto.d1_in1k']['params']
    stage_2 = 3 * (moe(192, 98, 196) - mlp(192, 768))
    stage_3 = 2 * (moe(384, 24, 48) - mlp(384, 1536))
    count = param_count(create_model('cjetmoe_f'))
    assert count == dense + stage_2 + stage_3 == 217_859_138


def test_a_moe_model_survives_its_tensor_names():
    model = small_model(**MOE)
    variables, _ = small_variables(model)
    params = flatten(variables['params'])
    tensors = {}
    for path, value in params.items():
        tensors |= to_tensors(path, np.asarray(value))
    inferred = infer_convnext(tensors, 'exported', image_size=model.image_size)
    assert inferred.moe_blocks == model.moe_blocks
    assert inferred.moe_layer('stages_1/blocks_1').path_widths(12) == model.moe_layer(
        'stages_1/blocks_1'
    ).path_widths(12)
    assert param_shapes(inferred) == param_shapes(model)
    for path, value in params.items():
        again = from_tensors(path, [tensors[name] for name in tensor_names(path)])
        np.testing.assert_array_equal(again, value)


def test_every_parameter_gets_a_gradient():
    model = small_model(**MOE)
    variables, images = small_variables(model)

    def loss(variables):
        return jnp.sum(jnp.sin(model.apply(variables, images)))

    gradients = flatten(jax.jit(jax.grad(loss))(variables)['params'])
    for path, gradient in gradients.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, path


def test_evaluation_is_deterministic_and_training_is_not():
    model = small_model(**MOE, drop_path=0.3)
    variables, images = small_variables(model)
    evaluate = jax.jit(model.apply)

    @jax.jit
    def train(seed):
        key = jax.random.key(seed, impl='rbg')  # compiles faster than the default
        return model.apply(variables, images, True, rngs={'dropout': key, 'noise': key})

    logits = evaluate(variables, images)
    assert logits.shape == (3, 3) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(evaluate(variables, images), logits)
    np.testing.assert_array_equal(train(0), train(0))
    assert np.abs(train(0) - train(1)).max() > 1e-4


def test_what_calibration_measures_is_sown_as_tokens():
    model = small_model()
    variables, images = small_variables(model)
    _, sown = jax.jit(lambda v, x: model.apply(v, x, mutable=['intermediates']))(variables, images)
    sown = sown['intermediates']
    block = sown['stages_1']['blocks_1']
    assert block['mlp_input'][0].shape == (3, 3 * 5, 12)
    assert block['mlp']['mlp_act'][0].shape == (3, 3 * 5, 48)
    assert block['output'][0].shape == (3, 3, 5, 12)
    assert sown['pooled'][0].shape == (3, 12)


def test_without_classes_the_pooled_features_are_the_output():
    model = small_model(num_classes=0)
    variables, images = small_variables(model)
    assert not any(path.startswith('head/') for path in param_shapes(model))
    assert jax.eval_shape(model.apply, variables, images).shape == (3, 12)


def test_rates_grow_linearly_over_all_blocks():
    model = create_model('cjetmoe_f')
    rates = [model.moe_layer(path).expert_dropout for path in model.moe_paths]
    np.testing.assert_allclose(rates, [0.1 * i / 11 for i in (7, 8, 9, 10, 11)])


def test_bfloat16_computes_near_float32():
    model = small_model()
    variables, images = small_variables(model)
    exact = jax.jit(model.apply)(variables, images)
    rounded = jax.jit(model.clone(dtype=jnp.bfloat16).apply)(variables, images)
    assert rounded.dtype == jnp.float32
    assert_close(rounded, exact, 0.05)


def test_a_model_is_rebuilt_from_the_json_of_its_attributes():
    attributes = MODELS['cjetmoe_f'][1] | dict(depths=(1, 1, 4, 1), moe_blocks=((2, 3), (3, 0)))
    from_json = json.loads(json.dumps(attributes))
    rebuilt = ConvNeXt(**{k: tuple(v) if isinstance(v, list) else v for k, v in from_json.items()})
    assert rebuilt.moe_layer('stages_3/blocks_0') == ConvNeXt(**attributes).moe_layer(
        'stages_3/blocks_0'
    )
    assert param_shapes(rebuilt) == param_shapes(ConvNeXt(**attributes))


@pytest.mark.parametrize('shape', [(2, 9, 11, 3), (3, 2, 5, 4)])
def test_a_sum_of_shifts_is_the_grouped_convolution_with_its_gradients(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    kernel = jax.random.normal(jax.random.key(1), (7, 7, 1, shape[-1]))
    cotangent = jax.random.normal(jax.random.key(2), shape)

    def value_and_gradients(conv):
        def both(x, kernel):
            y, pull = jax.vjp(conv, x, kernel)
            return y, *pull(cotangent)

        return jax.jit(both)(x, kernel)

    ours, xla = value_and_gradients(sum_of_shifts), value_and_gradients(grouped_conv)
    for a, b in zip(ours, xla, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(depths=(1, 2, 1)), 'widths (5, 12) and depths (1, 2, 1) are not of one length'),
        (dict(image_size=18), 'image size (18, 18) is not a multiple of 4'),
        (dict(image_size=32), 'images are (12, 20, 3), the model takes (32, 32, 3)'),
        (dict(moe_blocks=((1, 1),)), 'moe_blocks are given without'),
        (MOE | dict(moe_blocks=((1, 2),)), 'moe_blocks has (1, 2), which is no (stage, block)'),
        (
            MOE | dict(moe=dict(core_experts=(0, 3, 2), universal_experts=1)),
            'core_experts of moe is (0, 3, 2)',
        ),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError) as error:
        jax.eval_shape(small_model(**wrong).init, jax.random.key(0), jnp.zeros((1, 12, 20, 3)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'stages.0.blocks.0.mlp.grn.weight': (3,)}, 'response normalisation of ConvNeXt V2'),
        ({'stem.2.weight': (3,)}, 'overlapping stem (tensor stem.2.weight)'),
        ({'downsample_layers.0.0.weight': (3,)}, "authors' release"),
        ({'stages.0.blocks.0.conv_dw.weight': (3, 1, 5, 5)}, 'of size (5, 5)'),
        ({'stages.2.blocks.0.conv_dw.weight': (3, 1, 7, 7)}, 'no blocks in stage 1'),
        ({'stem.1.weight': None}, 'no tensor stem.1.weight (its first is stem.0.weight)'),
    ],
)
def test_an_unsupported_state_dict_is_refused_by_name(change, message):
    shapes = {'stem.0.weight': (3, 3, 4, 4), 'stem.1.weight': (3,),
              'stages.0.blocks.0.conv_dw.weight': (3, 1, 7, 7)}  # fmt: skip
    tensors = {n: np.zeros(shape) for n, shape in (shapes | change).items() if shape}
    with pytest.raises(UserError) as error:
        infer_convnext(tensors, 'a.safetensors')
    assert message in str(error.value)
