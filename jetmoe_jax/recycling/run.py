"""A recycling from its plan to its files: the checkpoint, the record and the summary."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jetmoe_jax.analysis.cost import model_cost
from jetmoe_jax.analysis.recycling_summary import write_summary
from jetmoe_jax.checkpoints.files import StateDictWriter
from jetmoe_jax.checkpoints.layout import state_dict, state_shapes
from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, hints_of
from jetmoe_jax.checkpoints.workdir import save_workdir
from jetmoe_jax.data.loader import eval_batches
from jetmoe_jax.data.mixing import normalise
from jetmoe_jax.data.preprocess import eval_transform
from jetmoe_jax.data.sources import Source
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams
from jetmoe_jax.models.registry import Model
from jetmoe_jax.recycling.collect import IMAGES_AT_ONCE
from jetmoe_jax.recycling.recipe import Donors, Recipe
from jetmoe_jax.recycling.replacement import Replacement
from jetmoe_jax.recycling.statistics import Statistics
from jetmoe_jax.recycling.strategies import dense_counterpart, recycled_parts


@dataclass(frozen=True)
class Recycling:
    """A successor and all that it is made of, which fit each other.

    Attributes:
      statistics: those that were given in a file, where the recipe needs any.
    """

    model: Model
    donors: Donors
    recipe: Recipe
    statistics: Statistics | None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every dense checkpoint."""
        donors = self.donors
        return [c for c in (donors.predecessor, donors.same_size, *donors.branches) if c]

    def facts(self, statistics: Statistics | None) -> dict[str, str]:
        """In words: what is made of what, how, and what the successor costs."""
        donors, recipe = self.donors, self.recipe
        name = recipe.strategy
        if name == 'importance':
            name += f' by {recipe.metric}'
        elif name == 'graph':
            name += f', communities by {recipe.communities}'
        elif name == 'drop_upcycling':
            name += f', ratio {recipe.ratio:g}'
        facts = {'strategy': f'{name}, seed {recipe.seed}'}
        if recipe.selects:
            facts['experts from'] = donors.predecessor.report.source
        elif recipe.strategy != 'from_scratch':
            sources = (donors.dense, *donors.branches)
            facts['experts from'] = ', '.join(c.report.source for c in sources)
        how = f' by {recipe.non_experts}' if donors.reduced else ''
        facts['the rest from'] = donors.dense.report.source + how
        if statistics is None:
            facts['statistics'] = 'none needed'
        else:
            where = 'given, of' if self.statistics else 'collected over'
            data = statistics.origin.get('data', 'unnamed data')
            facts['statistics'] = f'{where} {statistics.images} images of {data}'
        return facts | {'successor': str(model_cost(self.model))}


def check_output(output: Path, model: Model | None = None) -> None:
    """Refuses an output that exists, or a file that has no names for the model's parameters."""
    if output.exists():
        raise UserError(f'{output} exists already; choose another --output.')
    if output.suffix == '.safetensors':
        if model:
            state_shapes(model)
    elif output.suffix in ('.npz', '.pth', '.pt', '.bin'):
        raise UserError(f'--output={output}: only .safetensors files and folders are written.')


def write_recycling(
    output: Path,
    plan: Recycling,
    statistics: Statistics | None = None,
    *,
    images: Source | None = None,
    crop_fraction: float = 0.875,
    class_names: tuple[str, ...] = (),
) -> list[Path]:
    """Recycles, part by part, into a folder or a `.safetensors` file; whole or not at all.

    Beside the checkpoint, in the folder or under the file's name, are `record.json`, `record.npz`,
    `summary.html`, and `statistics.npz` if the statistics are not those of the plan.

    Args:
      images: calibration images, on which every MoE layer is compared with the MLP that it
        replaces.
      crop_fraction, class_names: are kept with the checkpoint.

    Returns:
      the files, the checkpoint first.
    """
    check_output(output, plan.model)
    record, parts = recycled_parts(plan.model, plan.donors, plan.recipe, statistics)
    donor = plan.donors.dense
    source = LoadReport(str(output))
    successor = Checkpoint(
        plan.model, {}, source, donor.mean, donor.std, crop_fraction, class_names
    )
    with _whole_or_absent(output) as folder:
        to_file = output.suffix == '.safetensors'
        target = _File(folder / output.name, successor) if to_file else _Folder(folder, successor)
        replacement = images and _replacement(plan, statistics, images, crop_fraction)
        errors, rest = {}, {}
        count = 1 + len(plan.model.moe_paths)
        bar = tqdm(parts, 'recycling', count, unit='part', leave=False, disable=None)
        for block, part in zip((None, *plan.model.moe_paths), bar, strict=True):
            target.add(part)
            if block is None:
                rest = {path: value for path, value in part.items() if '/moe/' in path}
            elif replacement:
                errors[block] = replacement.error(block, rest | part)
        target.close()
        record.save(folder)
        if statistics is not None and plan.statistics is None:
            statistics.save(folder / 'statistics.npz')
        write_summary(
            folder / 'summary.html',
            facts=plan.facts(statistics),
            record=record,
            units=(plan.donors.predecessor if plan.recipe.selects else donor).model.blocks,
            statistics=statistics,
            metric=plan.recipe.metric,
            errors=errors,
            images=len(images) if images else 0,
        )
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if not to_file:
        return [output, *(output / name for name in names)]
    return [output, *(_beside(output, name) for name in names if name != output.name)]


class _Folder:
    """A checkpoint of ours, which Orbax takes as a whole."""

    def __init__(self, folder: Path, successor: Checkpoint):
        self._folder, self._successor, self._params = folder, successor, {}

    def add(self, part: FlatParams) -> None:
        self._params |= part

    def close(self) -> None:
        save_workdir(self._folder, replace(self._successor, params=self._params))


class _File:
    """A file with MoE Jetpack's names."""

    def __init__(self, path: Path, successor: Checkpoint):
        self._model = successor.model
        self._writer = StateDictWriter(path, state_shapes(self._model), hints_of(successor))

    def add(self, part: FlatParams) -> None:
        self._writer.write(state_dict(self._model, part))

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def _whole_or_absent(output: Path) -> Iterator[Path]:
    """A folder beside `output`: it, or for a file what is in it, gets its name at the very end."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.with_name(output.name + '.partial')
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir()
    try:
        yield folder
        if (folder / output.name).is_file():
            for path in list(folder.iterdir()):
                if path.name != output.name:
                    path.replace(_beside(output, path.name))
            (folder / output.name).rename(output)
        else:
            folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(output: Path, name: str) -> Path:
    return output.with_suffix(f'.{name}')


def _replacement(
    plan: Recycling, statistics: Statistics | None, images: Source, crop_fraction: float
) -> Replacement:
    model, params = dense_counterpart(plan.model, plan.donors, plan.recipe, statistics)
    transform = partial(eval_transform, image_size=model.image_shape, crop_fraction=crop_fraction)
    donor = plan.donors.dense

    def batches() -> Iterator[np.ndarray]:
        for batch in eval_batches(images, transform, batch_size=min(IMAGES_AT_ONCE, len(images))):
            real = batch['image'][: int(batch['mask'].sum())]
            yield np.asarray(normalise(real, mean=donor.mean, std=donor.std))

    return Replacement(plan.model, model, params, batches())
