"""Recycle dense checkpoints into a MoE model's, without training.

    python -m jetmoe_jax.recycle --dense=VIT_S --dense_same=VIT_T --data=FOLDER --output=OUT
    python -m jetmoe_jax.recycle --config=configs/vjetmoe_t.py:dense=VIT_S,data=FOLDER --output=OUT

Checkpoints are files, workdirs or timm names on the Hugging Face hub. OUT is a folder, or a
.safetensors file with MoE Jetpack's names; a record of the origin of every expert and a
summary.html come with it. Flags beside --config change single values of the recipe.
"""

import resource
import time

from absl import flags
from ml_collections import config_flags

from jetmoe_jax import commands
from jetmoe_jax.models.registry import MODELS
from jetmoe_jax.moe.layers import LAYERS
from jetmoe_jax.recycling import dense, graph
from jetmoe_jax.recycling.recipe import STRATEGIES
from jetmoe_jax.recycling.statistics import METRICS
from jetmoe_jax.training.config import default_config, override_recycling
from jetmoe_jax.training.initial import write_recycled

_CONFIG = config_flags.DEFINE_config_file('config', None, 'A recipe: FILE.py:key=value,...')
_OUTPUT = flags.DEFINE_string('output', None, 'A folder to make, or a .safetensors file.')
_MOE_MODELS = [name for name, (_, attributes) in MODELS.items() if 'moe' in attributes]
_VALUES = (
    flags.DEFINE_enum('model', None, _MOE_MODELS, 'The successor; vjetmoe_t.'),
    flags.DEFINE_string('dense', None, 'The predecessor, which experts are selected from.'),
    flags.DEFINE_string('dense_same', None, "A checkpoint of the successor's width, for the rest."),
    flags.DEFINE_list('branches', None, "Further dense checkpoints, of 'branch_train_mix'."),
    flags.DEFINE_string('experts', None, 'Of every MoE block: CORE+UNIVERSAL, or one number.'),
    flags.DEFINE_enum('layer', None, list(LAYERS), 'The MoE layer; spheromoe.'),
    flags.DEFINE_enum('strategy', None, STRATEGIES, 'Where experts come from; importance.'),
    flags.DEFINE_enum('metric', None, METRICS, "What 'importance' goes by; L2."),
    flags.DEFINE_float('ratio', None, "Of neurons drawn again by 'drop_upcycling'; 0.5."),
    flags.DEFINE_enum('communities', None, graph.METHODS, "How 'graph' splits; louvain."),
    flags.DEFINE_enum(
        'non_experts', None, dense.STRATEGIES, 'The rest without --dense_same; weight_selection.'
    ),
    flags.DEFINE_string('statistics', None, 'Saved statistics (.npz), instead of collecting them.'),
    flags.DEFINE_string('data', None, 'A folder of train/CLASS/*, val/CLASS/*, or a built-in set.'),
    flags.DEFINE_integer('calibration_images', None, 'To collect statistics over; 1024.'),
    flags.DEFINE_integer('image_size', None, "Pixels; the dense checkpoint's.", lower_bound=1),
    flags.DEFINE_integer(
        'num_classes', None, "Of the fresh head; the data's, or the checkpoint's.", lower_bound=0
    ),
    flags.DEFINE_integer('seed', None, 'Of the draws, the router and the head; 0.'),
)


def main(argv: list[str]) -> None:
    """Runs the command."""
    commands.no_arguments(argv)
    began = time.monotonic()
    given = {flag.name: flag.value for flag in _VALUES}
    config = override_recycling(_CONFIG.value or default_config(), given)
    for path in write_recycled(config, _OUTPUT.value):
        print(f'wrote {path}')
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f'{time.monotonic() - began:.1f} s, peak memory {peak:.2f} GB')


if __name__ == '__main__':
    commands.run(main, required=['output'])
