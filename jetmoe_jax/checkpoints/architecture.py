"""The model that a state dict belongs to, read from its tensors' names and shapes."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jetmoe_jax.checkpoints.convnext import infer_convnext
from jetmoe_jax.checkpoints.tensors import check_names
from jetmoe_jax.errors import UserError, known_key
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.layers import as_pair
from jetmoe_jax.models.vit import ViT

HEAD_WIDTH = 64  # every ViT of the paper, DeiT and DINOv2 has heads of this width

# CaiT's initial value for up to 18 blocks; it matters only where a layer scale is made afresh.
LAYER_SCALE_INIT = 0.1

_UNSUPPORTED = {
    r'dist_token|head_dist': 'a distillation token',
    r'relative_position|rel_pos': 'a relative position bias',
    r'\.gamma_1$|\.gamma_2$': "BEiT's layer scale",
    r'^layers\.\d+\.': 'window attention or another family of model',
    r'mlp\.w12|mlp\.fc1_g|mlp\.gate': 'a gated MLP (SwiGLU)',
    r'attn\.q_bias|attn\.q_proj': 'separate query, key and value weights',
}


def infer_model(tensors: Mapping[str, np.ndarray], source: str, **given: Any) -> ViT | ConvNeXt:
    """The model of a state dict in timm's or MoE Jetpack's names.

    Args:
      tensors: the state dict.
      source: its name in error messages.
      **given: attributes of the model that the caller knows (num_heads, pool, image_size, ...).

    Raises:
      UserError: the state dict is of no supported model, or it has no such attribute.
    """
    family, infer = (ViT, infer_vit)
    if 'stem.0.weight' in tensors:
        family, infer = (ConvNeXt, infer_convnext)
    for name in given:
        known_key('model attribute', name, family.__dataclass_fields__)
    return infer(tensors, source, **given)


def infer_vit(tensors: Mapping[str, np.ndarray], source: str, **given: Any) -> ViT:
    """The ViT that a timm- or MoE Jetpack-named state dict belongs to.

    Args:
      tensors: the state dict.
      source: its name in error messages.
      **given: attributes of ViT that the caller knows (num_heads, pool, image_size, ...); they win.

    Raises:
      UserError: the state dict is not that of a ViT in a supported variant.
    """
    needed = ('patch_embed.proj.weight', 'pos_embed', 'blocks.0.attn.qkv.weight')
    check_names(tensors, source, 'ViT', _UNSUPPORTED, needed)
    shape = {name: np.shape(value) for name, value in tensors.items()}
    if len(shape['patch_embed.proj.weight']) != 4:
        raise UserError(
            f'{source}: patch_embed.proj.weight has shape {shape["patch_embed.proj.weight"]}, '
            'expected (width, 3, patch, patch).'
        )
    width, _, patch_size, _ = shape['patch_embed.proj.weight']
    depth = 1 + max(int(m[1]) for name in shape if (m := re.match(r'blocks\.(\d+)\.', name)))
    moe_blocks = tuple(i for i in range(depth) if f'blocks.{i}.mlp.phi' in shape)
    # The dense width: as given, or of a dense block, or of the experts where all blocks are MoE.
    dense = next((v[0] for n, v in shape.items() if n.endswith('.mlp.fc1.weight')), 0)
    core = next((v[1] for n, v in shape.items() if n.endswith('core_experts.vit_fc1.weight')), 0)
    hidden = round(given.get('mlp_ratio', 0) * width) or dense or core
    if not hidden:
        raise UserError(f'{source} has no tensor blocks.0.mlp.fc1.weight, and no core experts.')

    attributes = dict(
        patch_size=patch_size,
        width=width,
        depth=depth,
        num_heads=given.get('num_heads') or _heads(shape, width, source),
        mlp_ratio=hidden / width,
        num_classes=shape['head.weight'][0] if 'head.weight' in shape else 0,
        pool='avg' if 'fc_norm.weight' in shape else 'token',
        class_token='cls_token' in shape,
        reg_tokens=shape['reg_token'][1] if 'reg_token' in shape else 0,
        layer_scale=LAYER_SCALE_INIT if 'blocks.0.ls1.gamma' in shape else None,
        qk_norm='blocks.0.attn.q_norm.weight' in shape,
        pre_norm='norm_pre.weight' in shape,
        moe_blocks=moe_blocks,
        moe=_infer_moe(shape, moe_blocks[0], hidden) if moe_blocks else None,
    )
    if not attributes['class_token']:
        attributes['pool'] = 'avg'
    prefix = attributes['class_token'] + attributes['reg_tokens']
    rows = shape['pos_embed'][1]
    # Whether the prefix has rows of its own shows in the patch grid: the given one, or a square.
    if 'image_size' in given:
        rows_and_columns = [pixels // patch_size for pixels in as_pair(given['image_size'])]
        patches = math.prod(rows_and_columns)
    else:
        patches = 0
    if rows not in (patches, patches + prefix):
        candidates = [rows] if given.get('no_embed_class') else [rows - prefix, rows]
        patches = next((n for n in candidates if _square(n)), 0)
        attributes['image_size'] = round(patches**0.5) * patch_size
    if not patches:
        raise UserError(
            f'{source}: pos_embed has {rows} rows, which is no square grid; give the image_size.'
        )
    attributes['no_embed_class'] = prefix > 0 and rows == patches
    if 'moe' in given:
        if attributes['moe'] is None:
            raise UserError(f'{source} has no MoE layer; leave --combine out.')
        given['moe'] = attributes['moe'] | dict(given['moe'])
    return ViT(**(attributes | given))


def _heads(shape: Mapping[str, tuple[int, ...]], width: int, source: str) -> int:
    """From the width of a query's norm, or of a usual head."""
    if 'blocks.0.attn.q_norm.weight' in shape:
        return width // shape['blocks.0.attn.q_norm.weight'][0]
    if width % HEAD_WIDTH:
        raise UserError(
            f'{source} is {width} channels wide, no multiple of the usual {HEAD_WIDTH} of a head; '
            'give --num_heads.'
        )
    return width // HEAD_WIDTH


def _infer_moe(shape: Mapping[str, tuple[int, ...]], block: int, hidden: int) -> dict[str, Any]:
    prefix = f'blocks.{block}.mlp.'
    core = shape.get(prefix + 'core_experts.vit_fc1.weight', (0, 0, 0))
    universal = shape.get(prefix + 'univ_experts.vit_fc1.weight', (0, 0, 0))
    wide = core[1] or hidden
    return dict(
        core_experts=core[0],
        universal_experts=universal[0],
        hidden_factor=wide / hidden,
        universal_factor=universal[1] / wide if universal[1] else 0.25,
        slots_per_expert=shape[prefix + 'phi'][1],
        query_norm=prefix + 'slot_norm.weight' in shape,
        projections=prefix + 'phi_key_proj.gamma' in shape,
    )


def _square(n: int) -> bool:
    return n > 0 and round(n**0.5) ** 2 == n
