"""Initial parameters: what a config makes recycling do, and what it is spared."""

import numpy as np
import pytest

from jetmoe_jax.checkpoints.shipped import shipped_path
from jetmoe_jax.data.sources import open_source
from jetmoe_jax.errors import UserError
from jetmoe_jax.recycling.record import Record
from jetmoe_jax.recycling.statistics import Statistics
from jetmoe_jax.training import initial
from jetmoe_jax.training.config import default_config


@pytest.fixture(scope='module')
def source():
    return open_source('digits', 'train')


def config_of(**recycle):
    c = default_config()
    c.model_overrides.width, c.model_overrides.depth = 48, 6
    c.model_overrides.moe_blocks = (5,)
    c.dense, c.dense_same = shipped_path('digits_vit_96'), shipped_path('digits_vit_48')
    c.data.name = 'digits'
    c.recycle.update(recycle)
    return c


@pytest.mark.parametrize(
    'strategy, calibrations',
    [('uniform', []), ('sparse_upcycling', []), ('importance', [False]), ('graph', [True])],
)
def test_statistics_are_collected_only_where_they_are_needed(
    source, tmp_path, monkeypatch, strategy, calibrations
):
    collected = []

    def calibrate(predecessor, source, *, images, co_activation, **_):
        assert images == 7
        assert predecessor.model.width == 96
        collected.append(co_activation)
        return Statistics({}, images, '')

    def recycled_parts(model, donors, recipe, statistics):
        assert recipe.strategy == strategy
        assert (statistics is not None) == bool(calibrations)
        return Record(), iter([{'a': np.ones(1)}, {'b': np.ones(2)}])

    monkeypatch.setattr(initial, 'calibrate', calibrate)
    monkeypatch.setattr(initial, 'recycled_parts', recycled_parts)
    config = config_of(strategy=strategy, calibration_images=7)
    start = initial.prepare(config, source, tmp_path)
    assert list(start.make_params()) == ['a', 'b']
    assert collected == calibrations
    assert (tmp_path / 'statistics.npz').exists() == bool(calibrations)


def test_what_does_not_fit_is_refused_before_any_long_work(source, tmp_path):
    values = {
        f'blocks_{i}': {'mlp_input': {'L2': np.ones(96)}, 'mlp_act': {'L2': np.ones(384)}}
        for i in range(6)
    }
    Statistics(values, 5, 'f' * 64, {'checkpoint': 'other'}).save(tmp_path / 's.npz')
    path = str(tmp_path / 's.npz')
    with pytest.raises(UserError, match='the statistics are of other .*digits_vit_96'):
        initial.prepare(config_of(statistics=path), source, tmp_path)
    with pytest.raises(UserError, match='no co_activation for mlp_input of blocks_5'):
        initial.prepare(config_of(statistics=path, strategy='graph'), source, tmp_path)
    with pytest.raises(UserError, match='0 branches are given'):
        initial.prepare(config_of(strategy='branch_train_mix'), source, tmp_path)
    branches = (shipped_path('digits_vit_96'),)
    with pytest.raises(UserError, match="give 'branch_train_mix' checkpoints of one architecture"):
        config = config_of(strategy='branch_train_mix', branches=branches)
        initial.prepare(config, source, tmp_path)
