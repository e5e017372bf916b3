"""What the commands share: one clear line and exit code 1 on a user's mistake."""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from jetmoe_jax.errors import UserError
from jetmoe_jax.models.vit import POOLS
from jetmoe_jax.moe.spheromoe import COMBINE


def run(main: Callable[[Sequence[str]], Any], required: Sequence[str] = ()) -> None:
    """Parses flags, calls `main(argv)`, and exits: 0 done, 1 with one line on a user's mistake."""

    def guarded(argv: Sequence[str]) -> int:
        try:
            main(argv)
        # OSError: a disk that is full, a folder that may not be written.
        except (UserError, OSError) as error:
            _exit(1, f'error: {error}')
        except KeyboardInterrupt:
            _exit(130, 'stopped.')
        return 0

    messages = logging.StreamHandler(sys.stdout)
    messages.setFormatter(logging.Formatter('%(message)s'))
    logger = logging.getLogger('jetmoe_jax')
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax tells each of its steps below that
    app.run(guarded, flags_parser=lambda argv: _parse(argv, required))


def define_checkpoint_flags() -> None:
    """Flags of the commands that read a checkpoint: what its shapes cannot tell, and which one."""
    flags.DEFINE_integer(
        'num_heads', None, "Attention heads; width / 64 if the file doesn't say.", lower_bound=1
    )
    flags.DEFINE_enum('pool', None, POOLS, "Pooling; by the final norm's name if it isn't given.")
    flags.DEFINE_integer(
        'image_size', None, "Pixels; those of the file's position grid otherwise.", lower_bound=1
    )
    flags.DEFINE_integer(
        'num_classes', None, "Another count than the file's makes a fresh head.", lower_bound=0
    )
    flags.DEFINE_enum('combine', None, list(COMBINE), "V-JetMoE's combine function; entmax15.")
    flags.DEFINE_string('revision', None, "Of a timm model's repository on the hub.")
    flags.DEFINE_bool('allow_nonfinite', False, 'Take NaN and infinite weights.')
    flags.DEFINE_bool('ema', False, "A workdir's moving average of the weights.")


def checkpoint_flags() -> dict[str, Any]:
    """The arguments of `open_checkpoint` that were given by flags."""
    names = ('num_heads', 'pool', 'image_size', 'num_classes', 'revision', 'allow_nonfinite', 'ema')
    values = {name: flags.FLAGS[name].value for name in names}
    if flags.FLAGS['combine'].value:
        values['moe'] = {'combine': flags.FLAGS['combine'].value}
    return {k: v for k, v in values.items() if v is not None and v is not False}


def no_arguments(argv: Sequence[str]) -> None:
    """Refuses words on the command line that are not flags."""
    if len(argv) > 1:
        raise UserError(f'{argv[1]!r} is not a flag; flags are written --name=value, see --help.')


def _exit(code: int, message: str) -> None:
    """Says one line and ends at once: threads of libraries would add theirs to a slow end."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parse(argv: Sequence[str], required: Sequence[str]) -> list[str]:
    try:
        try:
            rest = flags.FLAGS(argv)
        except SystemExit:  # --help has printed what it had to
            raise SystemExit(0) from None
        for name in required:
            if flags.FLAGS[name].value is None:
                raise UserError(f'--{name} is missing; see --help.')
        if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
            _check_loaded(flags.FLAGS['config'])
        return rest
    except (UserError, flags.Error, OSError) as error:
        message = ' '.join(str(error).split())
    except (AttributeError, KeyError) as error:
        message = _unknown_key(str(error))
    print(f'error: {message}', file=sys.stderr)
    raise SystemExit(1)


def _check_loaded(flag: flags.Flag) -> None:
    """A config file that is missing shows itself only when the config is used: use it."""
    path = config_flags.get_config_filename(flag).partition(':')[0]
    if not Path(path).is_file():
        raise UserError(f'there is no config file {path}; the recipes lie in configs/.')
    flag.value.get('seed')


def _unknown_key(message: str) -> str:
    """ml_collections' complaint about a key, which spans lines, as one sentence of ours."""
    if match := re.search(r'Did you mean "(.+)" instead of "(.+)"', message):
        return f'config key {match[2]!r} does not exist; the nearest known one is {match[1]!r}.'
    key = ' '.join(message.split()).strip('"\'')
    return f'config key {key!r} does not exist in this recipe.'
