"""ViT and DINOv2 in Hugging Face transformers' names, and DINOv2 in its own, as timm's state dicts.

Names: modeling_vit.py, modeling_dinov2.py and modeling_dinov2_with_registers.py of transformers, in
the spelling up to release 4 and the shorter one of release 5 (conversion_mapping.py has both), and
dinov2/models/vision_transformer.py of facebookresearch/dinov2. The package itself is not needed.
"""

import re
from dataclasses import replace

from jetmoe_jax.checkpoints.tensors import StateDict, join_qkv
from jetmoe_jax.errors import UserError

_NAMES = {
    'embeddings.cls_token': 'cls_token',
    'embeddings.distillation_token': 'dist_token',
    'embeddings.mask_token': 'mask_token',
    'embeddings.register_tokens': 'register_tokens',
    'embeddings.position_embeddings': 'pos_embed',
}
_MODULES = {
    'embeddings.patch_embeddings.projection': 'patch_embed.proj',
    'layernorm': 'norm',
    'classifier': 'head',
}
_BLOCK_MODULES = {
    'layernorm_before': 'norm1',
    'layernorm_after': 'norm2',
    'norm1': 'norm1',
    'norm2': 'norm2',
    'attention.attention.query': 'attn.q',
    'attention.attention.key': 'attn.k',
    'attention.attention.value': 'attn.v',
    'attention.output.dense': 'attn.proj',
    'attention.q_proj': 'attn.q',
    'attention.k_proj': 'attn.k',
    'attention.v_proj': 'attn.v',
    'attention.o_proj': 'attn.proj',
    'intermediate.dense': 'mlp.fc1',
    'output.dense': 'mlp.fc2',
    'mlp.fc1': 'mlp.fc1',
    'mlp.fc2': 'mlp.fc2',
    'mlp.weights_in': 'mlp.w12',
    'mlp.weights_out': 'mlp.w3',
    'layer_scale1': 'ls1',
    'layer_scale2': 'ls2',
}
_LEAVES = {'weight': 'weight', 'bias': 'bias', 'lambda1': 'gamma'}
_BLOCK = re.compile(r'(?:encoder\.)?layers?\.(\d+)\.(.+)\.(\w+)')

# The default of transformers' image processor for ViT; DINOv2 has ImageNet's, as we do.
_VIT_HINTS = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def from_transformers(state: StateDict) -> StateDict:
    """timm's names for transformers', q, k and v joined; another state dict is returned as it is.

    Names that are not in the tables stay, so that loading refuses them by name.

    Raises:
      UserError: two tensors get the same name, or a query has no key or value.
    """
    if 'embeddings.patch_embeddings.projection.weight' not in state.tensors:
        return state
    tensors, left_out = {}, dict(state.left_out)
    for name, value in state.tensors.items():
        if name.startswith('pooler.'):
            left_out[name] = 'the pooler stands beside the classifier, which does not read it'
            continue
        timm_name = _timm_name(name)
        if timm_name in tensors:
            raise UserError(f'{state.path} has two tensors for {timm_name}; {name} is the second.')
        tensors[timm_name] = value
    width = tensors['patch_embed.proj.weight'].shape[0]
    if 'head.weight' in tensors and tensors['head.weight'].shape[1:] == (2 * width,):
        why = 'the classifier reads the class token and the mean of the patches side by side'
        left_out |= {f'classifier.{leaf}': why for leaf in ('weight', 'bias')}
        tensors = {name: v for name, v in tensors.items() if not name.startswith('head.')}
    hints = ({} if 'blocks.0.ls1.gamma' in tensors else _VIT_HINTS) | dict(state.hints)
    tensors = join_qkv(tensors, state.path)
    return replace(state, tensors=tensors, hints=hints, left_out=left_out)


def from_dinov2(state: StateDict) -> StateDict:
    """timm's tensors for what only DINOv2 has: a mask token, and registers without positions.

    DINOv2 adds positions to the class token and the patches and puts the registers between them. In
    timm's models with registers the class token has no position either: it is added to the token.
    """
    tensors, left_out = dict(state.tensors), dict(state.left_out)
    if tensors.pop('mask_token', None) is not None:
        left_out['mask_token'] = 'the mask token is only used in pre-training'
    if {'register_tokens', 'cls_token', 'pos_embed'} <= tensors.keys():
        tensors['reg_token'] = tensors.pop('register_tokens')
        tensors['cls_token'] = tensors['cls_token'] + tensors['pos_embed'][:, :1]
        tensors['pos_embed'] = tensors['pos_embed'][:, 1:]
    return replace(state, tensors=tensors, left_out=left_out)


def _timm_name(name: str) -> str:
    module, _, leaf = name.rpartition('.')
    if name in _NAMES:
        return _NAMES[name]
    if module in _MODULES and leaf in _LEAVES:
        return f'{_MODULES[module]}.{_LEAVES[leaf]}'
    if (m := _BLOCK.fullmatch(name)) and m[2] in _BLOCK_MODULES and m[3] in _LEAVES:
        return f'blocks.{m[1]}.{_BLOCK_MODULES[m[2]]}.{_LEAVES[m[3]]}'
    return name
