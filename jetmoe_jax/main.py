"""Recycle if the config says so, train, evaluate.

    python -m jetmoe_jax.main --config=configs/quickstart.py
    python -m jetmoe_jax.main --config=configs/vjetmoe_t.py:dense=vit_s.safetensors,data=FOLDER

A run that was stopped, however, goes on when the same command is given again.
"""

from jetmoe_jax import huge_pages

if __name__ == '__main__':
    huge_pages.restart()

import time
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from jetmoe_jax import commands
from jetmoe_jax.training.compare import train_beside_random
from jetmoe_jax.training.loop import evaluate_workdir, train

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'A recipe: FILE.py or FILE.py:key=value,...; single keys by --config.KEY=VALUE.'
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Where checkpoints and logs go; workdir/NAME_OF_CONFIG by default.'
)
_MODE = flags.DEFINE_enum(
    'mode', 'train', ['train', 'eval'], 'eval: evaluate the newest checkpoint of the workdir.'
)


def main(argv: list[str]) -> None:
    """Runs the command."""
    commands.no_arguments(argv)
    began = time.monotonic()
    config = _CONFIG.value
    stem = Path(config_flags.get_config_filename(flags.FLAGS['config']).split(':')[0]).stem
    workdir = Path(_WORKDIR.value or Path('workdir') / stem)
    if not jax.config.jax_compilation_cache_dir:  # a restart, and a random twin, need not compile
        jax.config.update('jax_compilation_cache_dir', str(workdir.absolute() / 'compiled'))
    if _MODE.value == 'eval':
        print(_line(evaluate_workdir(config, workdir)))
    elif config.get('compare_random'):
        print(train_beside_random(config, workdir))
        print(f'The picture: {workdir / "curves.png"}')
    else:
        print(_line(train(config, workdir)))
    print(f'Checkpoints and logs: {workdir} ({time.monotonic() - began:.0f} s)')


def _line(result: dict[str, float]) -> str:
    return (
        f'validation: top-1 {result["top1"]:.2%}, top-5 {result["top5"]:.2%}, '
        f'loss {result["loss"]:.4f}'
    )


if __name__ == '__main__':
    commands.run(main, required=['config'])
