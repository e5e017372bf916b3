"""Recycling part by part: a function of its inputs alone, by every selection strategy."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling import dense, experts, strategies, upcycling
from jetmoe_jax.recycling.recipe import Donors, Recipe
from jetmoe_jax.recycling.selection import generator
from jetmoe_jax.recycling.statistics import METRICS, Statistics, fingerprint
from jetmoe_jax.recycling.strategies import recycle, recycled_parts

DENSE = ViT(image_size=8, patch_size=4, width=12, depth=2, num_heads=2, mlp_ratio=2)
MOE = ViT(
    image_size=8,
    patch_size=4,
    width=6,
    depth=2,
    num_heads=1,
    mlp_ratio=2,
    num_classes=3,
    moe_blocks=(0, 1),
    moe=dict(core_experts=2, universal_experts=3),
)
STRATEGIES = ('graph', 'drop_upcycling')


def random_checkpoint():
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=v.shape).astype('f4') for k, v in param_shapes(DENSE).items()}
    return Checkpoint(DENSE, params, LoadReport('dense'))


def random_statistics(wide):
    """Of activations without any groups: what Louvain makes of them depends on its seed."""
    rng = np.random.default_rng(1)
    values = {}
    for block, (d, h) in DENSE.blocks.items():
        for position, units in dict(mlp_input=d, mlp_act=h, attn_proj_input=d).items():
            x = rng.normal(size=(200, units))
            on = (x > 0.5).astype('f8')
            metrics = np.abs(x).sum(0), np.sqrt((x**2).sum(0)), on.sum(0)
            of_position = dict(zip(METRICS, metrics, strict=True)) | {'co_activation': on.T @ on}
            values.setdefault(block, {})[position] = of_position
    return Statistics(values, 200, fingerprint(wide.params))


def digests(statistics):
    """One line for each strategy: its name, and SHA-256 of all parameters and of the record."""
    for strategy in STRATEGIES:
        params, record = recycle(
            MOE,
            random_checkpoint(),
            strategy=strategy,
            non_experts='importance',
            statistics=statistics,
            seed=3,
        )
        digest = hashlib.sha256(fingerprint(params).encode())
        for name, index in record.arrays().items():
            digest.update(name.encode() + index.tobytes())
        print(strategy, digest.hexdigest())


@pytest.fixture(autouse=True)
def zeros_for_fresh_values(monkeypatch):
    """Compiling an initialisation is what such a test would spend its time on."""

    def zeros(model, seed, paths):
        shapes = param_shapes(model)
        return {path: np.zeros(shapes[path].shape, np.float32) for path in paths}

    monkeypatch.setattr(strategies, 'init_params', zeros)


@pytest.fixture(scope='module')
def wide():
    return random_checkpoint()


@pytest.fixture(scope='module')
def statistics(wide):
    return random_statistics(wide)


def test_one_and_eight_devices_and_two_processes_give_the_same_bytes(tmp_path, statistics):
    statistics.save(tmp_path / 's.npz')

    def start(devices, hash_seed):
        flags = f'--xla_force_host_platform_device_count={devices}'
        return subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / 's.npz')],
            env=os.environ | {'XLA_FLAGS': flags, 'PYTHONHASHSEED': hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )

    one, eight = [process.communicate()[0] for process in (start(1, '1'), start(8, '2'))]
    assert [line.split()[0] for line in one.splitlines()] == list(STRATEGIES)
    assert one == eight


def experts_of(wide, statistics=None, successor=MOE, **recipe):
    """Block's path -> parameters of its experts; and the record."""
    record, parts = recycled_parts(successor, Donors(wide), Recipe(**recipe), statistics)
    _, *experts = parts
    return dict(zip(successor.moe_paths, experts, strict=True)), record


def test_parts_are_the_rest_and_then_block_by_block(wide):
    record, parts = recycled_parts(MOE, Donors(wide), Recipe('uniform'))
    rest = next(parts)
    shapes = param_shapes(MOE)
    assert set(rest) == {path for path in shapes if 'experts/' not in path}
    assert not record.channels
    for block in MOE.moe_paths:
        part = next(parts)
        assert part
        assert all(path.startswith(f'{block}/moe/') for path in part)
        assert list(record.channels)[-1] == block
    assert next(parts, None) is None


def test_everything_is_checked_before_the_first_part(wide, statistics):
    with pytest.raises(UserError, match="strategy 'graph' needs statistics"):
        recycled_parts(MOE, Donors(wide), Recipe('graph'))
    other = Checkpoint(DENSE, wide.params | {'cls_token': np.ones((1, 1, 12), 'f4')}, wide.report)
    with pytest.raises(UserError, match='give the checkpoint they are of'):
        recycled_parts(MOE, Donors(other), Recipe('importance'), statistics)
    recycled_parts(MOE, Donors(other), Recipe('random'), statistics)  # not used, not checked


def test_the_seed_changes_what_is_drawn_and_the_block_too(wide, statistics):
    _, a = experts_of(wide, statistics, strategy='importance', seed=3)
    _, b = experts_of(wide, statistics, strategy='importance', seed=4)
    ours, other = (r.neurons['blocks_0']['core_experts'] for r in (a, b))
    assert (ours != other).any()
    _, c = experts_of(wide, strategy='random', seed=3)
    assert (c.neurons['blocks_0']['core_experts'] != c.neurons['blocks_1']['core_experts']).any()


@pytest.mark.parametrize('metric', METRICS)
def test_experts_and_the_rest_go_by_the_metric_that_was_asked_for(wide, statistics, metric):
    """Where only k units have a value, those are the k that every expert takes."""
    chosen = {'mlp_input': np.arange(1, 12, 2), 'mlp_act': np.arange(0, 24, 2)}
    chosen['attn_proj_input'] = np.arange(0, 12, 2)
    values = {}
    for block, of_block in statistics.values.items():
        values[block] = {p: dict(m) for p, m in of_block.items()}
        for position, units in chosen.items():
            only = np.zeros(len(of_block[position][metric]))
            only[units] = 1 + np.arange(len(units))
            values[block][position][metric] = only
    marked = Statistics(values, 1, statistics.fingerprint)
    record, parts = recycled_parts(
        MOE, Donors(wide), Recipe('importance', metric, 'importance'), marked
    )
    rest, *_ = parts
    for block in MOE.moe_paths:
        core = record.neurons[block]['core_experts']
        np.testing.assert_array_equal(core, np.tile(chosen['mlp_act'], (2, 1)))
        channels = record.channels[block]['universal_experts']
        np.testing.assert_array_equal(channels, np.tile(chosen['mlp_input'], (3, 1)))
    np.testing.assert_array_equal(rest['cls_token'], wide.params['cls_token'][..., 1::2])
    proj = wide.params['blocks_1/attn/proj/kernel'][::2, 1::2]
    np.testing.assert_array_equal(rest['blocks_1/attn/proj/kernel'], proj)


def test_random_experts_take_any_subset_alike(wide):
    successor = MOE.clone(moe=dict(layer='soft', num_experts=3000))
    params, record = experts_of(wide, successor=successor, strategy='random')
    channels, neurons = (x['blocks_1']['experts'] for x in (record.channels, record.neurons))
    assert channels.shape == (3000, 6)
    assert (np.diff(neurons) > 0).all()
    np.testing.assert_allclose(np.bincount(channels.ravel()) / 3000, 0.5, atol=0.05)
    np.testing.assert_allclose(np.bincount(neurons.ravel()) / 3000, 0.5, atol=0.05)
    kernel = params['blocks_1']['blocks_1/moe/experts/mlp/fc1/kernel']
    fc1 = wide.params['blocks_1/mlp/fc1/kernel']
    np.testing.assert_array_equal(kernel[1234], fc1[np.ix_(channels[1234], neurons[1234])])


def test_graph_experts_are_filled_community_by_community(wide, statistics, tmp_path):
    _, record = experts_of(wide, statistics, strategy='graph', seed=2)
    for block in MOE.moe_paths:
        labels = record.communities[block]['mlp_act']
        assert labels.shape == (24,)
        sizes = np.bincount(labels)
        for neurons in record.neurons[block]['core_experts']:
            taken = np.bincount(labels[neurons], minlength=len(sizes))
            assert ((taken > 0) & (taken < sizes)).sum() <= 1  # only the last is not whole
    record.save(tmp_path)
    with np.load(tmp_path / 'record.npz') as saved:
        assert saved['communities/blocks_1/mlp_input'].shape == (12,)
        assert saved['neurons/blocks_0/universal_experts'].shape == (3, 3)


def test_narrow_experts_draw_as_many_neurons_as_they_have(wide, statistics):
    successor = MOE.clone(moe=dict(layer='soft', num_experts=4, hidden_factor=0.5))
    _, record = experts_of(wide, statistics, successor, strategy='importance', seed=1)
    assert record.neurons['blocks_0']['experts'].shape == (4, 6)
    norms = np.zeros(24)
    norms[[3, 5, 8, 13, 21, 22]] = 1
    values = {b: at | {'mlp_act': {'L2': norms}} for b, at in statistics.values.items()}
    only = Statistics(values, 1, statistics.fingerprint)
    _, record = experts_of(wide, only, successor, strategy='importance', seed=1)
    expected = np.tile(np.flatnonzero(norms), (4, 1))
    np.testing.assert_array_equal(record.neurons['blocks_0']['experts'], expected)


def test_streams_of_a_recipe_do_not_meet():
    streams = {
        experts.CHANNELS,
        experts.NEURONS,
        experts.COMMUNITIES,
        dense.ATTENTION,
        dense.NEURONS,
        upcycling.CHANGES,
    }
    draws = {generator(0, block, stream).random() for block in range(2) for stream in streams}
    assert len(draws) == 12


if __name__ == '__main__':
    digests(Statistics.load(sys.argv[1]))
