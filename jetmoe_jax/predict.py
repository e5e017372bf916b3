"""Predict the classes of images with a trained or a converted model.

    python -m jetmoe_jax.predict --checkpoint=WORKDIR_OR_FILE IMAGE_OR_FOLDER_OR_NPY...

A .npy holds normalised images, float32 (b height width 3), and is used as it is.
"""

import time
from pathlib import Path

import numpy as np
from absl import flags

from jetmoe_jax import commands
from jetmoe_jax.checkpoints.workdir import open_checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.inference import predict_inputs

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'A workdir of a training run, one checkpoint in it, a file, or a timm name.'
)
_TOP = flags.DEFINE_integer('top', 5, 'How many classes to print for each image.', lower_bound=1)
_LOGITS = flags.DEFINE_string('logits', None, 'A .npz to write `paths` and `logits` to.')
_BATCH = flags.DEFINE_integer('batch_size', 32, 'Images at once.', lower_bound=1)
commands.define_checkpoint_flags()
flags.adopt_module_key_flags(commands)  # for --help


def main(argv: list[str]) -> None:
    """Runs the command."""
    began = time.monotonic()
    output = _LOGITS.value and Path(_LOGITS.value).with_suffix('.npz')
    if output and output.is_dir():
        raise UserError(f'--logits={output} is a folder; name a .npz file.')
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(_CHECKPOINT.value, **commands.checkpoint_flags())
    print(checkpoint.report.table())
    classes = checkpoint.model.num_classes
    if checkpoint.report.fresh:
        raise UserError(f'the head for {classes} classes is not trained; train it, or leave it.')
    if not (classes or output):
        raise UserError(
            f'{_CHECKPOINT.value} has no head to predict classes with; fine-tune it, or give '
            '--logits=FILE.npz for the pooled features.'
        )
    paths, logits = predict_inputs(checkpoint, argv[1:], batch_size=_BATCH.value)
    names = checkpoint.class_names or [f'class {i}' for i in range(classes)]
    for path, row in zip(paths, logits if classes else [], strict=bool(classes)):
        p = np.exp(row - row.max())
        p /= p.sum()
        best = np.argsort(-p, kind='stable')[: _TOP.value]
        print(f'{path}  ' + '  '.join(f'{names[i]} {p[i]:.1%}' for i in best))
    if output:
        np.savez(output, paths=np.array(paths), logits=logits)
        kind = 'logits' if classes else 'pooled features (there is no head)'
        print(f'wrote {output}: {logits.shape[0]} x {logits.shape[1]} {kind}')
    print(f'{len(paths)} images with {checkpoint.report.source} ({time.monotonic() - began:.1f} s)')


if __name__ == '__main__':
    commands.run(main, required=['checkpoint'])
