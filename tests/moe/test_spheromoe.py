"""SpheroMoE against values recorded from the released code, and against its equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import unflatten
from jetmoe_jax.moe.spheromoe import SpheroMoE, l2norm

FIXTURES = [
    'spheromoe_softmax',
    'spheromoe_entmax15',
    'spheromoe_keyproj_queryproj',
    'spheromoe_no_slot_layernorm',
    'spheromoe_one_slot_wide',
]

# Released name -> our path, written out here so that the importer is not tested by itself.
NAMES = {
    'phi': 'phi',
    'slot_norm.weight': 'query_norm/scale',
    'slot_norm.bias': 'query_norm/bias',
    'phi_key_proj.gamma': 'key_projection/scale',
    'phi_key_proj.beta': 'key_projection/bias',
    'phi_query_proj.gamma': 'query_projection/scale',
    'phi_query_proj.beta': 'query_projection/bias',
}
for theirs, ours in {'core': 'core', 'univ': 'universal'}.items():
    for fc in ('fc1', 'fc2'):
        NAMES[f'{theirs}_experts.vit_{fc}.weight'] = f'{ours}_experts/mlp/{fc}/kernel'
        NAMES[f'{theirs}_experts.vit_{fc}.bias'] = f'{ours}_experts/mlp/{fc}/bias'


def our_tree(fixture, prefix):
    flat = {
        ours: np.swapaxes(fixture[prefix + theirs], -1, -2)
        if ours.endswith('kernel')
        else fixture[prefix + theirs]
        for theirs, ours in NAMES.items()
        if prefix + theirs in fixture
    }
    flat['temperature'] = np.stack([fixture[f'{prefix}scales.{i}'] for i in (0, 1)])
    return unflatten(flat)


def layer_of(args):
    return SpheroMoE(
        core_experts=args['core_experts'],
        universal_experts=args['univ_experts'],
        universal_factor=args['univ_factor'],
        slots_per_expert=args['slots_per_expert'],
        combine=args['combine'],
        projections=args.get('key_proj', False),
        query_norm=args['slot_layernorm'],
    )


def assert_close(ours, theirs, tolerance):
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize('name', FIXTURES)
def test_output_and_gradients_agree_with_the_released_layer(reference, name):
    fixture = reference(name)
    layer, params = layer_of(fixture['args']), our_tree(fixture, 'state/')

    def loss(params, x):
        return jnp.sum(layer.apply({'params': params}, x) * fixture['cotangent'])

    y = jax.jit(layer.apply)({'params': params}, fixture['x'])
    grad_params, grad_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, fixture['x'])

    assert_close(y, fixture['y'], 1e-5)
    assert_close(grad_x, fixture['grad/x'], 1e-4)
    expected = our_tree(fixture, 'grad/')
    assert jax.tree.structure(grad_params) == jax.tree.structure(expected)
    jax.tree.map(lambda ours, theirs: assert_close(ours, theirs, 1e-4), grad_params, expected)


def small_layer(**changes):
    return SpheroMoE(
        **(dict(core_experts=3, universal_experts=5, hidden=8, combine='softmax') | changes)
    )


def init(layer, d=6, n=7, b=2):
    x = np.random.default_rng(0).normal(size=(b, n, d)).astype('f4')
    return jax.jit(layer.init)(jax.random.key(0), x)['params'], jnp.asarray(x)


def test_universal_experts_are_narrower_by_the_factor():
    params, _ = init(small_layer(universal_factor=0.5))
    assert params['core_experts']['mlp']['fc1']['kernel'].shape == (3, 6, 8)
    assert params['universal_experts']['mlp']['fc1']['kernel'].shape == (5, 6, 4)


@pytest.mark.parametrize('only', ['core', 'universal'])
def test_a_path_without_experts_has_no_parameters(only):
    counts = dict(core_experts=3, universal_experts=0) if only == 'core' else dict(core_experts=0)
    layer = small_layer(**counts)
    x = jnp.zeros((2, 7, 6))
    y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
    assert {k for k in variables['params'] if k.endswith('_experts')} == {f'{only}_experts'}
    assert y.shape == x.shape


def test_phi_starts_orthogonal_and_temperature_as_given():
    params, _ = init(small_layer(slots_per_expert=2, temperature=1.5))
    rows = params['phi'].reshape(8, 12)
    np.testing.assert_allclose(rows @ rows.T, np.eye(8), atol=1e-5)
    np.testing.assert_array_equal(params['temperature'], [1.5, 1.5])


def test_noise_is_drawn_in_training_only():
    layer = small_layer()
    params, x = init(layer)
    apply = jax.jit(
        lambda seed, train: layer.apply(
            {'params': params}, x, train, rngs={'noise': jax.random.key(seed)}
        ),
        static_argnums=1,
    )
    np.testing.assert_array_equal(apply(0, False), apply(1, False))
    assert np.abs(apply(0, True) - apply(1, True)).max() > 1e-5


def test_dispatch_noise_has_standard_deviation_one_over_experts(monkeypatch):
    # With equal tokens the logits are constant over tokens, so the noise alone makes the softmax
    # uneven: log D = noise - logsumexp(noise), whose spread over tokens is that of the noise.
    layer = small_layer(core_experts=40, universal_experts=0, slots_per_expert=1)
    x = jnp.ones((4, 501, 6))
    softmax = jax.nn.softmax

    @jax.jit
    def first_input_of_softmax():
        params = layer.init(jax.random.key(0), x)['params']
        seen = []
        monkeypatch.setattr(jax.nn, 'softmax', lambda z: [seen.append(z), softmax(z)][1])
        layer.apply({'params': params}, x, True, rngs={'noise': jax.random.key(0)})
        return seen[0]

    z = first_input_of_softmax()
    assert np.std(z, axis=-1).mean() == pytest.approx(1 / 40, rel=0.02)  # over tokens


@pytest.mark.parametrize('mode', ['sample', 'expert'])
def test_expert_dropout_drops_whole_images_or_experts_and_rescales(mode):
    layer = small_layer(expert_dropout=0.5, expert_dropout_mode=mode, noise=False)
    params, x = init(layer, b=64)
    kept = jax.jit(layer.apply)({'params': params}, x)
    train = jax.jit(lambda key: layer.apply({'params': params}, x, True, rngs={'dropout': key}))
    out = train(jax.random.key(3))
    dropped = np.all(np.asarray(out) == 0, axis=(1, 2))
    if mode == 'sample':
        assert 16 < dropped.sum() < 48
        np.testing.assert_allclose(out[~dropped], 2 * kept[~dropped], rtol=1e-5, atol=1e-8)
    else:
        assert dropped.sum() == 0
        np.testing.assert_allclose(out.mean(0), kept.mean(0), atol=0.5 * np.abs(kept).max())
        assert np.abs(out - kept).max() > 0


def test_gradients_are_finite_for_zero_tokens():
    layer = small_layer(combine='entmax15')
    params, x = init(layer)
    grad = jax.jit(jax.grad(lambda x: layer.apply({'params': params}, x).sum()))(x * 0)
    assert np.isfinite(grad).all()


def test_l2norm_divides_by_the_norm_plus_epsilon():
    np.testing.assert_allclose(l2norm(jnp.array([3e-6, 4e-6])), [0.5, 2 / 3], rtol=1e-5)


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(combine='sparsemax'), "combine is 'sparsemax'; use one of softmax, entmax15."),
        (dict(expert_dropout_mode='all'), "expert_dropout_mode is 'all'; use one of expert"),
        (dict(core_experts=0, universal_experts=0), 'both 0'),
        (dict(core_experts=-1), '-1 core experts'),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError, match=message.replace('.', r'\.')):
        init(small_layer(**wrong))
