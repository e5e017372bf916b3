"""The project's own checkpoints: Orbax, asynchronous and atomic, in `workdir/checkpoints/STEP`.

Each holds the parameters, their moving average where there is one, the rest of the train state, the
data iterator's state, and `meta`: the model, the preprocessing, the class names and the config, in
JSON, so that it stands on its own.
"""

import contextlib
import fcntl
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jetmoe_jax.checkpoints.files import StateDict
from jetmoe_jax.checkpoints.layout import layout_of, with_own_names
from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, fit, load_checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import FlatParams, flatten, named_leaves, param_shapes, unflatten
from jetmoe_jax.models.registry import from_spec, model_spec

FOLDER = 'checkpoints'

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of a workdir. The last `keep` are kept, and the best by 'top1'."""

    def __init__(self, workdir: str | Path, keep: int = 3, read_only: bool = False):
        self.folder = Path(workdir).absolute() / FOLDER
        policies = checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics['top1'],
            best_mode='max',
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
            self.folder, options=options, item_names=('params', 'ema', 'train', 'data', 'meta')
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
        trees: Mapping[str, Any],
        records: Mapping[str, Mapping[str, Any]],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts writing a checkpoint; training may go on meanwhile.

        Args:
          trees: 'params', and in training 'train' and perhaps 'ema': pytrees of arrays.
          records: 'meta', and in training 'data': JSON values.
          metrics: of the evaluation at this step; the best by 'top1' is kept.
        """
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items |= {name: ocp.args.JsonSave(dict(value)) for name, value in records.items()}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)

    def meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        return self._restore(step, meta=ocp.args.JsonRestore())['meta']

    def data_state(self, step: int) -> dict[str, Any]:
        """The data iterator's state."""
        return self._restore(step, data=ocp.args.JsonRestore())['data']

    def restore(self, step: int, **trees: Any) -> dict[str, Any]:
        """The named pytrees, into the given shapes and shardings, on any device count.

        Experts are padded for the devices that they were on: what is stored is cut off or extended
        by zeros to what is asked for.
        """
        shapes = param_shapes(from_spec(self.meta(step)['model']))
        experts = {path: leaf.shape[0] for path, leaf in shapes.items() if 'experts/' in path}
        for name, tree in trees.items():
            self._check_shapes(step, name, tree, experts)
        items = {name: ocp.args.StandardRestore(tree, strict=False) for name, tree in trees.items()}
        return dict(self._restore(step, **items))

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check_shapes(self, step: int, name: str, tree: Any, experts: Mapping[str, int]) -> None:
        """Refuses arrays of another shape than those of `tree`, but for the padding of experts.

        Args:
          experts: path of every parameter of experts -> how many the model has.
        """
        try:
            metadata = ocp.StandardCheckpointHandler().metadata(self.folder / str(step) / name)
        except Exception:  # damaged: restoring says how
            return
        leaves = named_leaves(getattr(metadata, 'tree', metadata))
        stored = {path: tuple(leaf.shape) for path, leaf in leaves}
        for path, leaf in named_leaves(tree):
            found = stored.get(path, leaf.shape)  # that one is missing is for Orbax to say
            least = next((e for expert, e in experts.items() if path.endswith(expert)), None)
            padded = least is not None and found[1:] == leaf.shape[1:] and found[0] >= least
            if found != leaf.shape and not padded:
                raise self._unreadable(step, f'its {path} is {found}, the model has {leaf.shape}')

    def _unreadable(self, step: int, why: str) -> UserError:
        return UserError(
            f'checkpoint {self.folder / str(step)} cannot be read: {why}; '
            'delete that folder to go on from an earlier one.'
        )

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            with _quiet_threads():
                return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises bare Exceptions for damaged arrays
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            why = first_line.partition(' See full TensorStore details')[0].rstrip(' .')
        raise self._unreadable(step, why)


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Keeps reads that outlive a failed restore from printing their own tracebacks."""
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook = sys.unraisablehook = lambda *_: None
    try:
        yield
    except Exception:
        time.sleep(0.5)  # until those reads are over
        raise
    finally:
        sys.excepthook, sys.unraisablehook = hooks


@contextlib.contextmanager
def in_use(workdir: str | Path) -> Iterator[None]:
    """Holds a workdir for this run; a second one at the same time is refused.

    Raises:
      UserError: another process holds it.
    """
    if jax.process_index() != 0:
        yield
        return
    Path(workdir).mkdir(parents=True, exist_ok=True)
    with (Path(workdir) / 'lock').open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f'{workdir} is in use by another run; wait for its end or choose another --workdir.'
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning('%s cannot be locked against a second run (%s).', workdir, error)
        yield


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


def load_workdir(
    folder: str | Path, *, best: bool = False, ema: bool = False, **overrides: Any
) -> Checkpoint:
    """The newest (or best) checkpoint of a workdir, whole on the default device.

    Args:
      folder: a workdir, its `checkpoints` folder, or one checkpoint in it.
      best: the one of the highest validation accuracy, instead of the newest.
      ema: the moving average of the weights, instead of the weights.
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
        item = 'ema' if ema else 'params'
        if ema and not (store.folder / str(step) / 'ema').is_dir():
            raise UserError(f'{workdir} has no moving average of the weights.')
        params = flatten(store.restore(step, **{item: unflatten(shapes)})[item])
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


def save_workdir(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint as a workdir's only one, at step 0, for `load_workdir`.

    Raises:
      UserError: the workdir has checkpoints already.
    """
    store = CheckpointStore(folder)
    try:
        if store.latest_step() is not None:
            raise UserError(f'{folder} has checkpoints already; choose another --output.')
        store.save(0, {'params': unflatten(checkpoint.params)}, {'meta': meta_of(checkpoint)})
    finally:
        store.close()


def meta_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says of itself, in JSON values."""
    return dict(
        model=model_spec(checkpoint.model),
        mean=list(checkpoint.mean),
        std=list(checkpoint.std),
        crop_fraction=checkpoint.crop_fraction,
        class_names=list(checkpoint.class_names),
    )


def to_device(params: FlatParams) -> dict[str, Any]:
    """Flat parameters -> nested arrays on the default device. Empties `params` as it goes, so that
    no value is in memory twice.
    """
    return unflatten({path: jax.device_put(params.pop(path)) for path in list(params)})


def open_checkpoint(
    path: str | Path, *, ema: bool = False, num_classes: int | None = None, **given: Any
) -> Checkpoint:
    """A workdir (or a checkpoint in it), a file or a hub's name -> a checkpoint.

    Args:
      ema: a workdir's moving average of the weights.
      num_classes: another count than the checkpoint's makes a fresh head.
      **given: further arguments of `load_checkpoint` for a file; for a workdir, attributes of the
        model that are to be changed, such as image_size.
    """
    if Path(path).is_dir():
        if not (Path(path) / FOLDER).is_dir() and FOLDER not in Path(path).absolute().parts:
            raise UserError(
                f'{path} is a folder without {FOLDER!r} in it; give the workdir of a training run '
                'or a .safetensors file.'
            )
        checkpoint = load_workdir(path, ema=ema)
        changes = given | ({} if num_classes is None else {'num_classes': num_classes})
        return _changed(checkpoint, changes) if changes else checkpoint
    if ema:
        raise UserError(f'{path} is a file; only a workdir has a moving average of its weights.')
    return load_checkpoint(path, num_classes=num_classes, **given)


def _changed(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with other attributes of the model, its parameters fitted to them."""
    options = {name: changes[name] for name in ('seed', 'allow_nonfinite') if name in changes}
    model = from_spec(
        model_spec(checkpoint.model), **{k: v for k, v in changes.items() if k not in options}
    )
    layout = with_own_names(layout_of(checkpoint.model))
    tensors: dict[str, np.ndarray] = {}
    for path, value in checkpoint.params.items():
        tensors |= layout.to_tensors(path, value)
    state = StateDict(
        checkpoint.report.source, tensors, {'image_size': checkpoint.model.image_size}
    )
    params, report = fit(model, state, layout=layout, **options)
    names = checkpoint.class_names if len(checkpoint.class_names) == model.num_classes else ()
    return replace(checkpoint, model=model, params=params, report=report, class_names=names)
