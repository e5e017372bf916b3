"""Convert a checkpoint into another format.

    python -m jetmoe_jax.convert INPUT --output=OUT.safetensors   # timm's or MoE Jetpack's names
    python -m jetmoe_jax.convert INPUT --output=FOLDER            # a checkpoint of ours
    python -m jetmoe_jax.convert --list                           # the models by name

INPUT is a workdir, a .safetensors, .pth, .bin or .npz file, or a timm name on the Hugging Face hub.
"""

import time
from pathlib import Path

import numpy as np
from absl import flags

from jetmoe_jax import commands
from jetmoe_jax.analysis.cost import registry_table
from jetmoe_jax.checkpoints.load import save_checkpoint
from jetmoe_jax.checkpoints.workdir import open_checkpoint, save_workdir
from jetmoe_jax.errors import UserError

_OUTPUT = flags.DEFINE_string(
    'output', None, 'A .safetensors file to write, or a folder for a checkpoint of ours.'
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'float16'], 'Of the tensors in a .safetensors.'
)
_LIST = flags.DEFINE_bool('list', False, 'Print the models by name, with what they cost.')
commands.define_checkpoint_flags()
flags.adopt_module_key_flags(commands)  # for --help


def main(argv: list[str]) -> None:
    """Runs the command."""
    if _LIST.value:
        print(registry_table())
        return
    began = time.monotonic()
    if len(argv) != 2:
        raise UserError(f'{len(argv) - 1} inputs are given; name one workdir, file or timm model.')
    if not _OUTPUT.value:
        raise UserError('--output is missing; name a .safetensors file or a folder.')
    to_file = _OUTPUT.value.endswith('.safetensors')
    if not to_file and Path(_OUTPUT.value).suffix in ('.npz', '.pth', '.pt', '.bin'):
        raise UserError(
            f'--output={_OUTPUT.value}: only .safetensors files and folders are written.'
        )
    if not to_file and _DTYPE.value != 'float32':
        raise UserError('--dtype is for .safetensors files; a folder holds float32.')
    checkpoint = open_checkpoint(argv[1], **commands.checkpoint_flags())
    print(checkpoint.report.table())
    if to_file:
        save_checkpoint(_OUTPUT.value, checkpoint, np.dtype(_DTYPE.value))
    else:
        save_workdir(_OUTPUT.value, checkpoint)
    print(f'wrote {_OUTPUT.value} ({time.monotonic() - began:.1f} s)')


if __name__ == '__main__':
    commands.run(main)
