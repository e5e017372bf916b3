"""AdamW with warm-up and cosine, clipping, and layer-wise learning rate decay."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from jetmoe_jax.models.parameters import flatten, unflatten

# Norms, biases, embeddings of position and prefix, layer scales and temperatures are not decayed.
_NOT_DECAYED = re.compile(r'(^|/)(bias|scale|gamma|pos_embed|cls_token|reg_token|temperature)$')

_EMBEDDINGS = ('cls_token', 'reg_token', 'pos_embed', 'patch_embed', 'norm_pre', 'stem_')


def make_schedule(config: ConfigDict, steps: int, steps_per_epoch: float) -> optax.Schedule:
    """Learning rate by step: linear warm-up from `warmup_start`, cosine to `final` of the peak."""
    peak = config.lr
    warmup = round(config.warmup_epochs * steps_per_epoch)
    return optax.warmup_cosine_decay_schedule(
        init_value=peak * config.warmup_start,
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=peak * config.final,
    )


def make_optimizer(
    config: ConfigDict, schedule: optax.Schedule, blocks: Collection[str]
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) of the recipe's settings, for a model of these blocks."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(*config.betas, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        scale_by_layer(config.layer_decay, blocks),
        optax.scale_by_learning_rate(schedule),
    )


def decay_mask(params: Mapping[str, Any]) -> dict[str, Any]:
    """True for the parameters that weight decay applies to."""
    return _map_paths(lambda path: _NOT_DECAYED.search(path) is None, params)


def scale_by_layer(decay: float, blocks: Collection[str]) -> optax.GradientTransformation:
    """Updates times decay^(depth + 1 - layer): embeddings are layer 0, the i-th block is i + 1, the
    head is depth + 1 (BEiT, Bao et al. 2022). MoE layers keep the full rate.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scales = _map_paths(lambda path: layer_scale(path, decay, blocks), updates)
        return jax.tree.map(lambda u, scale: u * scale, updates, scales), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def layer_scale(path: str, decay: float, blocks: Collection[str]) -> float:
    """The factor on a parameter's learning rate.

    Args:
      blocks: paths of the model's blocks in order. A ConvNeXt's downsampling belongs to the block
        that follows it.
    """
    blocks = list(blocks)
    if '/moe/' in path:
        return 1.0
    if path.startswith(_EMBEDDINGS):
        layer = 0
    elif re.match(r'stages_\d+/downsample', path):
        layer = 1 + blocks.index(path.partition('/')[0] + '/blocks_0')
    else:
        inside = [i for i, block in enumerate(blocks) if path.startswith(block + '/')]
        layer = 1 + inside[0] if inside else len(blocks) + 1
    return decay ** (len(blocks) + 1 - layer)


def _map_paths(function: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    return unflatten({path: function(path) for path in flatten(tree)})
