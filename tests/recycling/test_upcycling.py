"""Upcycling baselines: experts as copies of a dense MLP, into every layer and both families."""

import jax
import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.parameters import param_shapes, unflatten
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.mlp import Mlp
from jetmoe_jax.recycling import strategies
from jetmoe_jax.recycling.selection import generator
from jetmoe_jax.recycling.strategies import recycle
from jetmoe_jax.recycling.upcycling import add_noise, random_positions, redraw, split_neurons

VIT = ViT(image_size=8, patch_size=4, width=6, depth=2, num_heads=2, mlp_ratio=2, num_classes=0)
CONVNEXT = ConvNeXt(
    image_size=8, patch_size=2, widths=(4, 6), depths=(1, 2), mlp_ratio=2, num_classes=0
)
SPHERO = dict(core_experts=2, universal_experts=5)
LAYERS = [
    SPHERO,
    dict(layer='soft', num_experts=3),
    dict(layer='token_choice', num_experts=3, experts_per_token=2),
    dict(layer='expert_choice', num_experts=3),
]
LAST_BLOCK = {ViT: 'blocks_1', ConvNeXt: 'stages_1/blocks_1'}


def random_checkpoint(model, seed=0):
    rng = np.random.default_rng(seed)
    params = {k: rng.normal(size=v.shape).astype('f4') for k, v in param_shapes(model).items()}
    return Checkpoint(model, params, LoadReport(f'dense {seed}'))


@pytest.fixture(autouse=True)
def zeros_for_fresh_values(request, monkeypatch):
    """Compiling an initialisation is what such a test would spend its time on."""

    def zeros(model, seed, paths):
        shapes = param_shapes(model)
        return {path: np.zeros(shapes[path].shape, np.float32) for path in paths}

    if 'from_scratch' not in request.node.name:
        monkeypatch.setattr(strategies, 'init_params', zeros)


@pytest.fixture(scope='module')
def vit():
    return random_checkpoint(VIT)


@pytest.fixture(scope='module')
def convnext():
    return random_checkpoint(CONVNEXT)


def with_moe(model, moe):
    return model.clone(moe_blocks=(1,) if isinstance(model, ViT) else ((1, 1),), moe=moe)


def upcycle(dense, moe, strategy, **options):
    successor = with_moe(dense.model, moe)
    params, record = recycle(successor, dense, strategy=strategy, **options)
    assert {k: v.shape for k, v in params.items()} == {
        k: v.shape for k, v in param_shapes(successor).items()
    }
    return params, record


def leaves(params, block, path):
    prefix = f'{block}/{path}/'
    return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}


@pytest.mark.parametrize('family', ['vit', 'convnext'])
@pytest.mark.parametrize('moe', LAYERS, ids=lambda moe: moe.get('layer', 'spheromoe'))
def test_every_expert_is_a_copy_of_the_dense_mlp(request, family, moe):
    dense = request.getfixturevalue(family)
    params, record = upcycle(dense, moe, 'sparse_upcycling')
    block = LAST_BLOCK[type(dense.model)]
    path = 'core_experts' if moe is SPHERO else 'experts'
    for leaf, value in leaves(dense.params, block, 'mlp').items():
        for expert in params[f'{block}/moe/{path}/mlp/{leaf}']:
            np.testing.assert_array_equal(expert, value)
    for name in (k for k in params if '/moe/' not in k):
        np.testing.assert_array_equal(params[name], dense.params[name])
    np.testing.assert_array_equal(record.neurons[block][path][1], np.arange(12))
    assert record.origin[f'{block}/moe/{path}'] == f'dense 0: {block}/mlp'


def test_sparse_upcycling_keeps_the_function_where_all_experts_are_asked(vit):
    """Gates that sum to one over equal experts: the MoE block is the dense one."""
    moe = dict(layer='token_choice', num_experts=3, experts_per_token=3, capacity=5)
    params, _ = upcycle(vit, moe, 'sparse_upcycling')
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype('f4')
    dense = jax.jit(VIT.apply)({'params': unflatten(vit.params)}, images)
    sparse = jax.jit(with_moe(VIT, moe).apply)({'params': unflatten(params)}, images)
    np.testing.assert_allclose(sparse, dense, rtol=2e-4, atol=1e-5)


def test_narrow_experts_hold_consecutive_neurons_and_the_mlp_together():
    np.testing.assert_array_equal(split_neurons(6, 2, 4), [[0, 1], [2, 3], [4, 5], [0, 1]])
    np.testing.assert_array_equal(split_neurons(6, 6, 2), [range(6)] * 2)
    # Of two donors in turn, and where the width does not divide: from the start again, sorted.
    np.testing.assert_array_equal(split_neurons(6, 3, 4, 2)[:, 0], [0, 0, 3, 3])
    np.testing.assert_array_equal(split_neurons(5, 3, 3), [[0, 1, 2], [0, 3, 4], [1, 2, 3]])


def test_fine_grained_experts_add_up_to_the_dense_mlp(vit):
    moe = dict(layer='token_choice', num_experts=3, experts_per_token=3, hidden_factor=1 / 3)
    params, record = upcycle(vit, moe, 'sparse_upcycling')
    experts = leaves(params, 'blocks_1', 'moe/experts/mlp')
    assert experts['fc1/kernel'].shape == (3, 6, 4)
    np.testing.assert_array_equal(
        np.sort(record.neurons['blocks_1']['experts'].ravel()), np.arange(12)
    )
    x = np.random.default_rng(0).normal(size=(5, 6)).astype('f4')

    def mlp(params):
        return Mlp(params['fc1/bias'].size).apply({'params': unflatten(params)}, x)

    parts = sum(mlp({k: v[i] for k, v in experts.items()}) for i in range(3))
    bias = vit.params['blocks_1/mlp/fc2/bias']  # each part has it whole
    expected = mlp(leaves(vit.params, 'blocks_1', 'mlp'))
    np.testing.assert_allclose(parts - 2 * bias, expected, rtol=1e-4, atol=1e-4)


def test_universal_experts_are_parts_of_the_dense_mlp(vit):
    params, record = upcycle(vit, SPHERO, 'sparse_upcycling')
    np.testing.assert_array_equal(
        record.neurons['blocks_1']['universal_experts'],
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [0, 1, 2]],
    )
    fc2 = vit.params['blocks_1/mlp/fc2/kernel']
    kernel = params['blocks_1/moe/universal_experts/mlp/fc2/kernel']
    np.testing.assert_array_equal(kernel[2], fc2[6:9])


def random_experts(e, d, h, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {'fc1/kernel': (e, d, h), 'fc1/bias': (e, h), 'fc2/kernel': (e, h, d)}
    experts = {
        leaf: rng.normal(i, i + 1, shape).astype('f4')
        for i, (leaf, shape) in enumerate(shapes.items())
    }
    return experts | {'fc2/bias': rng.normal(size=(e, d)).astype('f4')}


def by_neuron(experts):
    return {
        'fc1/kernel': experts['fc1/kernel'].swapaxes(1, 2),
        'fc1/bias': experts['fc1/bias'][:, :, None],
        'fc2/kernel': experts['fc2/kernel'],
    }


def test_redrawn_values_have_the_mean_and_spread_of_those_they_replace():
    before = random_experts(2, 300, 400)
    before['fc1/kernel'][0] += 10  # of each expert by itself
    after = {leaf: value.copy() for leaf, value in before.items()}
    positions = random_positions(2, 400, 100, generator(1))
    redraw(after, positions, generator(2))
    np.testing.assert_array_equal(after['fc2/bias'], before['fc2/bias'])
    old, new = by_neuron(before), by_neuron(after)
    for leaf in old:
        for i in range(2):
            drawn, kept = positions[i], np.setdiff1d(np.arange(400), positions[i])
            np.testing.assert_array_equal(new[leaf][i, kept], old[leaf][i, kept])
            assert (new[leaf][i, drawn] != old[leaf][i, drawn]).all()
            was, now = old[leaf][i, drawn], new[leaf][i, drawn]
            error = was.std() / np.sqrt(was.size)
            np.testing.assert_allclose(now.mean(), was.mean(), atol=5 * error)
            np.testing.assert_allclose(now.std(), was.std(), atol=5 * error)
            assert abs(np.corrcoef(was.ravel(), now.ravel())[0, 1]) < 5 / np.sqrt(was.size)


def test_noise_is_added_to_the_neurons_alone():
    before = random_experts(2, 300, 400)
    after = {leaf: value.copy() for leaf, value in before.items()}
    positions = random_positions(2, 400, 200, generator(1))
    add_noise(after, positions, generator(2))
    old, new = by_neuron(before), by_neuron(after)
    for leaf in old:
        noise = new[leaf] - old[leaf]
        for i in range(2):
            kept = np.setdiff1d(np.arange(400), positions[i])
            assert not noise[i, kept].any()
            values = noise[i, positions[i]]
            np.testing.assert_allclose(values.std(), 0.02, rtol=5 / np.sqrt(2 * values.size))
            np.testing.assert_allclose(values.mean(), 0, atol=0.1 / np.sqrt(values.size))


def test_positions_are_all_equally_likely_and_of_each_expert():
    positions = random_positions(8000, 5, 2, generator(0))
    assert (np.diff(positions) > 0).all()
    np.testing.assert_allclose(np.bincount(positions.ravel()) / 8000, 0.4, atol=0.025)


@pytest.mark.parametrize('ratio, count', [(0.0, 0), (0.3, 3), (1.0, 12)])
def test_drop_upcycling_draws_a_share_of_the_neurons_again(vit, ratio, count):
    params, record = upcycle(vit, SPHERO, 'drop_upcycling', ratio=ratio)
    changed = record.changed['blocks_1']['core_experts']
    assert changed.shape == (2, count)
    kernel = params['blocks_1/moe/core_experts/mlp/fc1/kernel']
    dense = vit.params['blocks_1/mlp/fc1/kernel']
    for i in range(2):
        np.testing.assert_array_equal(np.flatnonzero((kernel[i] != dense).any(0)), changed[i])
    # Narrow experts: the same share, named by the dense MLP's neurons.
    narrow = record.changed['blocks_1']['universal_experts']
    assert narrow.shape == (5, int(ratio * 3))
    parts = record.neurons['blocks_1']['universal_experts']
    assert all(np.isin(c, part).all() for c, part in zip(narrow, parts, strict=True))


def test_noise_upcycling_changes_half_of_the_neurons(vit):
    params, record = upcycle(vit, dict(layer='soft', num_experts=3), 'noise_upcycling')
    kernel = params['blocks_1/moe/experts/mlp/fc2/kernel']
    noise = kernel - vit.params['blocks_1/mlp/fc2/kernel']
    changed = record.changed['blocks_1']['experts']
    assert changed.shape == (3, 6)
    for i in range(3):
        np.testing.assert_array_equal(np.flatnonzero(noise[i].any(1)), changed[i])
    assert (changed[0] != changed[1]).any()
    assert 0.01 < noise[noise != 0].std() < 0.03


def test_branch_train_mix_takes_experts_in_turn_and_the_mean_of_the_rest(vit):
    others = [random_checkpoint(VIT, seed) for seed in (1, 2)]
    moe = dict(layer='token_choice', num_experts=4, shared_expert=True)
    params, record = upcycle(vit, moe, 'branch_train_mix', branches=others)
    donors = [vit, *others]
    for leaf in ('fc1/kernel', 'fc2/bias'):
        experts = params[f'blocks_1/moe/experts/mlp/{leaf}']
        for i, donor in enumerate([*donors, vit]):
            np.testing.assert_array_equal(experts[i], donor.params[f'blocks_1/mlp/{leaf}'])
        mean = np.mean([donor.params[f'blocks_1/mlp/{leaf}'] for donor in donors], axis=0)
        np.testing.assert_allclose(params[f'blocks_1/moe/shared_expert/{leaf}'], mean, rtol=1e-5)
    mean = np.mean([donor.params['blocks_0/attn/qkv/kernel'] for donor in donors], axis=0)
    np.testing.assert_allclose(params['blocks_0/attn/qkv/kernel'], mean, rtol=1e-5, atol=1e-7)
    assert record.origin['pos_embed'] == 'mean of dense 0, dense 1, dense 2: pos_embed'
    assert (
        record.origin['blocks_1/moe/experts'] == 'in turn dense 0, dense 1, dense 2: blocks_1/mlp'
    )


def test_from_scratch_makes_the_experts_alone_fresh(convnext):
    params, record = upcycle(convnext, SPHERO, 'from_scratch')
    kernel = params['stages_1/blocks_1/moe/core_experts/mlp/fc1/kernel']
    assert 0 < np.abs(kernel).max() < 0.05  # initialised with a standard deviation of 0.02
    assert (kernel[0] != kernel[1]).any()
    assert record.origin['stages_1/blocks_1/moe/core_experts/mlp/fc1/kernel'] == 'fresh'
    assert not record.neurons
    np.testing.assert_array_equal(params['stem_conv/kernel'], convnext.params['stem_conv/kernel'])


@pytest.mark.parametrize('strategy', ['sparse_upcycling', 'uniform'])
def test_a_shared_expert_is_the_dense_mlp_or_evenly_spaced_neurons(vit, strategy):
    moe = dict(layer='expert_choice', num_experts=2, shared_expert=True, hidden_factor=0.5)
    params, record = upcycle(vit, moe, strategy)
    shared = leaves(params, 'blocks_1', 'moe/shared_expert')
    spaced = [0, 2, 4, 7, 9, 11]  # 0, 2.2, 4.4, 6.6, 8.8, 11
    np.testing.assert_array_equal(record.neurons['blocks_1']['shared_expert'], [spaced])
    dense = leaves(vit.params, 'blocks_1', 'mlp')
    np.testing.assert_array_equal(shared['fc1/kernel'], dense['fc1/kernel'][:, spaced])
    np.testing.assert_array_equal(shared['fc2/kernel'], dense['fc2/kernel'][spaced])
    np.testing.assert_array_equal(shared['fc2/bias'], dense['fc2/bias'])


def test_a_wider_predecessor_is_first_brought_to_the_successors_width():
    wide = random_checkpoint(VIT.clone(width=12))
    params, record = recycle(with_moe(VIT, SPHERO), wide, strategy='sparse_upcycling')
    every_second = np.arange(0, 24, 2)
    np.testing.assert_array_equal(record.neurons['blocks_1']['core_experts'][1], every_second)
    np.testing.assert_array_equal(record.channels['blocks_1']['core_experts'][1], every_second[:6])
    fc1 = wide.params['blocks_1/mlp/fc1/kernel'][::2, ::2]
    np.testing.assert_array_equal(params['blocks_1/moe/core_experts/mlp/fc1/kernel'][1], fc1)
    np.testing.assert_array_equal(
        params['blocks_0/mlp/fc1/kernel'], wide.params['blocks_0/mlp/fc1/kernel'][::2, ::2]
    )


def test_a_same_size_checkpoint_is_what_is_upcycled(vit):
    wide = random_checkpoint(VIT.clone(width=12), 1)
    params, _ = recycle(with_moe(VIT, SPHERO), wide, vit, strategy='sparse_upcycling')
    kernel = params['blocks_1/moe/core_experts/mlp/fc1/kernel']
    np.testing.assert_array_equal(kernel[0], vit.params['blocks_1/mlp/fc1/kernel'])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(strategy='branch_train_mix'), "'branch_train_mix' and 0 branches are given"),
        (dict(branches=(0,)), "'sparse_upcycling' and 1 branches are given.*the others none"),
        (dict(strategy='branch_train_mix', branches=(1,)), 'dense 5 has .* architecture'),
        (dict(strategy='drop_upcycling', ratio=1.5), 'ratio is 1.5; give a share from 0 to 1'),
        (dict(strategy='drop_upcycling', ratio=float('nan')), 'ratio is nan'),
        (dict(moe=dict(core_experts=1, universal_experts=1, universal_factor=2.0)),
         'universal_experts of blocks_1 are to have 24 neurons and the dense MLP has 12'),
        (dict(moe=dict(core_experts=0, universal_experts=0)), 'are both 0; give one a count'),
        (dict(moe=dict(layer='soft', num_experts=0)), 'give counts of at least 1'),
        (dict(successor=VIT.clone(width=8)), 'dense 0 gives .*not narrower as the predecessor'),
        (dict(successor=VIT.clone(mlp_ratio=3)), 'blocks_.*; choose a .*not narrower'),
        (dict(successor=VIT.clone(depth=3, moe_blocks=(2,), moe=SPHERO)), 'nothing for blocks_2'),
        (dict(same_size=2), 'choose a checkpoint of the same patch and image size'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(vit, arguments, message):
    others = [
        random_checkpoint(VIT, 4),
        random_checkpoint(VIT.clone(reg_tokens=1), 5),
        random_checkpoint(VIT.clone(width=12), 6),
    ]
    arguments = dict(strategy='sparse_upcycling') | arguments
    successor = arguments.pop('successor', VIT)
    if not successor.moe_blocks:
        successor = with_moe(successor, arguments.pop('moe', SPHERO))
    if 'same_size' in arguments:
        arguments['same_size'] = others[arguments['same_size']]
    if 'branches' in arguments:
        arguments['branches'] = [others[i] for i in arguments['branches']]
    with pytest.raises(UserError, match=message) as error:
        recycle(successor, vit, **arguments)
    assert '\n' not in str(error.value)


def test_heads_that_differ_cannot_be_mixed(vit):
    other = random_checkpoint(VIT.clone(num_heads=3), 7)
    with pytest.raises(UserError, match='dense 7 has 3 as num_heads, dense 0 has 2'):
        upcycle(vit, SPHERO, 'branch_train_mix', branches=[other])
