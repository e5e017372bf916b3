"""The cost model: parameters and multiply-adds of a model, counted from its shapes."""

from dataclasses import dataclass

from jetmoe_jax.models.parameters import param_count
from jetmoe_jax.models.vit import ViT


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-adds of one image's forward pass (products of matrices only)."""

    parameters: int
    multiply_adds: int

    def __str__(self) -> str:
        return f'{self.parameters:,} parameters, {self.multiply_adds / 1e9:.3g} G multiply-adds'


def vit_cost(model: ViT) -> Cost:
    """Counts a ViT, dense or with SpheroMoE blocks."""
    n, d, h = model.num_tokens, model.width, model.mlp_hidden
    patches = model.grid[0] * model.grid[1]
    total = patches * model.patch_size**2 * 3 * d + d * model.num_classes
    attention = n * d * 3 * d + 2 * n * n * d + n * d * d
    for block in range(model.depth):
        total += attention
        if block not in model.moe_blocks:
            total += 2 * n * d * h
            continue
        layer = model.moe_layer(block)
        slots = layer.slots_per_expert
        paths = layer.path_widths(d).values()
        total += sum(experts * slots * 2 * d * width for experts, width in paths)
        # Logits, dispatch and combine are three products of tokens with slots.
        total += 3 * n * d * slots * sum(experts for experts, _ in paths)
    return Cost(param_count(model), total)
