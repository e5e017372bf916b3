"""Recycling: dense checkpoints -> the parameters of a MoE model, and the record of their origin.

`recycle` is a pure function of (checkpoints, statistics, seed), on flat parameters in NumPy.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, init_params, param_shapes
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling.selection import (
    generator,
    sampled_indices,
    top_k_indices,
    uniform_indices,
    weight_selection_indices,
)
from jetmoe_jax.recycling.statistics import Statistics

EXPERT_STRATEGIES = ('uniform', 'importance')
DENSE_STRATEGIES = ('weight_selection', 'uniform', 'importance')
CHANNELS, NEURONS, ATTENTION = 0, 1, 2  # streams of random numbers within a block


@dataclass
class Record:
    """Where the successor's values came from.

    `channels[block][path]` and `neurons[block][path]` are (experts, units): the predecessor's
    indices behind every expert of a path ('core_experts' or 'universal_experts'). `origin` tells it
    in words for every other parameter.
    """

    origin: dict[str, str] = field(default_factory=dict)
    channels: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    neurons: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        """Writes `record.json` (origins) and `record.npz` (`channels/6/core_experts`, ...)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        units = {'channels': self.channels, 'neurons': self.neurons}
        np.savez_compressed(
            folder / 'record.npz',
            **{
                f'{unit}/{block}/{path}': index.astype(np.int32)
                for unit, of_block in units.items()
                for block, of_path in of_block.items()
                for path, index in of_path.items()
            },
        )
        (folder / 'record.json').write_text(json.dumps(self.origin, indent=1) + '\n')


def recycle(
    successor: ViT,
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
      successor: a ViT with SpheroMoE blocks.
      predecessor: the dense model that the experts are taken from.
      same_size: a dense model of the successor's width; gives all that is not an expert. Without
        it the predecessor does, by the strategy `non_experts`.
      strategy: 'importance' samples an expert's channels and neurons with probability proportional
        to their mean L2 norm; 'uniform' takes evenly spaced ones, the same for every expert.
      statistics: of the predecessor; needed where a strategy is 'importance'.
      seed: of the draws and of what is made fresh (router and head).

    Returns:
      flat parameters (float32, NumPy) and the record of their origin.

    Raises:
      UserError: a strategy is unknown, statistics are missing, or a model does not fit the other.
    """
    _check_choice('strategy', strategy, EXPERT_STRATEGIES)
    _check_choice('non_experts', non_experts, DENSE_STRATEGIES)
    sampled = strategy == 'importance' or (same_size is None and non_experts == 'importance')
    if sampled and statistics is None:
        raise UserError("strategy 'importance' needs statistics of the predecessor; collect them.")

    record = Record()
    shapes = param_shapes(successor)
    donor, take = (same_size, _whole) if same_size else (predecessor, None)
    if take is None and non_experts == 'weight_selection':
        take = select_by_dimension
    elif take is None:
        sets = dense_sets(successor, predecessor.model, non_experts, statistics, seed)

        def take(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
            return select_by_sets(path, value, sets)

    params, fresh = {}, []
    for path, leaf in shapes.items():
        if '/moe/' in path and '_experts/' in path:
            continue
        if '/moe/' in path or path.startswith('head/'):
            fresh.append(path)
            continue
        source = _donor_path(path, donor)
        params[path] = _fit(path, take(source, donor.params[source], leaf.shape), leaf.shape)
        record.origin[path] = f'{donor.report.source}: {source}'
    for block in successor.moe_blocks:
        params |= _recycle_experts(
            successor, predecessor, block, strategy, statistics, seed, record
        )
    params |= init_params(successor, seed, fresh)
    record.origin |= dict.fromkeys(fresh, 'fresh')
    return {path: params[path] for path in shapes}, record


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


def inherit(successor: ViT, donor: ViT, given: Collection[str] = ()) -> ViT:
    """The successor with the variant of its donor: patch size, registers, layer scale and so on.

    Args:
      given: attributes that were asked for and stay.
    """
    names = _INHERITED + (('num_heads',) if donor.width == successor.width else ())
    return successor.clone(**{name: getattr(donor, name) for name in names if name not in given})


@dataclass(frozen=True)
class DenseSets:
    """Index sets that reduce a dense model: channels of the network, the others by block."""

    channels: np.ndarray
    attention: Mapping[int, np.ndarray]
    neurons: Mapping[int, np.ndarray]


def dense_sets(
    successor: ViT,
    predecessor: ViT,
    strategy: str,
    statistics: Statistics | None = None,
    seed: int = 0,
) -> DenseSets:
    """Index sets for the non-expert weights by 'uniform' or 'importance'.

    'importance' takes as channels the top-k of the L2 norms' sum over blocks, one set for the whole
    network, and samples attention channels and neurons block by block.
    """
    d, h = successor.width, successor.mlp_hidden
    blocks = range(successor.depth)
    if strategy == 'uniform':
        channels = uniform_indices(predecessor.width, d)
        neurons = uniform_indices(predecessor.mlp_hidden, h)
        return DenseSets(channels, dict.fromkeys(blocks, channels), dict.fromkeys(blocks, neurons))

    def sample(position: str, block: int, k: int, stream: int) -> np.ndarray:
        rng = generator(seed, predecessor.depth + block, stream)
        return sampled_indices(statistics.of(position, block), k, 1, rng)[0]

    return DenseSets(
        top_k_indices(statistics.values['mlp_input']['L2'].sum(axis=0), d),
        {i: sample('attn_proj_input', i, d, ATTENTION) for i in blocks},
        {i: sample('mlp_act', i, h, NEURONS) for i in blocks},
    )


def select_by_dimension(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Weight selection (Xu et al., ICLR 2024): every dimension reduced on its own."""
    del path
    index = [weight_selection_indices(size, k) for size, k in zip(value.shape, shape, strict=True)]
    return value[np.ix_(*index)]


def select_by_sets(path: str, value: np.ndarray, sets: DenseSets) -> np.ndarray:
    """One dense parameter reduced to index sets; qkv takes the attention set three times."""
    block, _, module = path.partition('/')
    if not block.startswith('blocks_') or module.split('/')[0] in ('norm1', 'norm2', 'ls1', 'ls2'):
        return value[..., sets.channels]
    i = int(block.removeprefix('blocks_'))
    channels, attention, neurons = sets.channels, sets.attention[i], sets.neurons[i]
    d = value.shape[-1] // 3
    qkv = np.concatenate([attention, attention + d, attention + 2 * d])
    in_and_out = {
        'attn/qkv': (channels, qkv),
        'attn/proj': (attention, channels),
        'mlp/fc1': (channels, neurons),
        'mlp/fc2': (neurons, channels),
    }
    layer, _, leaf = module.rpartition('/')
    if (
        layer not in in_and_out
    ):  # q_norm and k_norm are as wide as a head, whatever the model's width
        return value
    into, out = in_and_out[layer]
    return value[np.ix_(into, out)] if leaf == 'kernel' else value[out]


def select_experts(
    params: Mapping[str, np.ndarray], block: int, channels: np.ndarray, neurons: np.ndarray
) -> dict[str, np.ndarray]:
    """The experts that channel sets (e d) and neuron sets (e h) cut out of a dense block's MLP.

    Returns:
      'fc1/kernel' (e d h), 'fc1/bias' (e h), 'fc2/kernel' (e h d), 'fc2/bias' (e d).
    """
    mlp = {leaf: params[f'blocks_{block}/mlp/{leaf}'] for leaf in _MLP_LEAVES}
    return {
        'fc1/kernel': mlp['fc1/kernel'][channels[:, :, None], neurons[:, None, :]],
        'fc1/bias': mlp['fc1/bias'][neurons],
        'fc2/kernel': mlp['fc2/kernel'][neurons[:, :, None], channels[:, None, :]],
        'fc2/bias': mlp['fc2/bias'][channels],
    }


_MLP_LEAVES = ('fc1/kernel', 'fc1/bias', 'fc2/kernel', 'fc2/bias')


def _recycle_experts(
    successor: ViT,
    predecessor: Checkpoint,
    block: int,
    strategy: str,
    statistics: Statistics | None,
    seed: int,
    record: Record,
) -> FlatParams:
    """The experts of one block; a universal expert is a core one reduced to some of its neurons."""
    if block >= predecessor.model.depth:
        raise UserError(
            f'{predecessor.report.source} has {predecessor.model.depth} blocks, none for MoE block '
            f'{block}; choose moe_blocks among those.'
        )
    d, h = successor.width, successor.mlp_hidden
    paths = successor.moe_layer().path_widths(d)
    count = sum(e for e, _ in paths.values())

    def draw(position: str, size: int, k: int, stream: int) -> np.ndarray:
        if strategy == 'uniform':
            return np.tile(uniform_indices(size, k), (count, 1))
        rng = generator(seed, block, stream)
        return sampled_indices(statistics.of(position, block), k, count, rng)

    channels = draw('mlp_input', predecessor.model.width, d, CHANNELS)
    neurons = draw('mlp_act', predecessor.model.mlp_hidden, h, NEURONS)
    params, first = {}, 0
    record.channels[block], record.neurons[block] = {}, {}
    for path, (e, width) in paths.items():
        c_i = channels[first : first + e]
        m_i = neurons[first : first + e][:, uniform_indices(h, width)]
        for leaf, value in select_experts(predecessor.params, block, c_i, m_i).items():
            params[f'blocks_{block}/moe/{path}/mlp/{leaf}'] = value
        record.channels[block][path], record.neurons[block][path] = c_i, m_i
        first += e
    return params


def _donor_path(path: str, donor: Checkpoint) -> str:
    """The donor's parameter for a successor's: of its own name, or the other pooling's norm."""
    for candidate in (path, path.replace('fc_norm/', 'norm/'), 'fc_' + path):
        if candidate in donor.params:
            return candidate
    raise UserError(
        f'{donor.report.source} has nothing for {path} (its depth is {donor.model.depth}); '
        'choose a successor that is not deeper and of the same variant.'
    )


def _whole(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    del path, shape
    return value


def _fit(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if value.shape != shape:
        raise UserError(
            f'{path}: the checkpoint gives {value.shape}, the successor has {shape}; choose a '
            'checkpoint of the same width, patch and image size, or leave the same-size one out.'
        )
    return np.ascontiguousarray(value)


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f'{name} is {value!r}; use one of {", ".join(known)}.')
