"""The MoE layers by name: the one place where a config's `layer` is looked up."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from jetmoe_jax.errors import known_key
from jetmoe_jax.moe.softmoe import SoftMoE
from jetmoe_jax.moe.sparse import ExpertChoice, TokenChoice
from jetmoe_jax.moe.spheromoe import SpheroMoE

LAYERS: dict[str, type[nn.Module]] = {
    'spheromoe': SpheroMoE,
    'soft': SoftMoE,
    'token_choice': TokenChoice,
    'expert_choice': ExpertChoice,
}


def make_layer(arguments: Mapping[str, Any], **more: Any) -> nn.Module:
    """The layer that `arguments['layer']` names ('spheromoe' by default), of the other arguments.

    Raises:
      UserError: the layer, or an argument of it, is unknown; the nearest known one is named.
    """
    arguments = dict(arguments)
    name = known_key('MoE layer', arguments.pop('layer', 'spheromoe'), LAYERS)
    known = [
        field for field in LAYERS[name].__dataclass_fields__ if field not in ('parent', 'name')
    ]
    for argument in arguments:
        known_key(f'argument of the MoE layer {name}', argument, known)
    return LAYERS[name](**(arguments | more))
