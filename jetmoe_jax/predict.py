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
from jetmoe_jax.inference import predict_inputs

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'A workdir of a training run, one checkpoint in it, a file, or a timm name.'
)
_TOP = flags.DEFINE_integer('top', 5, 'How many classes to print for each image.', lower_bound=1)
_LOGITS = flags.DEFINE_string('logits', None, 'A .npz to write `paths` and `logits` to.')
_BATCH = flags.DEFINE_integer('batch_size', 32, 'Images at once.', lower_bound=1)
commands.define_checkpoint_flags()


def main(argv: list[str]) -> None:
    """Runs the command."""
    began = time.monotonic()
    checkpoint = open_checkpoint(_CHECKPOINT.value, **commands.checkpoint_flags())
    paths, logits = predict_inputs(checkpoint, argv[1:], batch_size=_BATCH.value)
    names = checkpoint.class_names or [f'class {i}' for i in range(logits.shape[1])]
    for path, row in zip(paths, logits, strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        best = np.argsort(-p, kind='stable')[: _TOP.value]
        print(f'{path}  ' + '  '.join(f'{names[i]} {p[i]:.1%}' for i in best))
    if _LOGITS.value:
        Path(_LOGITS.value).parent.mkdir(parents=True, exist_ok=True)
        np.savez(_LOGITS.value, paths=np.array(paths), logits=logits)
        print(f'wrote {_LOGITS.value}: {logits.shape[0]} x {logits.shape[1]} logits')
    print(f'{len(paths)} images with {checkpoint.report.source} ({time.monotonic() - began:.1f} s)')


if __name__ == '__main__':
    commands.run(main, required=['checkpoint'])
