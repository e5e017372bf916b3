"""Experts by selection: each takes channels and neurons of a predecessor's MLP."""

from collections.abc import Mapping

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.models.parameters import FlatParams
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling.graph import communities, community_indices
from jetmoe_jax.recycling.recipe import Recipe
from jetmoe_jax.recycling.record import Record
from jetmoe_jax.recycling.selection import (
    generator,
    random_indices,
    sampled_indices,
    uniform_indices,
)
from jetmoe_jax.recycling.statistics import CO_ACTIVATION, Statistics

CHANNELS, NEURONS = 0, 1  # streams of random numbers within a block
COMMUNITIES = 5

MLP_LEAVES = ('fc1/kernel', 'fc1/bias', 'fc2/kernel', 'fc2/bias')


def cut_experts(
    params: Mapping[str, np.ndarray], block: str, channels: np.ndarray, neurons: np.ndarray
) -> dict[str, np.ndarray]:
    """The experts that channel sets (e d) and neuron sets (e h) cut out of a dense block's MLP.

    Returns:
      'fc1/kernel' (e d h), 'fc1/bias' (e h), 'fc2/kernel' (e h d), 'fc2/bias' (e d).
    """
    mlp = {leaf: params[f'{block}/mlp/{leaf}'] for leaf in MLP_LEAVES}
    return {
        'fc1/kernel': mlp['fc1/kernel'][channels[:, :, None], neurons[:, None, :]],
        'fc1/bias': mlp['fc1/bias'][neurons],
        'fc2/kernel': mlp['fc2/kernel'][neurons[:, :, None], channels[:, None, :]],
        'fc2/bias': mlp['fc2/bias'][channels],
    }


def selected_experts(
    successor: Model,
    predecessor: Checkpoint,
    block: str,
    statistics: Statistics | None,
    recipe: Recipe,
    record: Record,
) -> FlatParams:
    """The experts of one block.

    Every expert draws as many neurons as the widest path's have; a universal one then keeps evenly
    spaced ones of its own.
    """
    d, _ = successor.blocks[block]
    paths = successor.moe_layer(block).path_widths(d)
    widest = max(width for _, width in paths.values())
    count = sum(e for e, _ in paths.values())
    number = list(successor.blocks).index(block)
    donor_d, donor_h = predecessor.model.blocks[block]

    def draw(position: str, size: int, k: int, stream: int) -> np.ndarray:
        if recipe.strategy == 'uniform':
            return np.tile(uniform_indices(size, k), (count, 1))
        rng = generator(recipe.seed, number, stream)
        if recipe.strategy == 'random':
            return random_indices(size, k, count, rng)
        if recipe.strategy == 'importance':
            return sampled_indices(statistics.of(block, position, recipe.metric), k, count, rng)
        together = statistics.of(block, position, CO_ACTIVATION)
        seed = int(generator(recipe.seed, number, COMMUNITIES, stream).integers(2**31))
        labels = communities(together, recipe.communities, seed)
        record.communities.setdefault(block, {})[position] = labels
        return community_indices(together, labels, k, count, rng)

    channels = draw('mlp_input', donor_d, d, CHANNELS)
    neurons = draw('mlp_act', donor_h, widest, NEURONS)
    params, first = {}, 0
    for path, (e, width) in paths.items():
        c_i = channels[first : first + e]
        m_i = neurons[first : first + e][:, uniform_indices(widest, width)]
        experts = cut_experts(predecessor.params, block, c_i, m_i)
        params |= {f'{block}/moe/{path}/mlp/{leaf}': value for leaf, value in experts.items()}
        record.add_experts(block, path, c_i, m_i, [predecessor.report.source])
        first += e
    return params
