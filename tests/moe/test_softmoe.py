"""Soft MoE against values recorded from vmoe and MoE Jetpack, and against its equations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import unflatten
from jetmoe_jax.moe.metrics import entropy, router_z_loss
from jetmoe_jax.moe.softmoe import SoftMoE, soft_logits, soft_metrics, soft_routing

# MoE Jetpack's name -> ours.
NAMES = {'phi': 'mu', 'scale': 'scale'}
for fc in ('fc1', 'fc2'):
    NAMES[f'experts.vit_{fc}.weight'] = f'experts/mlp/{fc}/kernel'
    NAMES[f'experts.vit_{fc}.bias'] = f'experts/mlp/{fc}/bias'


def our_tree(fixture, prefix):
    def ours(name, x):
        if name == 'mu':
            return np.moveaxis(x, -1, 0)
        return np.swapaxes(x, -1, -2) if name.endswith('kernel') else x

    return unflatten({name: ours(name, fixture[prefix + key]) for key, name in NAMES.items()})


class LinearExperts(nn.Module):
    """In place of Experts: the matrices (e d d) that vmoe's values were recorded with."""

    hidden: int
    dropout: float
    dtype: object

    @nn.compact
    def __call__(self, slots, train):
        _, e, _, d = slots.shape
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (e, d, d))
        return jnp.einsum('besd,edf->besf', slots, kernel)


def assert_close(ours, theirs, tolerance):
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


def init(layer, d=6, n=7, b=2):
    x = jax.random.normal(jax.random.key(1), (b, n, d))
    return jax.jit(layer.init)(jax.random.key(0), x)['params'], x


def apply(layer, params, x, train=False, seed=0):
    keys = {name: jax.random.key(seed) for name in ('noise', 'dropout')}
    return jax.jit(lambda p, x: layer.apply({'params': p}, x, train, rngs=keys))(params, x)


def sown_by(layer, params, x):
    mutable = ['losses', 'metrics']
    return jax.jit(lambda p, x: layer.apply({'params': p}, x, mutable=mutable)[1])(params, x)


def test_routing_and_metrics_agree_with_vmoe(reference):
    fixture = reference('vmoe_soft_router')
    metrics = {
        key.removeprefix('metrics/'): value
        for key, value in fixture.items()
        if key.startswith('metrics/') and key != 'metrics/auxiliary_loss'
    }

    @jax.jit
    def route(x, mu, scale):
        D, C = soft_routing(soft_logits(x, mu, scale))
        return D, C, soft_metrics(D, C, mu)

    D, C, ours = route(fixture['x'], fixture['mu'], fixture['scale'])
    assert_close(D, fixture['dispatch_weights'], 1e-5)
    assert_close(C, fixture['combine_weights'], 1e-5)
    assert_close(jnp.einsum('bnd,bnes->besd', fixture['x'], D), fixture['slots'], 1e-5)
    assert ours.keys() == metrics.keys()
    for name, value in metrics.items():
        assert ours[name] == pytest.approx(value, rel=1e-5), name


def test_layer_agrees_with_vmoe(reference, monkeypatch):
    monkeypatch.setattr('jetmoe_jax.moe.softmoe.Experts', LinearExperts)
    fixture = reference('vmoe_soft_router')
    params = {
        'mu': fixture['mu'],
        'scale': fixture['scale'],
        'experts': {'kernel': fixture['expert_kernel']},
    }
    y = apply(SoftMoE(num_experts=4, slots_per_expert=3), params, fixture['x'])
    assert_close(y, fixture['y'], 1e-5)


def test_output_and_gradients_agree_with_moe_jetpack(reference):
    fixture = reference('softmoe_torch')
    layer, params = SoftMoE(num_experts=5, slots_per_expert=3), our_tree(fixture, 'state/')

    @jax.jit
    def run(params, x):
        y, pull = jax.vjp(lambda params, x: layer.apply({'params': params}, x), params, x)
        return y, *pull(fixture['cotangent'])

    y, grad_params, grad_x = run(params, fixture['x'])
    assert_close(y, fixture['y'], 1e-5)
    assert_close(grad_x, fixture['grad/x'], 1e-4)
    expected = our_tree(fixture, 'grad/')
    assert jax.tree.structure(grad_params) == jax.tree.structure(expected)
    jax.tree.map(lambda ours, theirs: assert_close(ours, theirs, 1e-4), grad_params, expected)


def test_scale_multiplies_the_similarity_whichever_array_is_smaller():
    mu = jax.random.normal(jax.random.key(0), (6, 3, 2))
    x = jax.random.normal(jax.random.key(1), (2, 7, 6))
    for tokens in (x, x[:1, :3]):
        one, three = (jax.jit(soft_logits)(tokens, mu, scale) for scale in (1.0, 3.0))
        np.testing.assert_allclose(three, 3 * one, rtol=1e-5)
        assert np.abs(one).max() <= 1


def test_noise_is_drawn_in_training_only_and_for_both_softmaxes():
    layer = SoftMoE(num_experts=3, hidden=8, noise=True)
    params, x = init(layer)
    np.testing.assert_array_equal(apply(layer, params, x, seed=0), apply(layer, params, x, seed=1))
    one, two = (apply(layer, params, x, True, seed) for seed in (0, 1))
    assert np.abs(one - two).max() > 1e-5

    # Equal tokens: dispatch noise cannot change the slots, so what differs is the combine's.
    equal = jnp.ones_like(x)
    one, two = (apply(layer, params, equal, True, seed) for seed in (0, 1))
    assert np.abs(one - two).max() > 1e-5


def test_noise_is_off_by_default():
    layer = SoftMoE(num_experts=3, hidden=8)
    params, x = init(layer)
    np.testing.assert_array_equal(apply(layer, params, x, True), apply(layer, params, x))


@pytest.mark.parametrize('mode', ['sample', 'expert'])
def test_expert_dropout_drops_whole_images_or_experts_and_rescales(mode):
    layer = SoftMoE(num_experts=3, hidden=8, expert_dropout=0.5, expert_dropout_mode=mode)
    params, x = init(layer, b=64)
    kept, out = apply(layer, params, x), apply(layer, params, x, True)
    dropped = np.all(np.asarray(out) == 0, axis=(1, 2))
    if mode == 'sample':
        assert 16 < dropped.sum() < 48
        np.testing.assert_allclose(out[~dropped], 2 * kept[~dropped], rtol=1e-5, atol=1e-8)
    else:
        # One image in eight loses all three experts, one in eight keeps them all.
        whole = np.isclose(out, 2 * kept, rtol=1e-4, atol=1e-7).all(axis=(1, 2))
        assert 0 < dropped.sum() < 24 and 0 < whole.sum() < 24


def test_parameters_alone_come_from_init_and_nothing_is_sown_unasked():
    layer = SoftMoE(num_experts=3, hidden=8, z_weight=0.1)
    x = jnp.ones((2, 5, 6))
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    assert variables.keys() == {'params'}
    assert variables['params']['mu'].shape == (6, 3, 1)
    assert variables['params']['scale'] == 1
    assert variables['params']['experts']['mlp']['fc1']['kernel'].shape == (3, 6, 8)
    assert apply(layer, variables['params'], x).shape == x.shape


def test_losses_are_sown_with_their_weight_and_metrics_without():
    layer = SoftMoE(num_experts=3, slots_per_expert=2, hidden=8, z_weight=0.25)
    params, x = init(layer)
    sown = sown_by(layer, params, x)
    L = np.asarray(soft_logits(x, params['mu'], params['scale']))
    expected = np.mean(np.log(np.exp(L).sum(axis=(2, 3))) ** 2)
    assert sown['losses']['z_loss'][0] == pytest.approx(0.25 * expected, rel=1e-5)
    assert sown['metrics']['z_loss'][0] == pytest.approx(expected, rel=1e-5)
    C = np.exp(L) / np.exp(L).sum(axis=(2, 3), keepdims=True)
    nats = -(C * np.log(C)).sum(axis=(2, 3)).mean()
    assert sown['metrics']['combine_entropy'][0] == pytest.approx(nats, rel=1e-5)
    assert sown['metrics']['dispatch_max'][0] < sown['metrics']['combine_max'][0] < 1


def test_a_loss_without_weight_is_not_sown():
    layer = SoftMoE(num_experts=3, hidden=8)
    params, x = init(layer)
    assert sown_by(layer, params, x).keys() == {'metrics'}


def test_entropy_of_zeros_is_zero_and_of_equal_weights_the_logarithm():
    w = jnp.array([[0.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.1, 0.1, 0.1]])
    assert entropy(w, 1) == pytest.approx((np.log(2) + np.log(4)) / 3, rel=1e-6)


def test_z_loss_takes_all_axes_after_tokens_together():
    assert router_z_loss(jnp.zeros((2, 5, 3, 4))) == pytest.approx(np.log(12) ** 2, rel=1e-6)


def test_bfloat16_stays_close_to_float32():
    layer = SoftMoE(num_experts=5, slots_per_expert=3)
    params, x = init(layer, d=24, n=11)
    exact = apply(layer, params, x)
    rough = apply(layer.copy(dtype=jnp.bfloat16), params, x.astype(jnp.bfloat16))
    assert rough.dtype == jnp.bfloat16
    assert_close(rough.astype(jnp.float32), exact, 3e-2)


@pytest.mark.parametrize('size', [0.0, 1.0, 1e4])
def test_values_and_gradients_are_finite_for_equal_tokens_and_large_ones(size):
    layer = SoftMoE(num_experts=3, hidden=8, z_weight=0.1)
    params, x = init(layer)
    inputs = jnp.stack([jnp.full_like(x[0], size), size * x[0]])

    @jax.jit
    def run(params, x):
        def loss(params, x):
            y, sown = layer.apply({'params': params}, x, mutable=['losses', 'metrics'])
            return jnp.sum(y) + sown['losses']['z_loss'][0], sown

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run(params, inputs)))


def test_similarities_are_left_out_where_there_is_one_slot_or_token():
    layer = SoftMoE(num_experts=1, hidden=8)
    params, x = init(layer, n=1)
    sown = sown_by(layer, params, x)['metrics']
    assert not [name for name in sown if 'similarity' in name]


def test_widths_and_slots_are_known_before_the_layer_is_built():
    layer = SoftMoE(num_experts=5, slots_per_expert=3)
    assert layer.path_widths(6) == {'experts': (5, 24)}
    assert layer.copy(hidden=7).path_widths(6) == {'experts': (5, 7)}
    assert layer.slots == 15


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(num_experts=0), r'0 experts of 1 slots: give counts of at least 1\.'),
        (dict(slots_per_expert=-2), r'128 experts of -2 slots'),
        (dict(expert_dropout_mode='all'), r"expert_dropout_mode is 'all'; use one of expert, "),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        init(SoftMoE(**wrong))
