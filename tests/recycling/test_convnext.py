"""Recycling of ConvNeXts: channels and neurons stage by stage."""

import jax
import numpy as np
import pytest

from jetmoe_jax.checkpoints.layout import state_dict
from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.parameters import init_params, param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling.collect import collect_statistics
from jetmoe_jax.recycling.strategies import inherit, recycle

DENSE = ConvNeXt(image_size=16, patch_size=2, widths=(6, 10), depths=(2, 3), num_classes=7)
MOE = ConvNeXt(
    image_size=16,
    patch_size=2,
    widths=(3, 5),
    depths=(1, 2),
    num_classes=4,
    conv_mlp=True,
    moe_blocks=((1, 0), (1, 1)),
    moe=dict(core_experts=(0, 2), universal_experts=(0, 3)),
)


def random_checkpoint(model, name='dense'):
    rng = np.random.default_rng(0)
    shapes = param_shapes(model)
    params = {path: rng.normal(size=leaf.shape).astype('f4') for path, leaf in shapes.items()}
    return Checkpoint(model, params, LoadReport(name))


@pytest.fixture(scope='module')
def dense():
    return random_checkpoint(DENSE)


@pytest.fixture(scope='module')
def statistics(dense):
    images = jax.random.normal(jax.random.key(0), (3, 16, 16, 3))
    return collect_statistics(dense, [(images, np.ones(3, 'f4'))])


def test_statistics_are_those_of_each_stage(statistics):
    assert list(statistics.values) == list(DENSE.blocks)
    assert statistics.of('stages_0/blocks_1', 'mlp_act').shape == (24,)
    assert statistics.of('stages_1/blocks_2', 'mlp_input').shape == (10,)


def test_experts_are_what_the_record_says(dense, statistics):
    params, record = recycle(MOE, dense, statistics=statistics, seed=1)
    for block in ('stages_1/blocks_0', 'stages_1/blocks_1'):
        fc1 = dense.params[f'{block}/mlp/fc1/kernel']
        for path, width in {'core_experts': 20, 'universal_experts': 5}.items():
            kernel = params[f'{block}/moe/{path}/mlp/fc1/kernel']
            assert kernel.shape[1:] == (5, width)
            channels, neurons = record.channels[block][path], record.neurons[block][path]
            for i, (c, m) in enumerate(zip(channels, neurons, strict=True)):
                np.testing.assert_array_equal(kernel[i], fc1[np.ix_(c, m)])


def test_the_rest_is_selected_axis_by_axis_as_in_the_file(dense, statistics):
    params, _ = recycle(MOE, dense, statistics=statistics)
    ours, theirs = state_dict(MOE, params), state_dict(DENSE, dense.params)
    channels = [[0, 2, 4], [0, 2, 4, 6, 8]]  # every second of 6, and of 10
    stem = theirs['stem.0.weight'][channels[0]]
    np.testing.assert_array_equal(ours['stem.0.weight'], stem)
    down = theirs['stages.1.downsample.1.weight'][np.ix_(channels[1], channels[0])]
    np.testing.assert_array_equal(ours['stages.1.downsample.1.weight'], down)
    depthwise = theirs['stages.1.blocks.1.conv_dw.weight'][channels[1]]
    np.testing.assert_array_equal(ours['stages.1.blocks.1.conv_dw.weight'], depthwise)
    fc1 = theirs['stages.0.blocks.0.mlp.fc1.weight'][::2, ::2, None, None]
    np.testing.assert_array_equal(ours['stages.0.blocks.0.mlp.fc1.weight'], fc1)


def test_a_same_size_checkpoint_gives_the_rest_whole(dense, statistics):
    small = random_checkpoint(MOE.clone(moe_blocks=(), moe=None), 'small')
    params, record = recycle(MOE, dense, small, statistics=statistics)
    path = 'stages_1/blocks_1/conv_dw/kernel'
    np.testing.assert_array_equal(params[path], small.params[path])
    assert record.origin[path] == f'small: {path}'


def test_a_successor_inherits_its_donors_variant():
    donor = DENSE.clone(layer_scale=None)
    assert inherit(MOE, donor).layer_scale is None
    assert inherit(MOE, donor, given=['layer_scale']).layer_scale == 1e-6
    assert inherit(MOE, donor).widths == MOE.widths


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(strategy='uniform', non_experts='uniform'), "a ConvNeXt takes 'weight_selection'"),
        (
            dict(strategy='uniform', successor=MOE.clone(depths=(1, 4), moe_blocks=((1, 3),))),
            'dense has nothing for stages_1/blocks_3',
        ),
        (
            dict(strategy='uniform', successor=ViT(moe_blocks=(1,), moe=dict(core_experts=1))),
            'dense is a ConvNeXt, the successor a ViT',
        ),
        (dict(strategy='uniform', successor=DENSE), 'the successor has no MoE block'),
    ],
)
def test_what_does_not_fit_is_refused(dense, arguments, message):
    arguments = dict(arguments)
    with pytest.raises(UserError, match=message):
        recycle(arguments.pop('successor', MOE), dense, **arguments)


def test_fresh_parts_do_not_repeat_the_draws_of_the_seed(dense):
    params, _ = recycle(MOE, dense, strategy='uniform', seed=0)
    assert (params['head/kernel'] != init_params(MOE, 0, ['head/kernel'])['head/kernel']).any()
