"""Token and expert choice against values recorded from vmoe, plain loops and their equations."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.moe.sparse import (
    ExpertChoice,
    TokenChoice,
    capacity_of,
    expert_choice,
    gshard_loss,
    importance_loss,
    load_loss,
    token_choice,
)


class LinearExperts(nn.Module):
    """In place of Experts: the matrices (e d d) that vmoe's values were recorded with."""

    hidden: int
    dropout: float
    dtype: object

    @nn.compact
    def __call__(self, slots, train):
        _, e, _, d = slots.shape
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (e, d, d))
        return jnp.einsum('becd,edf->becf', slots, kernel)


def assert_close(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


def init(layer, d=6, n=7, b=2):
    x = jax.random.normal(jax.random.key(1), (b, n, d))
    return jax.jit(layer.init)(jax.random.key(0), x)['params'], x


def apply(layer, params, x, train=False, seed=0):
    """(output, what was sown)."""
    keys = {name: jax.random.key(seed) for name in ('noise', 'dropout')}

    @jax.jit
    def run(params, x):
        return layer.apply({'params': params}, x, train, rngs=keys, mutable=['losses', 'metrics'])

    return run(params, x)


def gates_of(b, n, e, seed=0):
    return jax.nn.softmax(jax.random.normal(jax.random.key(seed), (b, n, e)))


def dispatch_by_loops(gates, k, capacity, batch_priority):
    """Token choice as one would say it."""
    b, n, e = gates.shape
    D = np.zeros((b, n, e, capacity))
    for image in range(b):
        taken = [0] * e
        order = range(n)
        if batch_priority:
            order = sorted(order, key=lambda token: -gates[image, token].max())
        for choice in range(k):
            for token in order:
                expert = np.argsort(-gates[image, token])[choice]
                if taken[expert] < capacity:
                    D[image, token, expert, taken[expert]] = 1
                    taken[expert] += 1
    return D


@pytest.fixture
def vmoe(reference, monkeypatch):
    """vmoe('token_choice/k1/bpr0/') gives (params, x, values of that case)."""
    monkeypatch.setattr('jetmoe_jax.moe.sparse.Experts', LinearExperts)
    fixture = reference('vmoe_sparse_routers')

    def load(case):
        params = {
            'router': {'kernel': fixture[case + 'kernel']},
            'experts': {'kernel': fixture[case + 'expert_kernel']},
        }
        values = {k.removeprefix(case): v for k, v in fixture.items() if k.startswith(case)}
        return params, fixture['x'], values

    return load


@pytest.mark.parametrize('batch_priority', [False, True])
@pytest.mark.parametrize('k', [1, 2])
def test_token_choice_agrees_with_vmoe(vmoe, k, batch_priority):
    params, x, values = vmoe(f'token_choice/k{k}/bpr{int(batch_priority)}/')
    layer = TokenChoice(
        num_experts=4,
        experts_per_token=k,
        capacity=4,
        batch_priority=batch_priority,
        importance_weight=1.0,
        gshard_weight=0.5,
    )
    y, sown = apply(layer, params, x)
    assert_close(y, values['y'])
    losses = {name: values[f'metrics/{name}'].mean() for name in ('importance_loss', 'gshard_loss')}
    for name, weight in dict(importance_loss=1.0, gshard_loss=0.5).items():
        assert sown['metrics'][name][0] == pytest.approx(losses[name], rel=1e-5)
        assert sown['losses'][name][0] == pytest.approx(weight * losses[name], rel=1e-5)


def test_expert_choice_agrees_with_vmoe(vmoe):
    params, x, values = vmoe('expert_choice/')
    y, sown = apply(ExpertChoice(num_experts=4, capacity=4), params, x)
    assert_close(y, values['y'])
    read = values['metrics/ratio_processed_items_by_at_least_1_experts'].mean()
    assert sown['metrics']['dropped_tokens'][0] == pytest.approx(1 - read, abs=1e-6)


@pytest.mark.parametrize('batch_priority', [False, True])
@pytest.mark.parametrize('k, capacity', [(1, 2), (2, 3), (3, 5), (4, 11)])
def test_token_choice_is_the_plain_loop(k, capacity, batch_priority):
    gates = gates_of(3, 11, 4)
    D, C = jax.jit(token_choice, static_argnums=(1, 2, 3))(gates, k, capacity, batch_priority)
    expected = dispatch_by_loops(np.asarray(gates), k, capacity, batch_priority)
    np.testing.assert_array_equal(D, expected)
    np.testing.assert_allclose(C, expected * np.asarray(gates)[..., None], rtol=1e-6)


def test_batch_priority_keeps_the_tokens_with_the_greatest_gates():
    sure = jnp.array([0.6, 0.9, 0.7, 0.8])
    gates = jnp.stack([sure, 1 - sure], axis=-1)[None]
    for batch_priority, kept in (False, [0, 1]), (True, [1, 3]):
        D, _ = jax.jit(token_choice, static_argnums=(1, 2, 3))(gates, 1, 2, batch_priority)
        np.testing.assert_array_equal(np.flatnonzero(D.sum(axis=(0, 2, 3))), kept)


def test_expert_choice_takes_each_experts_best_tokens():
    gates = gates_of(2, 7, 3)
    D, C = jax.jit(expert_choice, static_argnums=1)(gates, 4)
    for image in range(2):
        for expert in range(3):
            best = np.argsort(-gates[image, :, expert])[:4]
            np.testing.assert_array_equal(D[image, :, expert].argmax(axis=0), best)
    np.testing.assert_array_equal(D.sum(axis=1), 1)
    np.testing.assert_allclose(C, D * gates[..., None], rtol=1e-6)


def test_dropped_tokens_give_zero_output_and_are_counted():
    layer = TokenChoice(num_experts=3, experts_per_token=1, capacity=2, hidden=8)
    params, x = init(layer)
    y, sown = apply(layer, params, jnp.ones_like(x))  # All choose the same expert.
    zero = np.all(np.asarray(y) == 0, axis=-1)
    np.testing.assert_array_equal(zero, [[False] * 2 + [True] * 5] * 2)
    assert sown['metrics']['dropped_tokens'][0] == pytest.approx(5 / 7)
    # Two of the six places are taken, and a served token reads one expert.
    assert sown['metrics']['dispatch_max'][0] == pytest.approx(2 / 6)
    assert sown['metrics']['combine_entropy'][0] == 0


def test_a_shared_expert_serves_every_token():
    layer = TokenChoice(num_experts=3, capacity=1, hidden=8, shared_expert=True)
    params, x = init(layer)
    alone = {name: tree for name, tree in params.items() if name != 'shared_expert'}
    routed, _ = apply(layer.copy(shared_expert=False), alone, x)
    both, _ = apply(layer, params, x)
    fc1, fc2 = (params['shared_expert'][name] for name in ('fc1', 'fc2'))
    h = nn.gelu(x @ fc1['kernel'] + fc1['bias'], approximate=False)
    assert_close(both, routed + h @ fc2['kernel'] + fc2['bias'])
    assert fc1['kernel'].shape == (6, 8)


def gates_as_output(layer, n):
    """Parameters with which the layer's output is its gates: logits 0, expert i gives unit i."""
    e = layer.num_experts
    params, x = init(layer, d=e, n=n)
    params = jax.tree.map(jnp.zeros_like, params)
    params['experts']['mlp']['fc2']['bias'] = jnp.eye(e)
    return params, x


@pytest.mark.parametrize('make', [TokenChoice, ExpertChoice])
def test_noise_has_standard_deviation_one_over_experts_in_training_only(make):
    layer = make(num_experts=5, capacity=700, hidden=1)
    if make is TokenChoice:
        layer = layer.copy(experts_per_token=5)
    params, x = gates_as_output(layer, n=700)
    gates, _ = apply(layer, params, x, train=True)
    # log gates = noise - logsumexp(noise). Without the mean over experts, a share of 1 - 1/e of the
    # variance is left.
    noise = np.log(gates) - np.log(gates).mean(axis=-1, keepdims=True)
    assert noise.std() == pytest.approx(math.sqrt(1 - 1 / 5) / 5, rel=0.03)
    for quiet, train in (layer, False), (layer.copy(noise=False), True):
        np.testing.assert_allclose(apply(quiet, params, x, train)[0], 1 / 5, rtol=1e-6)


def test_evaluation_is_deterministic_and_training_is_not():
    layer = TokenChoice(num_experts=3, hidden=8)
    params, x = init(layer)
    outputs = [apply(layer, params, x, train, seed)[0] for train in (0, 1) for seed in (0, 1)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert np.abs(outputs[2] - outputs[3]).max() > 1e-5


def test_importance_loss_is_zero_when_balanced_and_experts_less_one_at_worst():
    balanced = jnp.tile(jnp.eye(3), (2, 2, 1))
    assert importance_loss(balanced) == pytest.approx(0, abs=1e-6)
    assert gshard_loss(balanced) == pytest.approx(1, rel=1e-6)
    collapsed = jnp.zeros((2, 6, 3)).at[..., 1].set(1)
    assert importance_loss(collapsed) == pytest.approx(2, rel=1e-6)
    assert gshard_loss(collapsed) == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize('k', [1, 2])
def test_load_loss_is_the_variation_of_the_chance_to_be_chosen(k):
    b, n, e = 2, 7, 4
    logits = 0.3 * np.asarray(jax.random.normal(jax.random.key(0), (b, n, e)))
    noisy = logits + np.asarray(jax.random.normal(jax.random.key(1), (b, n, e))) / e

    expected = 0
    for image in range(b):
        load = np.zeros(e)
        for token in range(n):
            least = sorted(noisy[image, token])[-k]
            for expert in range(e):
                needed = (least - logits[image, token, expert]) * e
                load[expert] += (1 - math.erf(needed / math.sqrt(2))) / 2 / n
        expected += (load.std() / load.mean()) ** 2 / b
    assert jax.jit(load_loss, static_argnums=2)(logits, noisy, k) == pytest.approx(
        expected, rel=1e-4
    )


def test_load_loss_is_sown_with_noise_only():
    layer = TokenChoice(num_experts=3, hidden=8, load_weight=0.5)
    params, x = init(layer)
    sown = apply(layer, params, x, train=True)[1]
    assert sown['losses']['load_loss'][0] == pytest.approx(0.5 * sown['metrics']['load_loss'][0])
    assert sown['losses'].keys() == {'load_loss'}
    assert 'losses' not in apply(layer, params, x)[1]


def test_losses_over_the_batch_balance_all_its_images_together():
    # Each image keeps to one expert, two images to two experts.
    layer = TokenChoice(num_experts=2, hidden=8, importance_weight=1.0)
    params, x = init(layer, d=2)
    params['router']['kernel'] = 100 * jnp.eye(2)
    x = jnp.stack([jnp.eye(2)[:1].repeat(7, axis=0), jnp.eye(2)[1:].repeat(7, axis=0)])
    for scope, expected in ('image', 1), ('batch', 0):
        sown = apply(layer.copy(loss_scope=scope), params, x)[1]
        assert sown['losses']['importance_loss'][0] == pytest.approx(expected, abs=1e-6)


def test_z_loss_is_sown_with_its_weight():
    layer = ExpertChoice(num_experts=3, hidden=8, z_weight=0.25)
    params, x = init(layer)
    L = np.asarray(x) @ np.asarray(params['router']['kernel'])
    expected = 0.25 * np.mean(np.log(np.exp(L).sum(axis=-1)) ** 2)
    assert apply(layer, params, x)[1]['losses']['z_loss'][0] == pytest.approx(expected, rel=1e-4)


def test_the_router_learns_through_the_gates_of_served_tokens():
    layer = TokenChoice(num_experts=3, hidden=8, capacity=2)
    params, x = init(layer)

    def loss(kernel):
        y = layer.apply({'params': params | {'router': {'kernel': kernel}}}, x)
        return jnp.sum(y**2) * 1e4

    kernel, step = params['router']['kernel'], 1e-2
    direction = jax.random.normal(jax.random.key(2), kernel.shape)
    loss_, grad = jax.jit(loss), jax.jit(jax.grad(loss))(kernel)
    slope = (loss_(kernel + step * direction) - loss_(kernel - step * direction)) / (2 * step)
    assert jnp.sum(grad * direction) == pytest.approx(float(slope), rel=1e-2)


@pytest.mark.parametrize('make', [TokenChoice, ExpertChoice])
def test_bfloat16_routes_alike_and_stays_close_to_float32(make):
    layer = make(num_experts=5, capacity=4, shared_expert=True)
    params, x = init(layer, d=24, n=11)
    x = x.astype(jnp.bfloat16)
    exact, _ = apply(layer, params, x.astype(jnp.float32))
    rough, _ = apply(layer.copy(dtype=jnp.bfloat16), params, x)
    assert rough.dtype == jnp.bfloat16
    assert_close(rough.astype(jnp.float32), exact, 3e-2)


@pytest.mark.parametrize('size', [0.0, 1.0, 1e4])
@pytest.mark.parametrize('make', [TokenChoice, ExpertChoice])
def test_values_and_gradients_are_finite_for_equal_tokens_and_large_ones(make, size):
    layer = make(num_experts=4, hidden=8, z_weight=0.1)
    if make is TokenChoice:
        layer = layer.copy(importance_weight=0.1, load_weight=0.1, gshard_weight=0.1)
    params, x = init(layer)
    inputs = jnp.stack([jnp.full_like(x[0], size), size * x[0]])

    @jax.jit
    def run(params, x):
        def loss(params, x):
            keys = {'noise': jax.random.key(0)}
            variables = {'params': params}
            y, sown = layer.apply(variables, x, True, rngs=keys, mutable=['losses', 'metrics'])
            return jnp.sum(y) + sum(jax.tree.leaves(sown['losses'])), sown

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run(params, inputs)))


@pytest.mark.parametrize(
    'readings, e, factor, expected',
    [(12, 4, 1.0, 4), (394, 32, 1.05, 16), (197, 8, 1.0, 28), (128, 8, 1.0, 16), (5, 32, 1.0, 4)],
)
def test_capacity_is_rounded_up_to_a_multiple_of_four(readings, e, factor, expected):
    assert capacity_of(readings, e, factor) == expected


def test_places_follow_tokens_and_choices_and_never_exceed_the_tokens():
    layer = TokenChoice(num_experts=8, experts_per_token=2, capacity_factor=1.0)
    assert layer.places(64) == 16
    assert layer.copy(experts_per_token=1).places(64) == 8
    assert layer.places(3) == 3
    assert layer.copy(capacity=5).places(64) == 5
    assert ExpertChoice(num_experts=2, capacity=99).places(7) == 7


@pytest.mark.parametrize('make', [TokenChoice, ExpertChoice])
def test_parameters_widths_and_slots_are_known_before_the_layer_is_built(make):
    layer = make(num_experts=5)
    assert layer.path_widths(6) == {'experts': (5, 24)}
    assert layer.slots is None
    assert layer.copy(capacity=3).slots == 15
    variables = jax.jit(layer.init)(jax.random.key(0), jnp.ones((2, 7, 6)))
    assert variables.keys() == {'params'}
    assert variables['params']['experts']['mlp']['fc1']['kernel'].shape == (5, 6, 24)
    assert jax.tree.map(jnp.shape, variables['params']['router']) == {'kernel': (6, 5)}


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(num_experts=0), r'num_experts is 0; give at least 1\.'),
        (dict(capacity=0), r'capacity is 0; give each expert at least 1 place\.'),
        (dict(capacity_factor=0.0), r'capacity_factor is 0\.0; give a positive number\.'),
        (dict(experts_per_token=33), r'experts_per_token is 33; .* 1 to num_experts, 32\.'),
        (dict(loss_scope='layer'), r"loss_scope is 'layer'; use one of image, batch\."),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        init(TokenChoice(**wrong))
