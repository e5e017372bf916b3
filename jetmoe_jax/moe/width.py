"""The hidden width of experts, which all layers count in the same way."""

import math

from jetmoe_jax.errors import UserError


def expert_width(hidden: int | None, d: int, factor: float) -> int:
    """Hidden neurons of an expert: `factor` times `hidden`, or times 4 d when that is None.

    Raises:
      UserError: none are left.
    """
    hidden = hidden or 4 * d
    width = round(hidden * factor) if 0 < factor < math.inf else 0
    if not width:
        raise UserError(
            f'experts of {factor:g} times {hidden} hidden neurons have none; '
            'give a larger hidden_factor or universal_factor.'
        )
    return width
