"""The project's own checkpoints: Orbax, asynchronous and atomic, in `workdir/checkpoints/STEP`.

Each holds the parameters, the rest of the train state, the data iterator's state, and `meta`: the
model, the preprocessing, the class names and the config, in JSON, so that it stands on its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, load_checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import flatten, param_shapes, unflatten
from jetmoe_jax.models.registry import from_spec

FOLDER = 'checkpoints'


class CheckpointStore:
    """The checkpoints of a workdir. The last `keep` are kept, and the best by 'top1'."""

    def __init__(self, workdir: str | Path, keep: int = 3, read_only: bool = False):
        self.folder = Path(workdir).absolute() / FOLDER
        policies = checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(keep),
                    policies.BestN(
                        get_metric_fn=lambda metrics: metrics['top1'],
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=('params', 'train', 'data', 'meta')
        )

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The step of the highest 'top1'; None if no checkpoint has one."""
        return self._manager.best_step()

    def save(
        self,
        step: int,
        params: Any,
        train: Any,
        data: Mapping[str, Any],
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts writing a checkpoint; training may go on meanwhile."""
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            train=ocp.args.StandardSave(train),
            data=ocp.args.JsonSave(dict(data)),
            meta=ocp.args.JsonSave(dict(meta)),
        )
        self._manager.save(step, args=items, metrics=dict(metrics) if metrics else None)

    def meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        return self._restore(step, meta=ocp.args.JsonRestore())['meta']

    def restore_params(self, step: int, params: Any) -> Any:
        """The parameters alone, into the shapes and shardings of `params`."""
        return self._restore(step, params=ocp.args.StandardRestore(params))['params']

    def restore(self, step: int, params: Any, train: Any) -> tuple[Any, Any, dict[str, Any]]:
        """(params, train, data) into the given shapes and shardings, on any device count."""
        items = self._restore(
            step,
            params=ocp.args.StandardRestore(params),
            train=ocp.args.StandardRestore(train),
            data=ocp.args.JsonRestore(),
        )
        return items['params'], items['train'], items['data']

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError) as error:
            first_line = str(error).splitlines()[0]
            raise UserError(
                f'checkpoint {self.folder / str(step)} cannot be read: {first_line}; '
                'delete that folder to go on from an earlier one.'
            ) from error


def check_same_model(
    workdir: str | Path, stored: Mapping[str, Any], model: Mapping[str, Any]
) -> None:
    """Refuses to go on with a workdir whose checkpoint belongs to another model."""
    for key in model:
        if _plain(stored.get(key)) != _plain(model[key]):
            raise UserError(
                f'{workdir} holds a checkpoint of another model: its {key} is {stored.get(key)}, '
                f"this config's is {model[key]}; choose another --workdir."
            )


def _plain(value: Any) -> Any:
    """JSON's view of a value: tuples become lists."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def load_workdir(folder: str | Path, *, best: bool = False, **overrides: Any) -> Checkpoint:
    """The newest (or best) checkpoint of a workdir, whole on the default device.

    Args:
      folder: a workdir, its `checkpoints` folder, or one checkpoint in it.
      **overrides: attributes of the model, e.g. dtype.

    Raises:
      UserError: there is no whole checkpoint.
    """
    folder = Path(folder).absolute()
    step = None
    if folder.name.isdigit() and folder.parent.name == FOLDER:
        folder, step = folder.parent, int(folder.name)
    workdir = folder.parent if folder.name == FOLDER else folder
    if not (workdir / FOLDER).is_dir():
        raise UserError(
            f'{workdir} has no folder {FOLDER!r}; give the --workdir of a training run.'
        )
    store = CheckpointStore(workdir, read_only=True)
    try:
        if step is None:
            step = store.best_step() if best else store.latest_step()
        if step is None:
            raise UserError(f'{workdir / FOLDER} holds no whole checkpoint yet; train first.')
        meta = store.meta(step)
        model = from_spec(meta['model'], **overrides)
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
            for path, leaf in param_shapes(model).items()
        }
        params = flatten(store.restore_params(step, unflatten(shapes)))
    finally:
        store.close()
    source = str(workdir / FOLDER / str(step))
    return Checkpoint(
        model,
        {path: np.asarray(value) for path, value in params.items()},
        LoadReport(source, used=list(params)),
        tuple(meta['mean']),
        tuple(meta['std']),
        meta['crop_fraction'],
        tuple(meta['class_names']),
    )


def open_checkpoint(path: str | Path, **given: Any) -> Checkpoint:
    """A workdir (or a checkpoint in it) or a file of dense or V-JetMoE weights -> a checkpoint.

    Args:
      **given: attributes of the model that a file's shapes cannot tell, or that are to be changed.
    """
    if Path(path).is_dir():
        if not (Path(path) / FOLDER).is_dir() and FOLDER not in Path(path).absolute().parts:
            raise UserError(
                f'{path} is a folder without {FOLDER!r} in it; give the workdir of a training run '
                'or a .safetensors file.'
            )
        return load_workdir(path, **given)
    return load_checkpoint(path, **given)
