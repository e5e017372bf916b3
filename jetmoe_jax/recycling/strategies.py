"""Recycling: dense checkpoints -> the parameters of a MoE model, and the record of their origin.

`recycle` is a pure function of (checkpoints, statistics, seed), on flat parameters in NumPy.
"""

import operator
from collections.abc import Collection, Mapping

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, init_params, param_shapes
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling import dense
from jetmoe_jax.recycling.record import Record
from jetmoe_jax.recycling.selection import generator, sampled_indices, uniform_indices
from jetmoe_jax.recycling.statistics import Statistics

STRATEGIES = ('uniform', 'importance')
CHANNELS, NEURONS = 0, 1  # streams of random numbers within a block

_MLP_LEAVES = ('fc1/kernel', 'fc1/bias', 'fc2/kernel', 'fc2/bias')

# What a successor takes over from the checkpoint that gives its non-expert weights.
_INHERITED = (
    'image_size',
    'patch_size',
    'mlp_ratio',
    'class_token',
    'reg_tokens',
    'no_embed_class',
    'layer_scale',
    'qk_norm',
    'pre_norm',
)


def recycle(
    successor: Model,
    predecessor: Checkpoint,
    same_size: Checkpoint | None = None,
    *,
    strategy: str = 'importance',
    non_experts: str = 'weight_selection',
    statistics: Statistics | None = None,
    seed: int = 0,
) -> tuple[FlatParams, Record]:
    """Builds the successor's parameters out of dense checkpoints, with no training.

    Args:
      successor: a ViT or ConvNeXt with SpheroMoE blocks.
      predecessor: the dense model that the experts are taken from, block by block of the same path.
      same_size: a dense model of the successor's width; gives all that is not an expert. Without
        it the predecessor does, by the strategy `non_experts` (see dense.py).
      strategy: 'importance' samples an expert's channels and neurons with probability proportional
        to their mean L2 norm; 'uniform' takes evenly spaced ones, the same for every expert.
      statistics: of the predecessor; needed where a strategy is 'importance'.
      seed: of the draws and of what is made fresh (router and head).

    Returns:
      flat parameters (float32, NumPy) and the record of their origin.

    Raises:
      UserError: a strategy is unknown, statistics are missing, or a model does not fit the other.
    """
    check_donors(successor, predecessor, same_size, strategy, non_experts)
    sampled = strategy == 'importance' or (same_size is None and non_experts == 'importance')
    if sampled and statistics is None:
        raise UserError("strategy 'importance' needs statistics of the predecessor; collect them.")
    if sampled:
        statistics.check(predecessor.model)

    donor, select = same_size, dense.whole
    if donor is None:
        donor = predecessor
        select = dense.make_selector(successor, donor.model, non_experts, statistics, seed)
    record = Record()
    shapes = param_shapes(successor)
    params, fresh = {}, []
    for path, leaf in shapes.items():
        if '/moe/' in path and 'experts/' in path:
            continue
        if '/moe/' in path or path.startswith('head/'):
            fresh.append(path)
            continue
        source = dense.source_path(path, donor)
        params[path] = np.ascontiguousarray(select(source, donor.params[source], leaf.shape))
        record.origin[path] = f'{donor.report.source}: {source}'
    for block in successor.moe_paths:
        params |= _recycle_experts(
            successor, predecessor, block, strategy, statistics, seed, record
        )
    params |= init_params(successor, _fresh_seed(seed), fresh)
    record.origin |= dict.fromkeys(fresh, 'fresh')
    return {path: params[path] for path in shapes}, record


def check_donors(
    successor: Model,
    predecessor: Checkpoint,
    same_size: Checkpoint | None = None,
    strategy: str = 'importance',
    non_experts: str = 'weight_selection',
) -> None:
    """Refuses what `recycle` would refuse, by shapes alone and so before any long work."""
    _check_choice('strategy', strategy, STRATEGIES)
    _check_choice('non_experts', non_experts, dense.STRATEGIES)
    if not successor.moe_paths:
        raise UserError('the successor has no MoE block; give it moe_blocks.')
    for checkpoint in filter(None, (predecessor, same_size)):
        check_family(successor, checkpoint)

    donor = same_size or predecessor
    if same_size is None:
        dense.check_strategy(successor, non_experts)
    for path, leaf in param_shapes(successor).items():
        if '/moe/' in path or path.startswith('head/'):
            continue
        shape = donor.params[dense.source_path(path, donor)].shape
        fits = shape == leaf.shape if same_size else all(map(operator.ge, shape, leaf.shape))
        if not fits:
            raise UserError(
                f'{path}: {donor.report.source} gives {shape}, the successor has {leaf.shape}; '
                'choose a checkpoint of the same patch and image size, of the same width as '
                'dense_same and not narrower as the predecessor.'
            )
    for block in successor.moe_paths:
        if block not in predecessor.model.blocks:
            raise UserError(
                f'{predecessor.report.source} has no {block}, which is a MoE block of the '
                f'successor (it has {len(predecessor.model.blocks)} blocks); choose moe_blocks '
                'among those.'
            )
        ours, theirs = successor.blocks[block], predecessor.model.blocks[block]
        if ours[0] > theirs[0] or ours[1] > theirs[1]:
            raise UserError(
                f'{block} has {ours} channels and neurons in the successor, {theirs} in '
                f'{predecessor.report.source}; choose a predecessor that is not narrower.'
            )


def check_family(successor: Model, checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint of another family of models, or one with MoE layers itself."""
    source, model = checkpoint.report.source, checkpoint.model
    if type(model) is not type(successor):
        raise UserError(
            f'{source} is a {type(model).__name__}, the successor a {type(successor).__name__}; '
            'recycle within one family.'
        )
    if model.moe_paths:
        raise UserError(f'{source} has MoE layers itself; recycle from a dense checkpoint.')


def inherit(successor: Model, donor: Model, given: Collection[str] = ()) -> Model:
    """The successor with the variant of its donor: patch size, registers, layer scale and so on.

    Args:
      given: attributes that were asked for and stay.
    """
    names = [name for name in _INHERITED if hasattr(donor, name) and hasattr(successor, name)]
    if getattr(donor, 'width', 0) == getattr(successor, 'width', None):
        names.append('num_heads')
    return successor.clone(**{name: getattr(donor, name) for name in names if name not in given})


def select_experts(
    params: Mapping[str, np.ndarray], block: str, channels: np.ndarray, neurons: np.ndarray
) -> dict[str, np.ndarray]:
    """The experts that channel sets (e d) and neuron sets (e h) cut out of a dense block's MLP.

    Returns:
      'fc1/kernel' (e d h), 'fc1/bias' (e h), 'fc2/kernel' (e h d), 'fc2/bias' (e d).
    """
    mlp = {leaf: params[f'{block}/mlp/{leaf}'] for leaf in _MLP_LEAVES}
    return {
        'fc1/kernel': mlp['fc1/kernel'][channels[:, :, None], neurons[:, None, :]],
        'fc1/bias': mlp['fc1/bias'][neurons],
        'fc2/kernel': mlp['fc2/kernel'][neurons[:, :, None], channels[:, None, :]],
        'fc2/bias': mlp['fc2/bias'][channels],
    }


def _recycle_experts(
    successor: Model,
    predecessor: Checkpoint,
    block: str,
    strategy: str,
    statistics: Statistics | None,
    seed: int,
    record: Record,
) -> FlatParams:
    """The experts of one block; a universal expert is a core one reduced to some of its neurons."""
    (d, h), (donor_d, donor_h) = successor.blocks[block], predecessor.model.blocks[block]
    paths = successor.moe_layer(block).path_widths(d)
    count = sum(e for e, _ in paths.values())

    def draw(position: str, size: int, k: int, stream: int) -> np.ndarray:
        if strategy == 'uniform':
            return np.tile(uniform_indices(size, k), (count, 1))
        rng = generator(seed, list(successor.blocks).index(block), stream)
        return sampled_indices(statistics.of(block, position), k, count, rng)

    channels = draw('mlp_input', donor_d, d, CHANNELS)
    neurons = draw('mlp_act', donor_h, h, NEURONS)
    params, first = {}, 0
    record.channels[block], record.neurons[block] = {}, {}
    for path, (e, width) in paths.items():
        c_i = channels[first : first + e]
        m_i = neurons[first : first + e][:, uniform_indices(h, width)]
        for leaf, value in select_experts(predecessor.params, block, c_i, m_i).items():
            params[f'{block}/moe/{path}/mlp/{leaf}'] = value
        record.channels[block][path], record.neurons[block][path] = c_i, m_i
        first += e
    return params


def _fresh_seed(seed: int) -> int:
    """A seed for what is made fresh, other than `seed` itself.

    A dense model that was trained from the same seed would fit the head that it started with: the
    successor's head is not to be that one again.
    """
    return int(generator(seed).integers(2**31))


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f'{name} is {value!r}; use one of {", ".join(known)}.')
