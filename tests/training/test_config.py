"""Configs: wrong keys and values are named, and every recipe builds."""

import importlib.util
from pathlib import Path

import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.registry import create_model
from jetmoe_jax.moe.spheromoe import SpheroMoE
from jetmoe_jax.training.config import check_config, default_config, parse_arg

CONFIGS = Path(__file__).parents[2] / 'configs'


def get_config(name, arg=None):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


@pytest.mark.parametrize('path', sorted(CONFIGS.glob('*.py')), ids=lambda path: path.stem)
def test_every_recipe_has_known_keys_only(path):
    config = get_config(path.stem)
    config.data.name = config.data.name or 'digits'
    config.dense = config.dense or 'some.safetensors'
    check_config(config)


@pytest.mark.parametrize('name', ['vjetmoe_t', 'vjetmoe_s', 'cjetmoe_f'])
@pytest.mark.parametrize(
    'ablation, expected',
    [
        ('no_query_l2norm', dict(query_l2norm=(True, False))),
        ('no_query_norm', dict(query_norm=(True, False))),
        ('shared_temperature', dict(shared_temperature=(False, True))),
        ('fixed_temperature', dict(learn_temperature=(True, False))),
        ('no_noise', dict(noise=(True, False))),
        ('no_expert_dropout', dict(expert_dropout=(0.1, 0.0))),
        (
            'single_path',
            dict(core_experts=(98, 294), universal_experts=(196, 0), hidden_factor=(1.0, 0.5)),
        ),
    ],
)
def test_an_ablation_changes_one_respect_of_the_layer_alone(name, ablation, expected):
    models = []
    for arg in ('', f'ablation={ablation}'):
        config = get_config(name, f'{arg},data=digits,init=random')
        check_config(config)
        models.append(create_model(config.model, **config.model_overrides.to_dict()))
    for path in models[0].moe_paths:
        base, ablated = (
            {field: getattr(model.moe_layer(path), field) for field in SpheroMoE.__annotations__}
            for model in models
        )
        changed = {field for field in base if base[field] != ablated[field]}
        assert changed == set(expected)
        if path.startswith('stages_3'):  # of C-JetMoE: a quarter of the tokens and the experts
            quarter = dict(core_experts=(24, 72), universal_experts=(48, 0))
            expected = expected | {k: v for k, v in quarter.items() if k in expected}
        if ablation == 'no_expert_dropout':
            assert ablated['expert_dropout'] == 0
        else:
            assert {field: (base[field], ablated[field]) for field in changed} == expected


def test_vjetmoe_t_holds_the_published_recipe():
    c = get_config('vjetmoe_t')
    assert (c.batch_size, c.epochs, c.optimizer.warmup_epochs) == (4096, 300, 20)
    assert (c.optimizer.lr, c.optimizer.weight_decay, c.optimizer.clip_norm) == (4e-3, 0.05, 5)
    assert (c.optimizer.layer_decay, c.optimizer.betas) == (0.6, (0.9, 0.999))
    assert (c.optimizer.warmup_start, c.optimizer.final) == (1e-3, 1e-2)
    assert (c.mixup, c.cutmix, c.random_erasing, c.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
    assert c.data.augment == 'randaugment'


def test_config_arguments_take_the_type_of_their_default():
    c = parse_arg('lr=1,name=a=b,flag=true,n=3', lr=0.5, name='', flag=False, n=1, other=2)
    assert c.to_dict() == dict(lr=1.0, name='a=b', flag=True, n=3, other=2)
    assert isinstance(c.lr, float)


@pytest.mark.parametrize(
    'arg, message',
    [
        ('bacth=3', "config argument 'bacth' does not exist; the nearest known one is 'batch'"),
        ('batch', "config argument 'batch' has no value; write batch=VALUE."),
        ('batch=many', 'config argument batch=many is not a whole number.'),
        ('flag=yes', 'config argument flag=yes is neither true nor false.'),
    ],
)
def test_wrong_config_arguments_are_named(arg, message):
    with pytest.raises(UserError) as error:
        parse_arg(arg, batch=1, flag=False)
    assert message in str(error.value)


def with_change(key, value):
    config = default_config()
    config.data.name, config.dense = 'digits', 'x.safetensors'
    *parents, last = key.split('.')
    node = config
    for parent in parents:
        node = node[parent]
    node[last] = value
    return config


@pytest.mark.parametrize(
    'key, value, message',
    [
        ('optimizer.learning_rate', 1.0, "'optimizer.learning_rate' does not exist; the nearest"),
        ('optimzer', 1.0, "the nearest known one is 'optimizer'"),
        ('init', 'scratch', "config.init is 'scratch'; use one of recycled, random, dense."),
        ('dense', '', "give a dense checkpoint's path, or init=random"),
        ('data.name', '', 'config.data.name is empty'),
        ('dtype', 'float16', "config.dtype is 'float16'; use float32 or bfloat16."),
        ('batch_size', 0, 'config.batch_size is 0; give a number from 1 and finite.'),
        ('epochs', -1.0, 'config.epochs is -1.0; give a number from'),
        ('optimizer.lr', float('nan'), 'config.optimizer.lr is nan'),
        ('label_smoothing', 7.0, 'config.label_smoothing is 7.0; give a number from 0 up to 1.'),
        ('optimizer.betas', (0.9, 3.0), 'config.optimizer.betas is (0.9, 3.0)'),
        ('recycle.strategy', 'importence', "the nearest known one is 'importance'"),
        ('recycle.metric', 'l2', "metric 'l2' does not exist; the nearest known one is 'L2'"),
        ('recycle.communities', 'luvain', "the nearest known one is 'louvain'"),
        ('recycle.non_experts', 'top', "non_experts strategy 'top' does not exist"),
        ('recycle.ratio', 1.5, 'config.recycle.ratio is 1.5; give a number from 0 up to 1.'),
        ('recycle.calibration_images', 0, 'config.recycle.calibration_images is 0'),
    ],
)
def test_wrong_keys_and_values_are_named(key, value, message):
    with pytest.raises(UserError) as error:
        check_config(with_change(key, value))
    assert message in str(error.value)
