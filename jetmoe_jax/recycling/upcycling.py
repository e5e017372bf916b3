"""Experts by upcycling: each is a copy of a dense MLP of the successor's width, or a part of it.

Sources: Komatsuzaki et al., Sparse Upcycling, ICLR 2023; Nakamura et al., Drop-Upcycling, ICLR
2025, with noise upcycling as a baseline; Sukhbaatar et al., Branch-Train-MiX, 2024.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.models.parameters import FlatParams
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling.experts import cut_experts
from jetmoe_jax.recycling.recipe import Recipe
from jetmoe_jax.recycling.record import Record
from jetmoe_jax.recycling.selection import generator, uniform_indices

CHANGES = 4  # stream of random numbers within a block
NOISE_STD, NOISE_SHARE = 0.02, 0.5


def upcycled_experts(
    successor: Model,
    donors: Sequence[Checkpoint],
    block: str,
    sets: tuple[np.ndarray, np.ndarray],
    recipe: Recipe,
    record: Record,
) -> FlatParams:
    """The experts of one block: expert i of a path out of donor i mod their number.

    Args:
      donors: dense models of one architecture; more than one for 'branch_train_mix'.
      sets: the donors' channels (d,) and neurons (h,) that make the dense MLP of the successor's
        width.
    """
    channels, neurons = sets
    number, count = list(successor.blocks).index(block), len(donors)
    sources = [donor.report.source for donor in donors]
    params = {}
    paths = successor.moe_layer(block).path_widths(len(channels))
    for i, (path, (e, width)) in enumerate(paths.items()):
        c_i = np.tile(channels, (e, 1))
        m_i = neurons[split_neurons(len(neurons), width, e, count)]
        experts = interleaved_experts(donors, block, c_i, m_i)
        record.add_experts(block, path, c_i, m_i, sources)
        rng = generator(recipe.seed, number, CHANGES, i)
        changed = None
        if recipe.strategy == 'drop_upcycling':
            changed = random_positions(e, width, int(recipe.ratio * width), rng)
            redraw(experts, changed, rng)
        elif recipe.strategy == 'noise_upcycling':
            changed = random_positions(e, width, int(NOISE_SHARE * width), rng)
            add_noise(experts, changed, rng)
        if changed is not None:
            record.changed.setdefault(block, {})[path] = np.take_along_axis(m_i, changed, axis=1)
        params |= {f'{block}/moe/{path}/mlp/{leaf}': value for leaf, value in experts.items()}
    return params


def shared_expert(
    donors: Sequence[Checkpoint],
    block: str,
    sets: tuple[np.ndarray, np.ndarray],
    width: int,
    record: Record,
) -> FlatParams:
    """A sparse layer's shared expert: the dense MLP, evenly spaced neurons of it if narrower.

    Args:
      donors, sets: as of `upcycled_experts`; of several donors, the mean.
    """
    channels, neurons = sets
    one = channels[None], neurons[None, uniform_indices(len(neurons), width)]
    cuts = [cut_experts(donor.params, block, *one) for donor in donors]
    record.add_experts(block, 'shared_expert', *one, [donor.report.source for donor in donors])
    return {
        f'{block}/moe/shared_expert/{leaf}': mean([cut[leaf][0] for cut in cuts])
        for leaf in cuts[0]
    }


def mean(values: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of arrays, summed in float64; a copy in rows of a single one."""
    value = values[0] if len(values) == 1 else np.mean(values, axis=0, dtype=np.float64)
    return np.ascontiguousarray(value, np.float32)


def split_neurons(h: int, width: int, e: int, donors: int = 1) -> np.ndarray:
    """Which of h neurons each of e experts takes: (e, width), sorted.

    Experts of one donor take consecutive parts, from the start again after the last neuron: h/width
    of them hold the whole MLP. Experts as wide as the MLP all take the whole.
    """
    part = np.arange(e)[:, None] // donors
    return np.sort((part * width + np.arange(width)) % h, axis=1)


def interleaved_experts(
    donors: Sequence[Checkpoint], block: str, channels: np.ndarray, neurons: np.ndarray
) -> dict[str, np.ndarray]:
    """`cut_experts`, with expert i out of donor i mod their number."""
    if len(donors) == 1:
        return cut_experts(donors[0].params, block, channels, neurons)
    experts = {}
    for i, donor in enumerate(donors):
        turn = slice(i, None, len(donors))
        for leaf, value in cut_experts(donor.params, block, channels[turn], neurons[turn]).items():
            experts.setdefault(leaf, np.empty((len(channels), *value.shape[1:]), value.dtype))
            experts[leaf][turn] = value
    return experts


def random_positions(e: int, width: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """The first k of a permutation of an expert's neurons, for each expert: (e, k), sorted."""
    order = rng.permuted(np.tile(np.arange(width), (e, 1)), axis=1)
    return np.sort(order[:, :k], axis=1)


def redraw(
    experts: Mapping[str, np.ndarray], positions: np.ndarray, rng: np.random.Generator
) -> None:
    """Draws neurons again, in place, from N(mean, std) of the values they had.

    Mean and standard deviation are those of the replaced values, of each expert and matrix by
    itself; the neurons are the same in all matrices. fc2's bias belongs to no neuron and stays.

    Args:
      experts: as of `cut_experts`.
      positions: neurons of each expert, (e, k).
    """
    for value in _by_neuron(experts):
        for i, chosen in enumerate(positions):
            if len(chosen):
                old = value[i, chosen]
                new = rng.standard_normal(old.shape, np.float32)
                value[i, chosen] = new * old.std() + old.mean()


def add_noise(
    experts: Mapping[str, np.ndarray], positions: np.ndarray, rng: np.random.Generator
) -> None:
    """Adds N(0, 0.02^2) to all weights of the neurons at `positions` (e, k), in place."""
    for value in _by_neuron(experts):
        for i, chosen in enumerate(positions):
            shape = (len(chosen), *value.shape[2:])
            value[i, chosen] += np.float32(NOISE_STD) * rng.standard_normal(shape, np.float32)


def _by_neuron(experts: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Views (e h ...) of all that belongs to neurons."""
    return experts['fc1/kernel'].swapaxes(1, 2), experts['fc1/bias'], experts['fc2/kernel']
