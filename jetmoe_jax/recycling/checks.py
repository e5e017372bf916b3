"""What recycling refuses, by shapes and names alone, and so before any long work."""

import operator

from jetmoe_jax.checkpoints.load import Checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling import dense
from jetmoe_jax.recycling.recipe import Donors, Recipe, needed_statistics
from jetmoe_jax.recycling.statistics import Statistics


def check_donors(successor: Model, donors: Donors, recipe: Recipe) -> None:
    """Refuses checkpoints that the successor cannot be made of.

    Raises:
      UserError: another family, MoE layers in a donor, a donor that is narrower or not as deep,
        more neurons asked for than there are, no experts, branches that differ or are of no use.
    """
    if not successor.moe_paths:
        raise UserError('the successor has no MoE block; give it moe_blocks.')
    for checkpoint in filter(None, (donors.predecessor, donors.same_size, *donors.branches)):
        check_family(successor, checkpoint)
    if donors.reduced:
        dense.check_strategy(successor, recipe.non_experts)
    _check_rest(successor, donors)
    for block in successor.moe_paths:
        _check_block(successor, donors, recipe, block)
    _check_branches(donors, recipe)


def check_statistics(
    successor: Model, donors: Donors, recipe: Recipe, statistics: Statistics | None
) -> None:
    """Refuses statistics that lack what the recipe needs, or are of another checkpoint."""
    needs = needed_statistics(successor, donors, recipe)
    if needs and statistics is None:
        name = recipe.strategy if recipe.strategy == 'graph' else 'importance'
        raise UserError(f'strategy {name!r} needs statistics of the predecessor; collect them.')
    if needs:
        statistics.check(donors.predecessor, needs)


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


def _check_rest(successor: Model, donors: Donors) -> None:
    """All that is no expert: found in the donor, and not larger than there."""
    donor, fit = donors.dense, operator.ge if donors.reduced else operator.eq
    for path, leaf in param_shapes(successor).items():
        if '/moe/' in path or path.startswith('head/'):
            continue
        shape = donor.params[dense.source_path(path, donor)].shape
        if len(shape) != len(leaf.shape) or not all(map(fit, shape, leaf.shape)):
            raise UserError(
                f'{path}: {donor.report.source} gives {shape}, the successor has {leaf.shape}; '
                'choose a checkpoint of the same patch and image size, of the same width as '
                'dense_same and not narrower as the predecessor.'
            )


def _check_block(successor: Model, donors: Donors, recipe: Recipe, block: str) -> None:
    """One MoE block: its experts find channels and neurons enough."""
    layer, (d, h) = successor.moe_layer(block), successor.blocks[block]
    paths = layer.path_widths(d)
    if recipe.selects:
        _check_mlp(successor, donors.predecessor, block)
        h = donors.predecessor.model.blocks[block][1]
    if not recipe.selects or getattr(layer, 'shared_expert', False):
        _check_mlp(successor, donors.dense, block, exactly=not donors.reduced)
    for path, (_, width) in paths.items():
        if not 0 < width <= h and recipe.strategy != 'from_scratch':
            raise UserError(
                f'{path} of {block} are to have {width} neurons and the dense MLP has {h}; '
                'choose a width from 1 to that.'
            )


def _check_mlp(successor: Model, donor: Checkpoint, block: str, exactly: bool = False) -> None:
    """A block's MLP in a donor is not smaller than the successor's, or exactly as large."""
    source, blocks = donor.report.source, donor.model.blocks
    if block not in blocks:
        raise UserError(
            f'{source} has no {block}, which is a MoE block of the successor (it has '
            f'{len(blocks)} blocks); choose moe_blocks among those.'
        )
    ours, theirs = successor.blocks[block], blocks[block]
    if not all(map(operator.eq if exactly else operator.ge, theirs, ours)):
        raise UserError(
            f'{block} has {ours} channels and neurons in the successor, {theirs} in {source}; '
            'choose a predecessor that is not narrower, and a same-size checkpoint as wide.'
        )


def _check_branches(donors: Donors, recipe: Recipe) -> None:
    """Branches where they are used, and there of the dense donor's architecture."""
    if (recipe.strategy == 'branch_train_mix') != bool(donors.branches):
        raise UserError(
            f'strategy is {recipe.strategy!r} and {len(donors.branches)} branches are given; '
            "'branch_train_mix' takes at least one dense checkpoint beside the first, the others "
            'none.'
        )
    source, expected = donors.dense.report.source, _architecture(donors.dense)
    for branch in donors.branches:
        found = _architecture(branch)
        for name in expected | found:
            if expected.get(name) != found.get(name):
                raise UserError(
                    f'{branch.report.source} has {found.get(name)} as {name}, {source} has '
                    f"{expected.get(name)}; give 'branch_train_mix' checkpoints of one "
                    'architecture.'
                )


def _architecture(checkpoint: Checkpoint) -> dict[str, object]:
    """Shapes of all but the head, and what shapes cannot tell."""
    shapes = {
        path.replace('fc_norm/', 'norm/'): value.shape
        for path, value in checkpoint.params.items()
        if not path.startswith('head/')
    }
    return shapes | {'num_heads': getattr(checkpoint.model, 'num_heads', None)}
