"""Names and layouts: our parameter paths <-> timm's (dense ViT) and MoE Jetpack's (MoE blocks).

timm keeps linear weights as (out, in) and convolutions as (out, in, height, width); the released
MoE Jetpack files stack experts in front of that. This table is the only place that knows.
"""

import re
from collections.abc import Sequence

import numpy as np

from jetmoe_jax.errors import UserError

# Path of a module -> name of its tensors; `*` stands for a block's number.
_MODULES = {
    'patch_embed': 'patch_embed.proj',
    'norm_pre': 'norm_pre',
    'norm': 'norm',
    'fc_norm': 'fc_norm',
    'head': 'head',
    'blocks_*/norm1': 'blocks.*.norm1',
    'blocks_*/norm2': 'blocks.*.norm2',
    'blocks_*/ls1': 'blocks.*.ls1',
    'blocks_*/ls2': 'blocks.*.ls2',
    'blocks_*/attn/qkv': 'blocks.*.attn.qkv',
    'blocks_*/attn/q_norm': 'blocks.*.attn.q_norm',
    'blocks_*/attn/k_norm': 'blocks.*.attn.k_norm',
    'blocks_*/attn/proj': 'blocks.*.attn.proj',
    'blocks_*/mlp/fc1': 'blocks.*.mlp.fc1',
    'blocks_*/mlp/fc2': 'blocks.*.mlp.fc2',
    'blocks_*/moe/query_norm': 'blocks.*.mlp.slot_norm',
    'blocks_*/moe/core_experts/mlp/fc1': 'blocks.*.mlp.core_experts.vit_fc1',
    'blocks_*/moe/core_experts/mlp/fc2': 'blocks.*.mlp.core_experts.vit_fc2',
    'blocks_*/moe/universal_experts/mlp/fc1': 'blocks.*.mlp.univ_experts.vit_fc1',
    'blocks_*/moe/universal_experts/mlp/fc2': 'blocks.*.mlp.univ_experts.vit_fc2',
    'blocks_*/moe/key_projection': 'blocks.*.mlp.phi_key_proj',
    'blocks_*/moe/query_projection': 'blocks.*.mlp.phi_query_proj',
}
_LEAVES = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias', 'gamma': 'gamma'}
_PROJECTION_LEAVES = {'scale': 'gamma', 'bias': 'beta'}
_BLOCK = re.compile(r'blocks_(\d+)')


def tensor_names(path: str) -> tuple[str, ...]:
    """Names of the tensors that hold a parameter: one, but two for the temperatures.

    Raises:
      KeyError: the path is not a parameter of any model here.
    """
    block = _BLOCK.match(path)
    generic = _BLOCK.sub('blocks_*', path)
    module, _, leaf = generic.rpartition('/')
    if not module:
        names = [generic]
    elif generic == 'blocks_*/moe/phi':
        names = ['blocks.*.mlp.phi']
    elif generic == 'blocks_*/moe/temperature':
        names = ['blocks.*.mlp.scales.0', 'blocks.*.mlp.scales.1']
    else:
        leaves = _PROJECTION_LEAVES if module.endswith('_projection') else _LEAVES
        names = [f'{_MODULES[module]}.{leaves[leaf]}']
    return tuple(name.replace('*', block[1]) if block else name for name in names)


def to_tensors(path: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter -> its tensors by name, in the file's layout.

    Raises:
      UserError: it is a temperature that both softmaxes share; the files hold two.
    """
    names = tensor_names(path)
    if len(names) > 1:
        if len(value) != len(names):
            raise UserError(
                f"{path} is one shared temperature, and MoE Jetpack's files hold two; keep the "
                'model in a folder instead.'
            )
        return dict(zip(names, value, strict=True))
    if path == 'patch_embed/kernel':
        p = round((value.shape[0] / 3) ** 0.5)
        return {names[0]: value.reshape(p, p, 3, -1).transpose(3, 2, 0, 1)}
    return {names[0]: _swap_in_and_out(path, value)}


def from_tensors(path: str, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The inverse of `to_tensors`: the tensors that hold a parameter, in order -> its value."""
    if len(tensors) > 1:
        return np.stack(tensors)
    if path == 'patch_embed/kernel':
        return tensors[0].transpose(2, 3, 1, 0).reshape(-1, tensors[0].shape[0])
    return _swap_in_and_out(path, tensors[0])


def _swap_in_and_out(path: str, value: np.ndarray) -> np.ndarray:
    return np.swapaxes(value, -1, -2) if path.endswith('/kernel') else value
