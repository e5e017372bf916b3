"""How far a MoE layer's output is from that of the dense MLP that it replaces.

For an image and a MoE block, with x (n d) the input of the block's MLP in the dense model of the
successor's own width (the same-size checkpoint, or the reduced predecessor):

    error = |moe(x) - mlp(x)| / |mlp(x)|

|.| is the Frobenius norm, over tokens and channels; both as in evaluation, without dropout or
noise. 0: the same output; 1: as far off as no output at all.
"""

import functools
from collections.abc import Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jetmoe_jax.models.parameters import FlatParams, unflatten
from jetmoe_jax.models.registry import Model
from jetmoe_jax.moe.mlp import Mlp
from jetmoe_jax.recycling.collect import sow


class Replacement:
    """The MLPs that a successor's MoE layers replace, with their inputs on some images.

    Args:
      successor: the model with MoE layers.
      dense, params: its dense counterpart.
      batches: normalised images (b height width 3).
    """

    def __init__(
        self, successor: Model, dense: Model, params: FlatParams, batches: Iterable[np.ndarray]
    ):
        self._successor, self._params = successor, params
        self._inputs: dict[str, list[np.ndarray]] = {b: [] for b in successor.moe_paths}

        @jax.jit
        def inputs(params: FlatParams, images: jax.Array) -> dict[str, jax.Array]:
            sown = sow(dense, params, images)
            return {block: sown[block]['mlp_input'] for block in successor.moe_paths}

        for images in batches:
            for block, x in inputs(params, images).items():
                self._inputs[block].append(np.asarray(x))

    def error(self, block: str, moe: FlatParams) -> float:
        """The mean error over images of a block, whose MoE layer has the given parameters."""
        layer = self._successor.moe_layer(block)
        if hasattr(layer, 'expert_dropout'):  # differs by block: each would be compiled
            layer = layer.clone(expert_dropout=0.0)
        moe, mlp = (
            jax.device_put(_below(prefix, params))
            for prefix, params in ((f'{block}/moe/', moe), (f'{block}/mlp/', self._params))
        )
        errors = [relative_errors(layer, moe, mlp, x) for x in self._inputs[block]]
        return float(np.mean(np.concatenate(errors)))


@functools.partial(jax.jit, static_argnums=0)
def relative_errors(layer: nn.Module, moe: FlatParams, mlp: FlatParams, x: jax.Array) -> jax.Array:
    """The errors of images x (b n d): (b,)."""
    y = Mlp(mlp['fc1']['kernel'].shape[1]).apply({'params': mlp}, x)
    return _norms(layer.apply({'params': moe}, x) - y) / _norms(y)


def _norms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2)))


def _below(prefix: str, params: FlatParams) -> dict:
    inside = {p.removeprefix(prefix): v for p, v in params.items() if p.startswith(prefix)}
    return unflatten(inside)
