"""The registry: the only list of models by name."""

from collections.abc import Mapping
from typing import Any

from jetmoe_jax.errors import known_key
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.spheromoe import SETTINGS

_TINY = dict(width=192, depth=12, num_heads=3)
_SMALL = dict(width=384, depth=12, num_heads=6)
_BASE = dict(width=768, depth=12, num_heads=12)
_DINOV2 = dict(patch_size=14, image_size=518, num_classes=0, layer_scale=1e-5)
_JETMOE = dict(
    pool='avg',
    moe_blocks=(6, 7, 8, 9, 10, 11),
    moe=dict(core_experts=98, universal_experts=196, **SETTINGS['released']),
)

MODELS: dict[str, dict[str, Any]] = {
    'vit_tiny_patch16_224': _TINY,
    'vit_small_patch16_224': _SMALL,
    'vit_base_patch16_224': _BASE,
    'vit_small_patch14_dinov2': _SMALL | _DINOV2,
    'vit_base_patch14_dinov2': _BASE | _DINOV2,
    'vjetmoe_t': _TINY | _JETMOE,
    'vjetmoe_s': _SMALL | _JETMOE,
}


def create_model(name: str, **overrides: Any) -> ViT:
    """A model by name; `moe` overrides are merged into the entry's own.

    Raises:
      UserError: the name or an override is unknown; the nearest known one is named.
    """
    attributes = dict(MODELS[known_key('model', name, MODELS)])
    for key in overrides:
        known_key('model attribute', key, ViT.__dataclass_fields__)
    moe = dict(attributes.get('moe') or {}) | dict(overrides.pop('moe', None) or {})
    return ViT(**(attributes | overrides | ({'moe': moe} if moe else {})))


def model_spec(model: ViT) -> dict[str, Any]:
    """A model's attributes as plain JSON values, for `from_spec`."""
    names = [name for name in ViT.__dataclass_fields__ if name not in ('parent', 'name', 'dtype')]
    spec = {name: getattr(model, name) for name in names}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in spec.items()}


def from_spec(spec: Mapping[str, Any], **overrides: Any) -> ViT:
    """The model of a `model_spec`."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in spec.items()}
    if overrides.get('moe') and values['moe']:
        overrides['moe'] = values['moe'] | dict(overrides['moe'])
    return ViT(**(values | overrides))
