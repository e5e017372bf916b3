"""The error of a MoE layer against the MLP it replaces, where it is known beforehand."""

import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling.recipe import Donors, Recipe
from jetmoe_jax.recycling.replacement import Replacement
from jetmoe_jax.recycling.strategies import dense_counterpart

WIDE = ViT(image_size=8, patch_size=4, width=12, depth=2, num_heads=2, num_classes=3)
# One expert that every token goes to: the layer is the MLP.
MOE = ViT(
    image_size=8,
    patch_size=4,
    width=6,
    depth=2,
    num_heads=1,
    num_classes=5,
    moe_blocks=(1,),
    moe=dict(layer='token_choice', num_experts=1, experts_per_token=1, capacity_factor=2.0),
)


def checkpoint_of(model):
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=v.shape).astype('f4') for k, v in param_shapes(model).items()}
    return Checkpoint(model, params, LoadReport('dense'))


@pytest.fixture(scope='module')
def wide():
    return checkpoint_of(WIDE)


@pytest.fixture(scope='module')
def dense(wide):
    return dense_counterpart(MOE, Donors(wide), Recipe('sparse_upcycling'))


def test_the_counterpart_is_the_predecessor_reduced_or_the_same_size_one(wide, dense):
    model, params = dense
    assert (model.width, model.num_classes, model.moe_paths) == (6, 0, ())
    assert params.keys() == param_shapes(model).keys()
    fc1 = wide.params['blocks_1/mlp/fc1/kernel']
    np.testing.assert_array_equal(params['blocks_1/mlp/fc1/kernel'], fc1[::2, ::2])
    same = checkpoint_of(MOE.clone(moe_blocks=(), moe=None))
    _, params = dense_counterpart(MOE, Donors(wide, same), Recipe('random'))
    for path, value in params.items():
        np.testing.assert_array_equal(value, same.params[path])


@pytest.mark.parametrize('factor, expected', [(1, 0), (0, 1), (3, 2)])
def test_the_error_is_relative_to_the_output_of_the_mlp(dense, factor, expected):
    """An expert that is the MLP, but its outputs times a factor."""
    model, params = dense
    images = np.random.default_rng(1).normal(size=(3, 8, 8, 3)).astype('f4')
    replacement = Replacement(MOE, model, params, [images[:2], images[2:]])
    moe = {
        f'blocks_1/moe/experts/mlp/{leaf}': factor ** leaf.startswith('fc2') * value[None]
        for leaf in ('fc1/kernel', 'fc1/bias', 'fc2/kernel', 'fc2/bias')
        for value in [params[f'blocks_1/mlp/{leaf}']]
    }
    moe['blocks_1/moe/router/kernel'] = np.ones((6, 1), np.float32)
    assert replacement.error('blocks_1', moe) == pytest.approx(expected, abs=1e-5)


def test_every_image_counts_alike(dense):
    """Errors differ between images where the expert is another MLP."""
    model, params = dense
    rng = np.random.default_rng(2)
    images = rng.normal(size=(3, 8, 8, 3)).astype('f4')
    moe = {
        f'blocks_1/moe/experts/mlp/{leaf}': params[f'blocks_1/mlp/{leaf}'][None]
        + rng.normal(size=params[f'blocks_1/mlp/{leaf}'].shape).astype('f4')
        for leaf in ('fc1/kernel', 'fc1/bias', 'fc2/kernel', 'fc2/bias')
    }
    moe['blocks_1/moe/router/kernel'] = np.ones((6, 1), np.float32)
    errors = [Replacement(MOE, model, params, [x[None]]).error('blocks_1', moe) for x in images]
    assert np.ptp(errors) > 1e-3
    together = Replacement(MOE, model, params, [images[:2], images[2:]]).error('blocks_1', moe)
    assert together == pytest.approx(np.mean(errors), rel=1e-5)
