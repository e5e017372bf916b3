"""Recycling against weights and statistics recorded from the released code."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.checkpoints.files import StateDict
from jetmoe_jax.checkpoints.layout import state_dict
from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, fit
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling.collect import collect_statistics
from jetmoe_jax.recycling.dense import DenseSets, select_by_sets, weight_selection
from jetmoe_jax.recycling.experts import cut_experts
from jetmoe_jax.recycling.strategies import recycle

MOE = dict(core_experts=2, universal_experts=3, universal_factor=0.25)


def teacher_of(recorded, **args):
    model = ViT(
        image_size=32,
        patch_size=8,
        width=args['embed_dim'],
        depth=args['depth'],
        num_heads=args['num_heads'],
        mlp_ratio=args['mlp_ratio'],
        num_classes=10,
    )
    tensors = {k.removeprefix('teacher/'): v for k, v in recorded.items() if 'teacher/' in k}
    params, _ = fit(model, StateDict('teacher', tensors))
    return Checkpoint(model, params, LoadReport('teacher'))


@pytest.fixture(scope='module')
def recorded(reference):
    return reference('recycling_uniform')


@pytest.fixture(scope='module')
def teacher(recorded):
    return teacher_of(recorded, **recorded['args']['teacher'])


@pytest.fixture(scope='module')
def statistics(recorded, teacher):
    batches = recorded['images_nchw'].transpose(0, 1, 3, 4, 2)
    return collect_statistics(
        teacher,
        [(jnp.asarray(images), np.ones(4, np.float32)) for images in batches],
        group=4,
        co_activation=True,
    )


def student(**changes):
    return ViT(
        **(
            dict(
                image_size=32,
                patch_size=8,
                width=12,
                depth=12,
                num_heads=1,
                mlp_ratio=2,
                num_classes=10,
                moe_blocks=(10, 11),
                moe=MOE,
            )
            | changes
        )
    )


def test_statistics_agree_with_the_recorded_ones(recorded, statistics):
    ours = {'mlp.act': 'mlp_act', 'attn.proj': 'attn_proj_input', 'norm2': 'mlp_input'}
    metrics = {'L1': 'L1', 'L2': 'L2', 'act_patrn': 'active', 'co_act': 'co_activation'}
    for position in ours:
        for block in (0, 5, 11):
            for metric in metrics:
                expected = recorded[f'stats/{position}/{block}/{metric}']
                value = statistics.of(f'blocks_{block}', ours[position], metrics[metric])
                np.testing.assert_allclose(value, expected, atol=1e-5 * np.abs(expected).max())


def test_uniform_recycling_gives_the_recorded_weights(recorded, teacher):
    params, _ = recycle(student(), teacher, strategy='uniform', non_experts='uniform')
    ours = state_dict(student(), params)
    expected = {
        k.removeprefix('dualpath_uniform/'): v for k, v in recorded.items() if 'dualpath' in k
    }
    assert len(expected) > 100
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_sampled_index_sets_give_the_recorded_weights(reference, teacher):
    drawn = reference('recycling_importance_L2')
    blocks = range(12)
    sets = DenseSets(
        drawn['dense_idx/channel/0'],
        {f'blocks_{i}': drawn[f'dense_idx/attn/{i}'] for i in blocks},
        {f'blocks_{i}': drawn[f'dense_idx/mlp/{i}'] for i in blocks},
    )
    dense = {
        path: select_by_sets(path, value, sets)
        for path, value in teacher.params.items()
        if not path.startswith('head/')
        and not any(path.startswith(f'blocks_{i}/mlp') for i in (10, 11))
    }
    expected = {k.removeprefix('selected_L2/'): v for k, v in drawn.items() if 'selected_L2' in k}
    for name, value in state_dict(student(), dense).items():
        np.testing.assert_array_equal(expected.pop(name), value, err_msg=name)
    for block in (10, 11):
        channels, neurons = drawn[f'moe_idx/channel/{block}'], drawn[f'moe_idx/mlp/{block}']
        experts = cut_experts(teacher.params, f'blocks_{block}', channels, neurons)
        for leaf, value in experts.items():
            fc, kind = leaf.split('/')
            name = f'blocks.{block}.mlp.experts.vit_{fc}.' + kind.replace('kernel', 'weight')
            value = value.swapaxes(-1, -2) if kind == 'kernel' else value
            np.testing.assert_array_equal(expected.pop(name), value, err_msg=name)
    assert not expected


def test_weight_selection_gives_the_recorded_weights(reference):
    recorded = reference('weight_selection')
    teacher = teacher_of(recorded, **recorded['args']['teacher'])
    selected = {k.removeprefix('selected/'): v for k, v in recorded.items() if 'selected/' in k}
    shapes = {name: value.shape for name, value in selected.items()}
    successor = ViT(image_size=32, patch_size=8, width=16, depth=2, num_heads=2, mlp_ratio=3,
                    num_classes=10)  # fmt: skip
    select = weight_selection(teacher.model, successor)
    shapes_of_ours = param_shapes(successor).items()
    ours = state_dict(
        successor,
        {path: select(path, teacher.params[path], leaf.shape) for path, leaf in shapes_of_ours},
    )
    for name in shapes:
        np.testing.assert_array_equal(ours[name], selected[name], err_msg=name)


def test_importance_recycling_is_what_its_record_says(teacher, statistics):
    params, record = recycle(student(), teacher, statistics=statistics, seed=3)
    for block in (10, 11):
        fc1 = teacher.params[f'blocks_{block}/mlp/fc1/kernel']
        fc2_bias = teacher.params[f'blocks_{block}/mlp/fc2/bias']
        for path, width in {'core_experts': 24, 'universal_experts': 6}.items():
            prefix = f'blocks_{block}/moe/{path}/mlp/'
            channels, neurons = (
                record.channels[f'blocks_{block}'][path],
                record.neurons[f'blocks_{block}'][path],
            )
            assert neurons.shape[1] == width
            for i, (c, m) in enumerate(zip(channels, neurons, strict=True)):
                np.testing.assert_array_equal(params[prefix + 'fc1/kernel'][i], fc1[c][:, m])
                np.testing.assert_array_equal(params[prefix + 'fc2/bias'][i], fc2_bias[c])
    different = record.channels['blocks_10']['core_experts']
    assert (different[0] != different[1]).any()
    assert record.origin['head/kernel'] == record.origin['blocks_10/moe/phi'] == 'fresh'
    assert record.origin['norm/scale'] == 'teacher: norm/scale'


@pytest.mark.parametrize('layer', ['soft', 'token_choice', 'expert_choice'])
def test_the_experts_of_every_layer_are_recycled(teacher, statistics, layer):
    successor = student(moe=dict(layer=layer, num_experts=4))
    params, record = recycle(successor, teacher, statistics=statistics)
    kernel = params['blocks_11/moe/experts/mlp/fc2/kernel']
    channels, neurons = (x['blocks_11']['experts'] for x in (record.channels, record.neurons))
    fc2 = teacher.params['blocks_11/mlp/fc2/kernel']
    assert kernel.shape == (4, 24, 12)
    for i in range(4):
        np.testing.assert_array_equal(kernel[i], fc2[np.ix_(neurons[i], channels[i])])


def test_a_same_size_checkpoint_gives_all_that_is_no_expert(teacher, statistics):
    successor = student(width=24, num_heads=2, pool='avg')
    params, record = recycle(successor, teacher, teacher, statistics=statistics)
    for path in ('blocks_11/attn/qkv/kernel', 'pos_embed', 'blocks_3/mlp/fc2/kernel'):
        np.testing.assert_array_equal(params[path], teacher.params[path])
    np.testing.assert_array_equal(params['fc_norm/scale'], teacher.params['norm/scale'])
    # All channels and neurons there are: every core expert is the dense MLP.
    kernel = params['blocks_10/moe/core_experts/mlp/fc1/kernel']
    np.testing.assert_array_equal(kernel[1], teacher.params['blocks_10/mlp/fc1/kernel'])


def test_a_model_with_moe_layers_is_no_donor(teacher, statistics):
    moe = Checkpoint(student(), {}, LoadReport('moe file'))
    with pytest.raises(UserError, match='moe file has MoE layers itself'):
        recycle(student(), teacher, moe, statistics=statistics)


def test_importance_picks_the_non_expert_channels_of_largest_norm(teacher, statistics):
    params, _ = recycle(
        student(), teacher, strategy='uniform', non_experts='importance', statistics=statistics
    )
    norm = sum(statistics.of(f'blocks_{i}', 'mlp_input') for i in range(12))
    top = np.sort(np.argsort(-norm)[:12])
    np.testing.assert_array_equal(params['cls_token'], teacher.params['cls_token'][..., top])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(strategy='drop_upcylcing'), "strategy .*; the nearest known one is 'drop_upcycling'"),
        (dict(non_experts='unifrom'), "non_experts .* the nearest known one is 'uniform'"),
        (dict(), "'importance' needs statistics"),
        (
            dict(strategy='uniform', successor=student(width=48)),
            'successor has .*choose a checkpoint of the same patch',
        ),
        (
            dict(strategy='uniform', successor=student(depth=13, moe_blocks=(12,))),
            'teacher has nothing for blocks_12/.* .it has 12 blocks',
        ),
    ],
)
def test_what_does_not_fit_is_refused(teacher, arguments, message):
    arguments = dict(arguments)
    with pytest.raises(UserError, match=message):
        recycle(arguments.pop('successor', student()), teacher, **arguments)
