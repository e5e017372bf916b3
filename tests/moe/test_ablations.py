"""Each switch of the SpheroMoE layer changes what its name says, by the layer's equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.moe.layers import LAYERS, make_layer
from jetmoe_jax.moe.spheromoe import ABLATIONS, SpheroMoE, ablate

ARGUMENTS = dict(core_experts=3, universal_experts=4, hidden=8, combine='softmax')
X = np.random.default_rng(0).normal(size=(2, 5, 6)).astype('f4')


def shapes_of(layer, x=X):
    return jax.eval_shape(layer.init, jax.random.key(0), x)['params']


def random_params(layer):
    """Parameters around 1 for the temperatures, around 0 for all others but the LayerNorm's."""
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), 'f4'),
                          shapes_of(layer))  # fmt: skip
    params['temperature'] = 1 + 0.2 * jnp.abs(params['temperature'])
    if 'query_norm' in params:
        params['query_norm'] = {'scale': jnp.ones(6), 'bias': jnp.zeros(6)}
    return params


@functools.partial(jax.jit, static_argnames=('layer', 'train'))
def output(layer, params, train=False):
    key = jax.random.key(0, impl='unsafe_rbg')  # compiles faster than the default
    keys = {'noise': key, 'dropout': key} if train else None
    return layer.apply({'params': params}, X, train, rngs=keys)


@functools.partial(jax.jit, static_argnames='layer')
def gradient(layer, params):
    return jax.grad(lambda p: jnp.sum(layer.apply({'params': p}, X) ** 2))(params)


def difference(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize('query_l2norm', [True, False])
@pytest.mark.parametrize('query_norm', [True, False])
def test_the_length_of_queries_counts_only_where_nothing_normalises_them(query_norm, query_l2norm):
    layer = SpheroMoE(**ARGUMENTS, query_norm=query_norm, query_l2norm=query_l2norm)
    params = random_params(layer)
    twice = params | {'phi': 2 * params['phi']}
    if query_norm or query_l2norm:
        assert difference(output(layer, twice), output(layer, params)) < 1e-4
    else:  # twice the logits: half the temperatures
        hot = params | {'temperature': params['temperature'] / 2}
        np.testing.assert_allclose(output(layer, twice), output(layer, hot), rtol=1e-4, atol=1e-6)
        assert difference(output(layer, twice), output(layer, params)) > 0.01


def test_without_l2norm_queries_have_the_length_that_layernorm_gives_them():
    layer = SpheroMoE(**ARGUMENTS)
    params = random_params(layer)
    # LayerNorm gives a variance of 1, so a length of sqrt(d); l2norm divides the logits by it.
    cold = params | {'temperature': params['temperature'] * np.sqrt(6)}
    switched = SpheroMoE(**ablate(ARGUMENTS, 'no_query_l2norm'))
    assert difference(output(switched, cold), output(layer, params)) < 1e-4


def test_a_shared_temperature_is_two_equal_ones():
    two, one = SpheroMoE(**ARGUMENTS), SpheroMoE(**ablate(ARGUMENTS, 'shared_temperature'))
    params = random_params(two) | {'temperature': jnp.array([0.7, 0.7])}
    shared = params | {'temperature': jnp.array([0.7])}
    np.testing.assert_allclose(output(one, shared), output(two, params), rtol=1e-6)

    grads, grads_shared = gradient(two, params), gradient(one, shared)
    assert np.abs(grads['temperature']).min() > 0
    np.testing.assert_allclose(
        grads_shared.pop('temperature'), [grads.pop('temperature').sum()], rtol=1e-4
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                 grads_shared, grads)  # fmt: skip

    assert shapes_of(one)['temperature'].shape == (1,)
    _, sown = jax.jit(lambda p: one.apply({'params': p}, X, mutable=['metrics']))(shared)
    for name in ('dispatch_temperature', 'combine_temperature'):
        np.testing.assert_allclose(sown['metrics'][name][0], 0.7, rtol=1e-6)


def test_a_fixed_temperature_has_no_gradient_and_changes_nothing_else():
    free, fixed = SpheroMoE(**ARGUMENTS), SpheroMoE(**ablate(ARGUMENTS, 'fixed_temperature'))
    params = random_params(free)
    np.testing.assert_array_equal(output(fixed, params), output(free, params))
    grads, grads_fixed = gradient(free, params), gradient(fixed, params)
    assert np.abs(grads.pop('temperature')).min() > 0
    np.testing.assert_array_equal(grads_fixed.pop('temperature'), [0, 0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                 grads_fixed, grads)  # fmt: skip


@pytest.mark.parametrize('core, universal', [(98, 196), (24, 48), (2, 0)])
def test_a_single_path_has_the_count_the_parameters_and_the_cost_of_two(core, universal):
    arguments = dict(core_experts=core, universal_experts=universal)
    two, one = SpheroMoE(**arguments), SpheroMoE(**ablate(arguments, 'single_path'))
    factor = (core + universal / 4) / (core + universal)
    assert one.path_widths(192) == {'core_experts': (core + universal, 768 * factor)}
    assert one.multiply_adds(197, 192) == two.multiply_adds(197, 192)
    count = [
        sum(leaf.size for leaf in jax.tree.leaves(shapes_of(layer, np.zeros((1, 3, 192), 'f4'))))
        for layer in (one, two)
    ]
    assert count[0] == count[1]


def test_a_single_path_is_made_stage_by_stage():
    arguments = dict(
        core_experts=(0, 98, 5), universal_experts=(0, 196, 0), universal_factor=(0.25, 0.25, 0.5)
    )
    assert ablate(arguments, 'single_path') == arguments | dict(
        core_experts=(0, 294, 5), universal_experts=(0, 0, 0), hidden_factor=(0.0, 0.5, 1.0)
    )


@pytest.mark.parametrize('name, still', [('no_noise', dict(expert_dropout=0.0)),
                                         ('no_expert_dropout', dict(noise=False))])  # fmt: skip
def test_without_its_random_parts_training_computes_what_evaluation_does(name, still):
    arguments = ARGUMENTS | dict(expert_dropout=0.7, expert_dropout_mode='expert') | still
    params = random_params(SpheroMoE(**arguments))
    plain = output(SpheroMoE(**arguments), params)
    assert difference(output(SpheroMoE(**arguments), params, train=True), plain) > 1e-3
    switched = SpheroMoE(**ablate(arguments, name))
    assert difference(output(switched, params, train=True), plain) < 1e-6


@pytest.mark.parametrize('name', LAYERS)
def test_fine_grained_experts_have_a_part_of_the_hidden_width(name):
    counts = dict(core_experts=2, universal_experts=3) if name == 'spheromoe' else {}
    whole = make_layer(counts | dict(layer=name, hidden=40))
    fine = make_layer(counts | dict(layer=name, hidden=40, hidden_factor=0.3))
    widths = {'core_experts': 12, 'universal_experts': 3, 'experts': 12}
    params = shapes_of(fine)
    for path, (count, width) in fine.path_widths(6).items():
        assert width == widths[path]
        assert params[path]['mlp']['fc1']['kernel'].shape == (count, 6, width)
    saved = whole.multiply_adds(7, 6) - fine.multiply_adds(7, 6)
    slots = fine.num_experts * fine.places(7) if name.endswith('_choice') else None
    narrower = 2 * (40 - 12) + 3 * (10 - 3) if name == 'spheromoe' else (slots or 128) * (40 - 12)
    assert saved == 2 * 6 * narrower


@pytest.mark.parametrize(
    'arguments',
    [
        dict(layer='soft', hidden_factor=0.01),
        dict(layer='token_choice', hidden_factor=-1.0),
        dict(layer='expert_choice', hidden_factor=float('nan')),
        ARGUMENTS | dict(hidden_factor=float('inf')),
        ARGUMENTS | dict(universal_factor=0.05),
    ],
    ids=str,
)
def test_experts_without_hidden_neurons_are_refused(arguments):
    layer = make_layer(dict(arguments, hidden=8))
    with pytest.raises(UserError, match='times 8 hidden neurons have none; give a larger hidden_'):
        shapes_of(layer)


def test_an_unknown_ablation_is_told():
    assert ablate(ARGUMENTS, '') == ARGUMENTS
    assert len(ABLATIONS) == len(set(ABLATIONS)) == 7
    with pytest.raises(UserError) as error:
        ablate(ARGUMENTS, 'no_nose')
    expected = "ablation 'no_nose' does not exist; the nearest known one is 'no_noise'."
    assert str(error.value) == expected
