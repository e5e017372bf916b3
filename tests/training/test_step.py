"""The training step: the same numbers on one device and on eight, and what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import init_params, unflatten
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.training.config import default_config
from jetmoe_jax.training.optimizer import make_optimizer
from jetmoe_jax.training.sharding import (
    check_batch,
    make_mesh,
    pad_experts,
    shard_batch,
    tree_shardings,
)
from jetmoe_jax.training.state import create_state, from_items, to_items
from jetmoe_jax.training.step import make_eval_step, make_train_step

MOE = dict(
    core_experts=5, universal_experts=10, combine='entmax15', dropout=0.1, expert_dropout=0.2
)
MODEL = ViT(image_size=8, patch_size=4, width=12, depth=2, num_heads=3, num_classes=5, pool='avg',
            moe_blocks=(1,), moe=MOE, drop_path=0.1)  # fmt: skip
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
ALL_OFF = dict(label_smoothing=0.0, mixup=0.0, cutmix=0.0, random_erasing=0.0)


def batches(count, size=16):
    rng = np.random.default_rng(0)
    return [
        {
            'image': rng.integers(0, 256, (size, 8, 8, 3), np.uint8),
            'label': rng.integers(0, 5, size).astype(np.int32),
        }
        for _ in range(count)
    ]


def run(mesh, steps=3, model=MODEL, **changes):
    config = default_config()
    config.update(changes)
    schedule = lambda step: 1e-2  # noqa: E731
    optimizer = make_optimizer(config.optimizer, schedule, model.blocks)
    state = create_state(init_params(model, 0), optimizer, seed=0, mesh=mesh)
    step = make_train_step(model, optimizer, schedule, config, MEAN, STD, mesh, state)
    metrics = []
    for batch in batches(steps):
        state, values = step(state, shard_batch(batch, mesh))
        metrics.append({k: float(v) for k, v in values.items()})
    return jax.device_get(state), metrics


@pytest.fixture(scope='module')
def on_one_device():
    return run(make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize('expert', [1, 4])
def test_eight_devices_give_the_numbers_of_one(on_one_device, expert):
    state, metrics = run(make_mesh(expert))
    expected_state, expected = on_one_device
    for ours, theirs in zip(metrics, expected, strict=True):
        for name in ours:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[: len(b)], b, atol=2e-5),  # experts are padded
        state.params,
        expected_state.params,
    )


def test_experts_and_their_moments_are_split_over_the_expert_axis():
    mesh = make_mesh(4)
    optimizer = make_optimizer(default_config().optimizer, lambda step: 1.0, MODEL.blocks)
    state = create_state(init_params(MODEL, 0), optimizer, 0, mesh)
    path = ('blocks_1', 'moe', 'core_experts', 'mlp', 'fc1', 'kernel')
    for tree in (state.params, state.opt_state[1].mu, state.opt_state[1].nu):
        leaf = tree
        for key in path:
            leaf = leaf[key]
        assert leaf.shape == (8, 12, 48)
        assert leaf.addressable_shards[0].data.shape == (2, 12, 48)
    assert state.params['head']['kernel'].sharding.is_fully_replicated


def test_loss_is_the_smoothed_cross_entropy():
    model = MODEL.clone(moe=MOE | dict(dropout=0.0, expert_dropout=0.0, noise=False), drop_path=0.0)
    settings = ALL_OFF | dict(label_smoothing=0.3)
    _, metrics = run(make_mesh(devices=jax.devices()[:1]), steps=1, model=model, **settings)
    batch = batches(1)[0]
    params = jax.tree.map(jnp.asarray, init_params(model, 0))
    images = (batch['image'] / 255.0 - 0.5) / 0.5
    logits = jax.jit(model.apply)({'params': unflatten(params)}, jnp.float32(images))
    log_p = np.asarray(logits) - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = np.full((16, 5), 0.3 / 5) + 0.7 * np.eye(5)[batch['label']]
    assert metrics[0]['loss'] == pytest.approx(-(target * log_p).sum(-1).mean(), rel=1e-5)


def test_the_moving_average_follows_the_parameters():
    mesh = make_mesh(devices=jax.devices()[:1])
    config = default_config()
    config.update(ALL_OFF | dict(ema_decay=0.75))
    schedule = lambda step: 5e-3  # noqa: E731
    optimizer = make_optimizer(config.optimizer, schedule, MODEL.blocks)
    state = create_state(init_params(MODEL, 0), optimizer, seed=0, mesh=mesh, ema=True)
    step = make_train_step(MODEL, optimizer, schedule, config, MEAN, STD, mesh, state)
    expected = jax.device_get(state.params)
    for batch in batches(2):
        state, _ = step(state, shard_batch(batch, mesh))
        params = jax.device_get(state.params)
        expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, expected, params)
    ema = jax.device_get(from_items(to_items(state)).ema)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ema, expected)


def test_training_learns_a_batch():
    mesh = make_mesh(devices=jax.devices()[:1])
    config = default_config()
    config.update(ALL_OFF)
    schedule = lambda step: 5e-3  # noqa: E731
    optimizer = make_optimizer(config.optimizer, schedule, MODEL.blocks)
    state = create_state(init_params(MODEL, 0), optimizer, seed=0, mesh=mesh)
    step = make_train_step(MODEL, optimizer, schedule, config, MEAN, STD, mesh, state)
    batch = shard_batch(batches(1)[0], mesh)
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    assert losses[-1] < 0.5 * losses[0]


def test_evaluation_counts_the_masked_images_only():
    mesh = make_mesh(4)
    params = unflatten(pad_experts(init_params(MODEL, 0), mesh))
    params = jax.device_put(params, tree_shardings(params, mesh))
    batch = batches(1)[0]
    mask = np.float32(np.arange(16) < 11)
    sums = make_eval_step(MODEL, MEAN, STD, mesh)(params, shard_batch(batch | {'mask': mask}, mesh))
    images = jnp.float32((batch['image'] / 255.0 - 0.5) / 0.5)
    logits = np.asarray(jax.jit(MODEL.apply)({'params': jax.device_get(params)}, images))[:11]
    order = np.argsort(-logits, axis=1)
    assert float(sums['count']) == 11
    assert float(sums['top1']) == (order[:, 0] == batch['label'][:11]).sum()
    assert float(sums['top5']) == 11


@pytest.mark.parametrize('value', [0.0, np.nan])
def test_constant_or_broken_logits_score_nothing(value):
    mesh = make_mesh(devices=jax.devices()[:1])
    params = unflatten(init_params(MODEL, 0))
    params['head'] = jax.tree.map(lambda x: np.full_like(x, value), params['head'])
    batch = shard_batch(batches(1)[0] | {'mask': np.ones(16, np.float32)}, mesh)
    assert float(make_eval_step(MODEL, MEAN, STD, mesh)(params, batch)['top1']) == 0


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: make_mesh(3), 'config.mesh.expert is 3 and there are 8 devices'),
        (lambda: check_batch(12, make_mesh()), 'config.batch_size is 12 and there are 8 devices'),
    ],
)
def test_what_the_devices_do_not_divide_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
