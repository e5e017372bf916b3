"""Recycling: dense checkpoints -> the parameters of a MoE model, and the record of their origin.

A pure function of (checkpoints, statistics, recipe), on flat parameters in NumPy, in parts: what is
no expert, then block by block, so that a writer need never hold the whole model.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.models.parameters import FlatParams, init_params, param_shapes
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling import dense
from jetmoe_jax.recycling.checks import check_donors, check_statistics
from jetmoe_jax.recycling.experts import selected_experts
from jetmoe_jax.recycling.recipe import Donors, Recipe
from jetmoe_jax.recycling.record import Record
from jetmoe_jax.recycling.selection import generator
from jetmoe_jax.recycling.statistics import Statistics
from jetmoe_jax.recycling.upcycling import mean, shared_expert, upcycled_experts

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
    branches: Sequence[Checkpoint] = (),
    statistics: Statistics | None = None,
    **recipe: Any,
) -> tuple[FlatParams, Record]:
    """Builds the successor's parameters out of dense checkpoints, with no training.

    Args:
      successor: a ViT or ConvNeXt with MoE blocks.
      predecessor: the dense model that experts are selected from, block by block of the same path.
      same_size: a dense model of the successor's width; gives all that is no expert, and the MLPs
        that are upcycled. Without it the predecessor does, by the strategy `non_experts`.
      branches: the further checkpoints of 'branch_train_mix'.
      statistics: of the predecessor; see `needed_statistics`.
      **recipe: the attributes of `Recipe`: strategy, metric, non_experts, ratio, communities, seed.

    Returns:
      flat parameters (float32, NumPy) and the record of their origin.

    Raises:
      UserError: something is unknown, missing, or does not fit (see `Recipe` and checks.py).
    """
    donors = Donors(predecessor, same_size, tuple(branches))
    record, parts = recycled_parts(successor, donors, Recipe(**recipe), statistics)
    return {path: value for part in parts for path, value in part.items()}, record


def recycled_parts(
    successor: Model, donors: Donors, recipe: Recipe, statistics: Statistics | None = None
) -> tuple[Record, Iterator[FlatParams]]:
    """`recycle` part by part: all that belongs to no expert, then the experts of each MoE block.

    Everything is checked before this returns; the record fills up as the parts are taken.
    """
    check_donors(successor, donors, recipe)
    check_statistics(successor, donors, recipe, statistics)
    record = Record()
    return record, _parts(successor, donors, recipe, statistics, record)


def dense_counterpart(
    successor: Model, donors: Donors, recipe: Recipe, statistics: Statistics | None = None
) -> tuple[Model, FlatParams]:
    """The dense model, without a head, whose MLPs the MoE layers replace: with its parameters.

    It is the same-size checkpoint, or the predecessor reduced as all is that is no expert (with
    branches, the mean of all).
    """
    model = successor.clone(moe_blocks=(), moe=None, num_classes=0)
    merged = (donors.dense, *donors.branches)
    reduction = _reduction(successor, donors, recipe, statistics)
    shapes = param_shapes(model)
    return model, {p: _merged(p, leaf.shape, merged, reduction) for p, leaf in shapes.items()}


def inherit(successor: Model, donor: Model, given: Collection[str] = ()) -> Model:
    """The successor with the variant of its donor: patch size, registers, layer scale and so on.

    Args:
      given: attributes that were asked for and stay.
    """
    names = [name for name in _INHERITED if hasattr(donor, name) and hasattr(successor, name)]
    if getattr(donor, 'width', 0) == getattr(successor, 'width', None):
        names.append('num_heads')
    return successor.clone(**{name: getattr(donor, name) for name in names if name not in given})


def _parts(
    successor: Model,
    donors: Donors,
    recipe: Recipe,
    statistics: Statistics | None,
    record: Record,
) -> Iterator[FlatParams]:
    reduction = _reduction(successor, donors, recipe, statistics)
    fresh_seed = _fresh_seed(recipe.seed)
    merged = (donors.dense, *donors.branches)
    shapes = param_shapes(successor)
    params, fresh = {}, []
    for path, leaf in shapes.items():
        if 'experts/' in path or '/moe/shared_expert/' in path:
            continue
        if '/moe/' in path or path.startswith('head/'):
            fresh.append(path)
            continue
        params[path] = _merged(path, leaf.shape, merged, reduction)
        record.origin[path] = _origin(merged, dense.source_path(path, donors.dense))
    record.origin |= dict.fromkeys(fresh, 'fresh')
    yield params | init_params(successor, fresh_seed, fresh)

    for block in successor.moe_paths:
        if recipe.strategy == 'from_scratch':
            inside = [path for path in shapes if path.startswith(f'{block}/moe/')]
            paths = [path for path in inside if 'experts/' in path]
            record.origin |= dict.fromkeys(paths, 'fresh')
            experts = init_params(successor, fresh_seed, paths)
        elif recipe.selects:
            experts = selected_experts(
                successor, donors.predecessor, block, statistics, recipe, record
            )
        else:
            sets = reduction.mlp_sets(block)
            experts = upcycled_experts(successor, merged, block, sets, recipe, record)
        shared = shapes.get(f'{block}/moe/shared_expert/fc1/kernel')
        if shared is not None:
            sets, width = reduction.mlp_sets(block), shared.shape[1]
            experts |= shared_expert(merged, block, sets, width, record)
        yield experts


def _reduction(
    successor: Model, donors: Donors, recipe: Recipe, statistics: Statistics | None
) -> dense.Reduction:
    """How the checkpoint that gives all but the experts is brought to the successor's size."""
    if not donors.reduced:
        return dense.whole(donors.dense.model)
    return dense.make_reduction(
        successor,
        donors.predecessor.model,
        recipe.non_experts,
        statistics,
        recipe.metric,
        recipe.seed,
    )


def _merged(
    path: str, shape: Sequence[int], donors: Sequence[Checkpoint], reduction: dense.Reduction
) -> np.ndarray:
    """One dense parameter of the successor's size, the mean of all donors'."""
    values = []
    for donor in donors:
        source = dense.source_path(path, donor)
        values.append(reduction.select(source, donor.params[source], shape))
    return mean(values)


def _origin(donors: Sequence[Checkpoint], path: str) -> str:
    sources = ', '.join(donor.report.source for donor in donors)
    return f'{sources}: {path}' if len(donors) == 1 else f'mean of {sources}: {path}'


def _fresh_seed(seed: int) -> int:
    """A seed for what is made fresh, other than `seed` itself.

    A dense model that was trained from the same seed would fit the head that it started with: the
    successor's head is not to be that one again.
    """
    return int(generator(seed).integers(2**31))
