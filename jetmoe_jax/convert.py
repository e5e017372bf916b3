"""Convert a checkpoint to `.safetensors`, with timm's names (dense) or MoE Jetpack's (V-JetMoE).

python -m jetmoe_jax.convert WORKDIR_OR_FILE --output=OUT.safetensors
"""

import time

import numpy as np
from absl import flags

from jetmoe_jax import commands
from jetmoe_jax.checkpoints.load import save_checkpoint, untold
from jetmoe_jax.checkpoints.workdir import open_checkpoint
from jetmoe_jax.errors import UserError

_OUTPUT = flags.DEFINE_string('output', None, 'The .safetensors file to write.')
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'float16'], 'Of the tensors written.')
commands.define_model_flags()


def main(argv: list[str]) -> None:
    """Runs the command."""
    began = time.monotonic()
    if len(argv) != 2:
        raise UserError(f'{len(argv) - 1} inputs are given; name one workdir or file.')
    if not _OUTPUT.value.endswith('.safetensors'):
        raise UserError(f'--output={_OUTPUT.value} does not end in .safetensors.')
    checkpoint = open_checkpoint(argv[1], **commands.model_flags())
    print(checkpoint.report.table())
    model = checkpoint.model
    save_checkpoint(
        _OUTPUT.value,
        model,
        checkpoint.params,
        np.dtype(_DTYPE.value),
        **untold(model),
        mean=checkpoint.mean,
        std=checkpoint.std,
        crop_fraction=checkpoint.crop_fraction,
        class_names=checkpoint.class_names,
    )
    print(f'wrote {_OUTPUT.value} ({time.monotonic() - began:.1f} s)')


if __name__ == '__main__':
    commands.run(main, required=['output'])
