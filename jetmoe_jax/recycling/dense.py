"""What is no expert: a successor's dense parameters out of those of one dense model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jetmoe_jax.checkpoints.layout import layout_of
from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.registry import Model
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.recycling.selection import (
    generator,
    sampled_indices,
    top_k_indices,
    uniform_indices,
    weight_selection_indices,
)
from jetmoe_jax.recycling.statistics import Statistics

STRATEGIES = ('weight_selection', 'uniform', 'importance')
ATTENTION, NEURONS = 2, 3  # streams of random numbers; a block's experts have the others

Shape = Sequence[int]
Selector = Callable[[str, np.ndarray, Shape], np.ndarray]  # (path, donor's value, new shape)


@dataclass(frozen=True)
class Reduction:
    """How a donor is brought to the successor's size.

    Attributes:
      select: reduces one parameter.
      mlp_sets: block's path -> the donor's channels (d,) and neurons (h,) that make its MLP.
    """

    select: Selector
    mlp_sets: Callable[[str], tuple[np.ndarray, np.ndarray]]


def whole(donor: Model) -> Reduction:
    """The donor's values as they are: for a checkpoint of the successor's size."""
    return Reduction(
        lambda path, value, shape: value,
        lambda block: tuple(np.arange(units) for units in donor.blocks[block]),
    )


def make_reduction(
    successor: Model,
    donor: Model,
    strategy: str,
    statistics: Statistics | None = None,
    metric: str = 'L2',
    seed: int = 0,
) -> Reduction:
    """The reduction by one of STRATEGIES."""
    if strategy == 'weight_selection':
        return Reduction(
            weight_selection(donor, successor),
            lambda block: tuple(
                weight_selection_indices(size, k)
                for size, k in zip(donor.blocks[block], successor.blocks[block], strict=True)
            ),
        )
    sets = dense_sets(successor, donor, strategy, statistics, metric, seed)
    return Reduction(
        lambda path, value, shape: select_by_sets(path, value, sets),
        lambda block: (sets.channels, sets.neurons[block]),
    )


def check_strategy(successor: Model, strategy: str) -> None:
    """Refuses a strategy that the successor's family has not."""
    if strategy != 'weight_selection' and not isinstance(successor, ViT):
        raise UserError(
            f"non_experts is {strategy!r}, which is for ViTs; a ConvNeXt takes 'weight_selection'."
        )


def weight_selection(donor: Model, successor: Model) -> Selector:
    """Weight selection (Xu et al., ICLR 2024): every dimension of a tensor reduced on its own.

    The dimensions are those of timm's tensors, where a convolution has one for each of its axes.
    """
    of_donor, of_successor = layout_of(donor), layout_of(successor)

    def select(path: str, value: np.ndarray, shape: Shape) -> np.ndarray:
        (tensor,) = of_donor.to_tensors(path, value).values()
        (target,) = of_successor.tensor_shapes(path, shape).values()
        if len(target) > tensor.ndim:  # 1x1 convolutions out of linear layers
            tensor = tensor.reshape(*tensor.shape, *[1] * (len(target) - tensor.ndim))
        sizes = zip(tensor.shape, target, strict=False)
        index = [weight_selection_indices(size, k) for size, k in sizes]
        return of_successor.from_tensors(path, [tensor[np.ix_(*index)]])

    return select


@dataclass(frozen=True)
class DenseSets:
    """Index sets that reduce a ViT: channels of the whole network, the others by block's path."""

    channels: np.ndarray
    attention: Mapping[str, np.ndarray]
    neurons: Mapping[str, np.ndarray]


def dense_sets(
    successor: ViT,
    donor: ViT,
    strategy: str,
    statistics: Statistics | None = None,
    metric: str = 'L2',
    seed: int = 0,
) -> DenseSets:
    """Index sets by 'uniform' or 'importance'.

    'importance' takes as channels the top-k of the metric's sum over blocks, one set for the whole
    network, and samples attention channels and neurons block by block.
    """
    d, h = successor.width, successor.mlp_hidden
    if strategy == 'uniform':
        channels = uniform_indices(donor.width, d)
        neurons = uniform_indices(donor.mlp_hidden, h)
        blocks = list(successor.blocks)
        return DenseSets(channels, dict.fromkeys(blocks, channels), dict.fromkeys(blocks, neurons))

    def sample(position: str, k: int, stream: int) -> dict[str, np.ndarray]:
        return {
            block: sampled_indices(
                statistics.of(block, position, metric), k, 1, generator(seed, i, stream)
            )[0]
            for i, block in enumerate(successor.blocks)
        }

    norms = sum(statistics.of(block, 'mlp_input', metric) for block in donor.blocks)
    return DenseSets(
        top_k_indices(norms, d),
        sample('attn_proj_input', d, ATTENTION),
        sample('mlp_act', h, NEURONS),
    )


def select_by_sets(path: str, value: np.ndarray, sets: DenseSets) -> np.ndarray:
    """One dense parameter reduced to index sets; qkv takes the attention set three times."""
    block, _, module = path.partition('/')
    if not block.startswith('blocks_') or module.split('/')[0] in ('norm1', 'norm2', 'ls1', 'ls2'):
        return value[..., sets.channels]
    channels, attention, neurons = sets.channels, sets.attention[block], sets.neurons[block]
    d = value.shape[-1] // 3
    qkv = np.concatenate([attention, attention + d, attention + 2 * d])
    in_and_out = {
        'attn/qkv': (channels, qkv),
        'attn/proj': (attention, channels),
        'mlp/fc1': (channels, neurons),
        'mlp/fc2': (neurons, channels),
    }
    layer, _, leaf = module.rpartition('/')
    if layer not in in_and_out:  # q_norm and k_norm are as wide as a head is
        return value
    into, out = in_and_out[layer]
    return value[np.ix_(into, out)] if leaf == 'kernel' else value[out]


def source_path(path: str, donor: Checkpoint) -> str:
    """The donor's parameter for a successor's: of its own name, or the other pooling's norm.

    Raises:
      UserError: the donor has none.
    """
    for candidate in (path, path.replace('fc_norm/', 'norm/'), 'fc_' + path):
        if candidate in donor.params:
            return candidate
    raise UserError(
        f'{donor.report.source} has nothing for {path} (it has {len(donor.model.blocks)} blocks); '
        'choose a successor that is not deeper and of the same variant.'
    )
