"""Experts padded and sharded: any count on any devices gives the same numbers, and what moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.models.parameters import flatten, init_params, unflatten
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.layers import make_layer
from jetmoe_jax.training.config import default_config
from jetmoe_jax.training.optimizer import make_optimizer
from jetmoe_jax.training.sharding import (
    make_mesh,
    on_mesh,
    pad_experts,
    shard_batch,
    tree_shardings,
)
from jetmoe_jax.training.state import create_state
from jetmoe_jax.training.step import make_train_step

EXPERT_LEAF = re.compile('experts/')
LAYERS = {
    '98+196': dict(core_experts=98, universal_experts=196),
    '5+10': dict(core_experts=5, universal_experts=10, dropout=0.3, expert_dropout=0.2),
    '7+12': dict(core_experts=7, universal_experts=12, slots_per_expert=2, combine='softmax'),
    'token choice': dict(layer='token_choice', num_experts=5, capacity=3),
}
X = np.random.default_rng(0).standard_normal((8, 9, 6)).astype(np.float32)


def layer(name):
    return make_layer(LAYERS[name], hidden=8, parent=None)


@pytest.fixture(scope='module')
def weights():
    rng = np.random.default_rng(1)
    shapes = {name: jax.eval_shape(layer(name).init, jax.random.key(0), X) for name in LAYERS}
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)


def outputs_and_gradients(weights, expert, fill=0.0):
    """Of every layer in training, on `expert` devices; the padding of experts holds `fill`."""
    mesh = make_mesh(expert, jax.devices()[:expert])
    rngs = {'dropout': jax.random.key(2), 'noise': jax.random.key(3)}

    def loss(weights):
        y = {
            name: layer(name).apply(variables, X, True, rngs=rngs)
            for name, variables in weights.items()
        }
        return sum(jnp.sum(jnp.square(value)) for value in y.values()), y

    flat = flatten(weights)
    padded = pad_experts(flat, mesh)
    for path, leaf in flat.items():
        added = padded[path].shape[0] - leaf.shape[0]
        assert added == (-leaf.shape[0] % expert if EXPERT_LEAF.search(path) else 0), path
        padded[path] = np.concatenate([leaf, np.full((added, *leaf.shape[1:]), fill, np.float32)])
    tree = unflatten(padded)
    tree = jax.device_put(tree, tree_shardings(tree, mesh))
    grads, y = on_mesh(jax.jit(jax.grad(loss, has_aux=True)), mesh)(tree)
    return y, flatten(jax.device_get(grads))


@pytest.fixture(scope='module')
def on_one_device(weights):
    return outputs_and_gradients(weights, 1)


@pytest.mark.parametrize('expert', [2, 4, 8])
def test_any_expert_count_gives_the_same_numbers_on_any_devices(weights, on_one_device, expert):
    expected_y, expected = on_one_device
    y, grads = outputs_and_gradients(
        weights, expert, fill=3.0
    )  # what padding holds must not matter
    for name in LAYERS:
        scale = np.abs(expected_y[name]).max()
        np.testing.assert_allclose(y[name] / scale, expected_y[name] / scale, atol=1e-5)
    for path, theirs in expected.items():
        ours, count = grads[path], len(theirs)
        np.testing.assert_allclose(ours[:count], theirs, atol=1e-4 * np.abs(theirs).max())
        assert not ours[count:].any(), path


D, HIDDEN = 12, 48
MOE = dict(core_experts=5, universal_experts=10, universal_factor=0.5, dropout=0.1)
MODEL = ViT(image_size=8, patch_size=4, width=D, depth=2, num_heads=3, num_classes=5, pool='avg',
            moe_blocks=(1,), moe=MOE)  # fmt: skip
EXPERT_KERNELS = {(D, HIDDEN), (HIDDEN, D), (D, HIDDEN // 2), (HIDDEN // 2, D)}


@pytest.fixture(scope='module')
def collectives():
    """(kind, operand shapes, groups of devices, operation) of each in a step's HLO on (2, 4)."""
    mesh = make_mesh(4)
    config = default_config()
    optimizer = make_optimizer(config.optimizer, lambda step: 1e-2, MODEL.blocks)
    state = create_state(init_params(MODEL, 0), optimizer, 0, mesh)
    step = make_train_step(
        MODEL, optimizer, lambda step: 1e-2, config, (0.5,) * 3, (0.5,) * 3, mesh, state
    )
    batch = {'image': np.zeros((16, 8, 8, 3), np.uint8), 'label': np.zeros(16, np.int32)}
    hlo = step.lower(state, shard_batch(batch, mesh)).compile().as_text()
    kinds = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
    found = re.findall(rf'^ *(?:ROOT )?%\S+ = (.*?) ({kinds})(?:-start)?\((.*)$', hlo, re.MULTILINE)
    return [
        (
            kind,
            [tuple(map(int, dims.split(','))) for dims in re.findall(r'\w+\[([\d,]+)\]', shapes)],
            replica_groups(rest),
            re.search(r'op_name="(.*?)"', rest)[1],
        )
        for shapes, kind, rest in found
    ]


def replica_groups(text):
    """Groups of device ids, in any of the three ways in which HLO writes them."""
    if listed := re.search(r'(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}', text):
        return [[int(i) for i in g.split(',')] for g in re.findall(r'\{([\d,]+)\}', listed[1])]

    def ids(shape, permutation):
        shape = [int(i) for i in shape.split(',')]
        axes = [int(i) for i in permutation.split(',')] if permutation else range(len(shape))
        return np.arange(np.prod(shape)).reshape(shape).transpose(*axes)

    tiles = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'
    iota = re.search(rf'replica_groups=\[([\d,]+)\]<={tiles}', text)
    if iota:
        return ids(iota[2], iota[3]).reshape([int(i) for i in iota[1].split(',')]).tolist()
    named = re.search(
        rf'replica_groups=mesh\[(.*?)\](?:, device_ids=\({tiles}\))? \{{(.*?)\}}', text
    )
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    shape = ','.join(map(str, sizes.values()))
    devices = ids(named[2] or shape, named[3]).reshape(list(sizes.values()))
    axes = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[4])]
    last = list(range(-len(axes), 0))
    devices = np.moveaxis(devices, axes, last)
    return devices.reshape(-1, np.prod(devices.shape[-len(axes) :])).tolist()


def crosses_the_expert_axis(groups):
    """On a mesh (2, 4), devices 0 to 3 and 4 to 7 differ in the expert axis."""
    return any(len({device % 4 for device in group}) > 1 for group in groups)


def test_no_expert_weight_or_gradient_moves_over_the_expert_axis(collectives):
    moved = [
        (kind, groups)
        for kind, shapes, groups, _ in collectives
        if any(len(shape) == 3 and shape[1:] in EXPERT_KERNELS for shape in shapes)
    ]
    assert moved  # gradients are summed over the data axis
    for kind, groups in moved:
        assert kind == 'all-reduce'
        assert not crosses_the_expert_axis(groups)


def test_slots_move_by_all_to_all(collectives):
    of_slots = [
        (kind, groups)
        for kind, shapes, groups, operation in collectives
        if '/moe/' in operation and kind != 'all-reduce'  # of gradients and of metrics
    ]
    assert {kind for kind, _ in of_slots} == {'all-to-all'}
    assert len(of_slots) == 8  # to the experts and back, two paths, output and gradient
    for _, groups in of_slots:
        assert crosses_the_expert_axis(groups)
        assert all(len({device // 4 for device in group}) == 1 for group in groups)
