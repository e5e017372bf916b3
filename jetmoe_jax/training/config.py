"""What a config may hold: every key with its default; a wrong key's error names the nearest."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jetmoe_jax.errors import UserError, known_key
from jetmoe_jax.recycling.recipe import Recipe

INITS = ('recycled', 'random', 'dense')

# A run is the same run as long as everything but these stays the same.
OPERATIONAL = (
    'log_every_steps',
    'eval_every_epochs',
    'checkpoint_every_epochs',
    'keep_checkpoints',
    'data.workers',
    'mesh.expert',
    'compare_random',
)

# Key -> (least, greatest) that makes sense; None: no bound. NaN and infinity never do.
_RANGES = {
    'seed': (0, 2**31 - 1),
    'batch_size': (1, None),
    'epochs': (1e-9, None),
    'log_every_steps': (1, None),
    'eval_every_epochs': (1e-9, None),
    'checkpoint_every_epochs': (1e-9, None),
    'keep_checkpoints': (1, None),
    'label_smoothing': (0, 1),
    'mixup': (0, None),
    'cutmix': (0, None),
    'random_erasing': (0, 1),
    'ema_decay': (0, 1 - 1e-9),
    'optimizer.lr': (0, None),
    'optimizer.eps': (0, None),
    'optimizer.weight_decay': (0, None),
    'optimizer.clip_norm': (1e-9, None),
    'optimizer.layer_decay': (1e-9, 1),
    'optimizer.warmup_epochs': (0, None),
    'optimizer.warmup_start': (0, 1),
    'optimizer.final': (0, 1),
    'data.crop_fraction': (1e-9, 1),
    'data.workers': (0, None),
    'recycle.ratio': (0, 1),
    'recycle.calibration_images': (1, None),
    'mesh.expert': (1, None),
}


def default_config() -> ConfigDict:
    """The published recipe's optimiser and regularisation (MoE Jetpack, ImageNet-1k)."""
    c = ConfigDict()
    c.seed = 0

    c.model = 'vjetmoe_t'  # a name of the registry
    c.model_overrides = ConfigDict()  # attributes of the model, e.g. image_size
    c.init = 'recycled'  # or 'random', or 'dense': the dense checkpoint itself
    c.dense = ''  # the predecessor: a .safetensors file in timm's names
    c.dense_same = ''  # a dense checkpoint of the successor's own width, optional
    c.compare_random = False  # afterwards train the same from random weights, and compare

    c.recycle = ConfigDict()
    c.recycle.strategy = 'importance'  # of the experts; docs/recycling.md has them all
    c.recycle.metric = 'L2'  # or 'L1', 'active'
    c.recycle.communities = 'louvain'  # of the strategy 'graph'; or 'metis'
    c.recycle.ratio = 0.5  # of 'drop_upcycling'
    c.recycle.branches = ()  # of 'branch_train_mix': further dense checkpoints
    c.recycle.non_experts = 'weight_selection'  # when there is no dense_same
    c.recycle.calibration_images = 1024
    c.recycle.statistics = ''  # a saved .npz, instead of calibration

    c.data = ConfigDict()
    c.data.name = ''  # a folder with train/CLASS/* and val/CLASS/*, or a built-in set
    c.data.augment = 'randaugment'
    c.data.crop_fraction = 0.875  # evaluation: of the resized image's short side
    c.data.skip_unreadable = False
    c.data.workers = 0  # worker processes; 0 reads in threads

    c.batch_size = 4096
    c.epochs = 300.0
    c.label_smoothing = 0.1
    c.mixup = 0.8
    c.cutmix = 1.0
    c.random_erasing = 0.25
    c.ema_decay = 0.0  # of a moving average of the weights, which then is what is evaluated
    c.dtype = 'float32'  # of the computation; parameters stay float32

    c.optimizer = ConfigDict()  # AdamW
    c.optimizer.lr = 4e-3
    c.optimizer.betas = (0.9, 0.999)
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.05
    c.optimizer.clip_norm = 5.0
    c.optimizer.layer_decay = 0.6
    c.optimizer.warmup_epochs = 20.0
    c.optimizer.warmup_start = 1e-3  # of the peak
    c.optimizer.final = 1e-2  # of the peak

    c.mesh = ConfigDict()
    c.mesh.expert = 1  # devices that the experts are split over; the others split the data
    c.log_every_steps = 50
    c.eval_every_epochs = 1.0
    c.checkpoint_every_epochs = 1.0
    c.keep_checkpoints = 3  # the last ones; the best is kept besides
    return c


def parse_arg(arg: str | None, **defaults: Any) -> ConfigDict:
    """A config's argument string, 'key=value,key=value', as a ConfigDict.

    Args:
      arg: what stands behind the colon in `--config=configs/x.py:key=value`.
      **defaults: every key that is known; a value takes the type of its default.

    Raises:
      UserError: a key is unknown (the nearest is named) or a value is not of its type.
    """
    values = dict(defaults)
    for item in filter(None, (arg or '').split(',')):
        key, equals, text = item.partition('=')
        known_key('config argument', key, defaults)
        if not equals:
            raise UserError(f'config argument {key!r} has no value; write {key}=VALUE.')
        values[key] = _convert(key, text, defaults[key])
    return ConfigDict(values)


def parse_experts(text: str) -> dict[str, int]:
    """'98+196' -> 98 core and 196 universal experts, as arguments of SpheroMoE."""
    core, plus, universal = text.partition('+')
    if not (plus and core.isdecimal() and universal.isdecimal()):
        raise UserError(f'experts={text}: write CORE+UNIVERSAL, for example 98+196.')
    return {'core_experts': int(core), 'universal_experts': int(universal)}


def override_recycling(config: ConfigDict, given: Mapping[str, Any]) -> ConfigDict:
    """A config to recycle by, with single values of another: those of the command's flags.

    Args:
      given: values by short names, those that are None left out: model, dense, dense_same, data,
        image_size, num_classes, seed, layer, experts ('98+196', or one number for the layers with
        one kind of experts), and every key of `config.recycle`.

    Raises:
      UserError: `experts` is not what the layer takes, or a value makes no sense.
    """
    c = ConfigDict(config.to_dict())
    given = {name: value for name, value in given.items() if value is not None}
    moe = dict(c.model_overrides.get('moe') or {})
    before = moe.get('layer', 'spheromoe')
    layer = given.pop('layer', before)
    if layer != before:  # it has other arguments
        moe = {} if layer == 'spheromoe' else {'layer': layer}
    if experts := given.pop('experts', None):
        moe |= parse_experts(experts) if layer == 'spheromoe' else {'num_experts': _count(experts)}
    for name, value in given.items():
        node = c
        if name in c.recycle:
            node = c.recycle
        elif name in ('image_size', 'num_classes'):
            node = c.model_overrides
        elif name == 'data':
            node, name = c.data, 'name'
        node[name] = tuple(value) if isinstance(value, list) else value
    c.model_overrides.moe = moe
    c.init, c.compare_random = 'recycled', False
    if not c.dense:
        raise UserError(
            "there is no dense checkpoint to recycle; give the predecessor's by --dense."
        )
    check_config(c, needs_data=False)
    return c


def check_config(config: ConfigDict, needs_data: bool = True, needs_dense: bool = True) -> None:
    """Refuses keys that do not exist and values that make no sense.

    Args:
      needs_data: whether images must be named.
      needs_dense: whether a dense checkpoint must be, where there is one to start from.

    Raises:
      UserError: naming the key, its value and what would do.
    """
    _check_keys(config, default_config(), '')
    if config.init not in INITS:
        raise UserError(f'config.init is {config.init!r}; use one of {", ".join(INITS)}.')
    if needs_dense and config.init != 'random' and not config.dense:
        raise UserError(
            f"config.init is {config.init!r} and config.dense is empty; give a dense checkpoint's "
            'path, or init=random.'
        )
    if needs_data and not config.data.name:
        raise UserError('config.data.name is empty; give a folder of train/CLASS/*, val/CLASS/*.')
    if config.dtype not in ('float32', 'bfloat16'):
        raise UserError(f'config.dtype is {config.dtype!r}; use float32 or bfloat16.')
    for key, (least, greatest) in _RANGES.items():
        value = functools.reduce(lambda node, name: node[name], key.split('.'), config)
        if not (math.isfinite(value) and least <= value <= (greatest or math.inf)):
            above = f'up to {greatest:g}' if greatest else 'and finite'
            raise UserError(f'config.{key} is {value}; give a number from {least:g} {above}.')
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f'config.optimizer.betas is {betas}; give two numbers from 0 to below 1.')
    recipe_of(config)
    if config.compare_random and config.init == 'random':
        raise UserError('config.compare_random compares with random weights; choose another init.')


def recipe_of(config: ConfigDict) -> Recipe:
    """How a config says to recycle.

    Raises:
      UserError: a strategy, metric or method is unknown; the nearest known one is named.
    """
    names = ('strategy', 'metric', 'non_experts', 'ratio', 'communities')
    return Recipe(**{name: config.recycle[name] for name in names}, seed=config.seed)


def _count(experts: str) -> int:
    if not experts.isdecimal():
        raise UserError(f'experts={experts}: this layer has one kind; write one whole number.')
    return int(experts)


def _check_keys(config: ConfigDict, known: ConfigDict, prefix: str) -> None:
    for key, value in config.items():
        known_key('config key', prefix + key, [prefix + k for k in known])
        if isinstance(known[key], ConfigDict) and key != 'model_overrides':
            _check_keys(value, known[key], f'{prefix}{key}.')


def _convert(key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ('true', 'false'):
            raise UserError(f'config argument {key}={text} is neither true nor false.')
        return text.lower() == 'true'
    try:
        return type(default)(text)
    except ValueError as error:
        kind = {int: 'whole number', float: 'number'}[type(default)]
        raise UserError(f'config argument {key}={text} is not a {kind}.') from error
