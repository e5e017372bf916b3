"""The cost model: parameters and multiply-adds of a model, counted from its shapes."""

from dataclasses import dataclass

from jetmoe_jax.models.convnext import KERNEL_SIZE, ConvNeXt
from jetmoe_jax.models.parameters import param_count
from jetmoe_jax.models.registry import MODELS, Model, create_model
from jetmoe_jax.models.vit import ViT


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-adds of one image's forward pass (products, convolutions)."""

    parameters: int
    multiply_adds: int

    def __str__(self) -> str:
        return f'{self.parameters:,} parameters, {self.multiply_adds / 1e9:.3g} G multiply-adds'


def model_cost(model: Model) -> Cost:
    """Counts a ViT or a ConvNeXt, dense or with SpheroMoE blocks."""
    count = _convnext if isinstance(model, ConvNeXt) else _vit
    return Cost(param_count(model), count(model))


def registry_table() -> str:
    """Every model of the registry with its parameters, multiply-adds and experts."""
    lines = [f'{"model":30} {"parameters":>13} {"multiply-adds":>14}  experts of a MoE layer']
    for name in MODELS:
        model = create_model(name)
        cost = model_cost(model)
        paths = [model.moe_layer(p).path_widths(model.blocks[p][0]) for p in model.moe_paths]
        experts = dict.fromkeys('+'.join(str(e) for e, _ in of.values()) for of in paths)
        line = f'{name:30} {cost.parameters:>13,} {cost.multiply_adds / 1e9:>12.2f} G  '
        lines.append((line + ', '.join(experts)).rstrip())
    return '\n'.join(lines)


def _vit(model: ViT) -> int:
    n, d = model.num_tokens, model.width
    patches = model.grid[0] * model.grid[1]
    attention = n * d * 3 * d + 2 * n * n * d + n * d * d
    total = patches * model.patch_size**2 * 3 * d + d * model.num_classes
    return total + sum(attention + _mlp(model, block, n) for block in model.blocks)


def _convnext(model: ConvNeXt) -> int:
    tokens = [rows * columns for rows, columns in model.grids]
    total = tokens[0] * 3 * model.patch_size**2 * model.widths[0]
    total += model.widths[-1] * model.num_classes
    for stage in range(1, len(model.depths)):
        total += tokens[stage] * 4 * model.widths[stage - 1] * model.widths[stage]
    for block, (d, _) in model.blocks.items():
        n = tokens[int(block.removeprefix('stages_').partition('/')[0])]
        total += n * d * KERNEL_SIZE**2 + _mlp(model, block, n)
    return total


def _mlp(model: Model, block: str, n: int) -> int:
    """A block's MLP or MoE layer on n tokens."""
    d, h = model.blocks[block]
    if block not in model.moe_paths:
        return 2 * n * d * h
    return model.moe_layer(block).multiply_adds(n, d)
