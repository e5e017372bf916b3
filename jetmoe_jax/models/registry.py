"""The registry: the only list of models by name."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jetmoe_jax.errors import known_key
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.spheromoe import SETTINGS

Model = ViT | ConvNeXt

FAMILIES: dict[str, type[nn.Module]] = {'vit': ViT, 'convnext': ConvNeXt}

_TINY = dict(width=192, depth=12, num_heads=3)
_SMALL = dict(width=384, depth=12, num_heads=6)
_BASE = dict(width=768, depth=12, num_heads=12)
_DINOV2 = dict(patch_size=14, image_size=518, num_classes=0, layer_scale=1e-5)
_REG4 = dict(reg_tokens=4, no_embed_class=True)
_DEIT3 = dict(no_embed_class=True, layer_scale=1e-6)
_JETMOE = dict(
    pool='avg',
    moe_blocks=(6, 7, 8, 9, 10, 11),
    moe=dict(core_experts=98, universal_experts=196, **SETTINGS['released']),
)
_FEMTO = dict(widths=(48, 96, 192, 384), depths=(2, 2, 6, 2), conv_mlp=True)

# Name -> (family, attributes). timm's names, and the MoE models.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    'vit_tiny_patch16_224': ('vit', _TINY),
    'vit_small_patch16_224': ('vit', _SMALL),
    'vit_base_patch16_224': ('vit', _BASE),
    'deit3_small_patch16_224': ('vit', _SMALL | _DEIT3),
    'deit3_base_patch16_224': ('vit', _BASE | _DEIT3),
    'vit_small_patch14_dinov2': ('vit', _SMALL | _DINOV2),
    'vit_base_patch14_dinov2': ('vit', _BASE | _DINOV2),
    'vit_small_patch14_reg4_dinov2': ('vit', _SMALL | _DINOV2 | _REG4),
    'vit_base_patch14_reg4_dinov2': ('vit', _BASE | _DINOV2 | _REG4),
    'convnext_atto': ('convnext', _FEMTO | dict(widths=(40, 80, 160, 320))),
    'convnext_femto': ('convnext', _FEMTO),
    'convnext_pico': ('convnext', _FEMTO | dict(widths=(64, 128, 256, 512))),
    'convnext_nano': ('convnext', _FEMTO | dict(widths=(80, 160, 320, 640), depths=(2, 2, 8, 2))),
    'convnext_tiny': ('convnext', dict(widths=(96, 192, 384, 768), depths=(3, 3, 9, 3))),
    'convnext_small': ('convnext', dict(widths=(96, 192, 384, 768), depths=(3, 3, 27, 3))),
    'convnext_base': ('convnext', dict(widths=(128, 256, 512, 1024), depths=(3, 3, 27, 3))),
    'vjetmoe_t': ('vit', _TINY | _JETMOE),
    'vjetmoe_s': ('vit', _SMALL | _JETMOE),
    # At 224 pixels the last two stages have 196 and 49 tokens: the experts follow.
    'cjetmoe_f': (
        'convnext',
        _FEMTO
        | dict(
            moe_blocks=((2, 3), (2, 4), (2, 5), (3, 0), (3, 1)),
            moe=dict(
                core_experts=(0, 0, 98, 24),
                universal_experts=(0, 0, 196, 48),
                **SETTINGS['released'],
            ),
        ),
    ),
}


def create_model(name: str, **overrides: Any) -> Model:
    """A model by name; `moe` overrides are merged into the entry's own, unless they name a `layer`.

    Raises:
      UserError: the name or an override is unknown; the nearest known one is named.
    """
    family, attributes = MODELS[known_key('model', name, MODELS)]
    for key in overrides:
        known_key('model attribute', key, _attributes(FAMILIES[family]))
    moe = dict(overrides.pop('moe', None) or {})
    if 'layer' not in moe:  # another layer has other arguments
        moe = dict(attributes.get('moe') or {}) | moe
    if moe:
        overrides['moe'] = moe
    return FAMILIES[family](**(attributes | overrides))


def model_spec(model: Model) -> dict[str, Any]:
    """A model's family and attributes as plain JSON values, for `from_spec`; without its dtype."""
    family = next(name for name, cls in FAMILIES.items() if isinstance(model, cls))
    names = [name for name in _attributes(type(model)) if name != 'dtype']
    spec = {name: getattr(model, name) for name in names}
    return {'family': family} | {
        k: dict(v) if isinstance(v, Mapping) else v for k, v in spec.items()
    }


def from_spec(spec: Mapping[str, Any], **overrides: Any) -> Model:
    """The model of a `model_spec`."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in spec.items()}
    family = FAMILIES[values.pop('family')]
    for key in overrides:
        known_key('model attribute', key, _attributes(family))
    if overrides.get('moe') and values['moe']:
        overrides['moe'] = values['moe'] | dict(overrides['moe'])
    return family(**(values | {'dtype': jnp.float32} | overrides))


def _attributes(family: type[nn.Module]) -> list[str]:
    return [name for name in family.__dataclass_fields__ if name not in ('parent', 'name')]
