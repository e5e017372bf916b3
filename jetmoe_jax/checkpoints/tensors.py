"""A state dict in memory, and the renamings that more than one format needs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jetmoe_jax.errors import UserError

# Tensors that every ViT of transformers, ViT of timm and ConvNeXt of timm has, in this order; what
# stands before one of them is the prefix of a model wrapped into another module.
_ANCHORS = (
    'embeddings.patch_embeddings.projection.weight',
    'patch_embed.proj.weight',
    'stem.0.weight',
)


@dataclass(frozen=True)
class StateDict:
    """Tensors by name, as a file holds them, and what the file says about itself.

    Attributes:
      path: the file or the hub's name, for messages.
      tensors: in PyTorch's layout and the file's dtype; they may be read-only views of the file.
      hints: what shapes cannot tell: attributes of the model (num_heads, pool, ...), mean and std.
      left_out: entries of the file that are not among `tensors`, by name, with the reason.
    """

    path: str
    tensors: Mapping[str, np.ndarray]
    hints: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def unreadable(path: Path, expected: str, why: object) -> UserError:
    """The error for a file whose content is not what its name says."""
    return UserError(
        f'{path} ({path.stat().st_size:,} bytes) cannot be read as {expected}: {why}; '
        'it may be cut off or of another format: copy or download it again.'
    )


def strip_prefix(state: StateDict) -> StateDict:
    """Takes a prefix such as `module.` or `model.vit.` off the names, off a head's beside it too.

    Raises:
      UserError: there are several models in the file, or two names become the same.
    """
    for anchor in _ANCHORS:
        prefixes = [name.removesuffix(anchor) for name in state.tensors if name.endswith(anchor)]
        prefixes = [prefix for prefix in prefixes if not prefix or prefix.endswith('.')]
        if prefixes:
            break
    if len(prefixes) > 1:
        raise UserError(
            f'{state.path} holds {len(prefixes)} models, under the prefixes '
            f'{", ".join(map(repr, prefixes))}; save the one that is wanted in a file of its own.'
        )
    if prefixes in ([], ['']):
        return state
    modules = prefixes[0].split('.')[:-1]
    tensors = {_without(modules, name): value for name, value in state.tensors.items()}
    if len(tensors) < len(state.tensors):
        raise UserError(
            f'{state.path} has tensors whose names are the same without the prefix '
            f'{prefixes[0]!r}; save the model that is wanted in a file of its own.'
        )
    return replace(state, tensors=tensors)


def join_qkv(tensors: Mapping[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
    """Joins `*.attn.q.*`, `*.attn.k.*` and `*.attn.v.*` into timm's `*.attn.qkv.*`, rows in order.

    Raises:
      UserError: a query has no key or no value.
    """
    joined = {}
    for name, value in tensors.items():
        part = re.search(r'\.attn\.([qkv])\.', name)
        if part is None:
            joined[name] = value
        elif part[1] == 'q':
            names = [name.replace('.attn.q.', f'.attn.{letter}.') for letter in 'qkv']
            for other in names:
                if other not in tensors:
                    raise UserError(
                        f'{source} has the attention query {name} and no {other}; all of query, '
                        'key and value are needed (names given as blocks.N.attn.q, k, v).'
                    )
            joined[name.replace('.attn.q.', '.attn.qkv.')] = np.concatenate(
                [tensors[other] for other in names]
            )
    return joined


def check_names(
    tensors: Mapping[str, np.ndarray],
    source: str,
    family: str,
    unsupported: Mapping[str, str],
    needed: Sequence[str],
) -> None:
    """Refuses a state dict with a tensor that a family has not, or without one that it needs.

    Args:
      unsupported: pattern of a name -> what such a tensor is.
    """
    for pattern, what in unsupported.items():
        for name in tensors:
            if re.search(pattern, name):
                raise UserError(f'{source} has {what} (tensor {name}), which is not supported.')
    for name in needed:
        if name not in tensors:
            raise UserError(
                f'{source} is not a {family} in timm names: it has no tensor {name} '
                f'(its first is {next(iter(tensors), "absent")}).'
            )


def _without(modules: list[str], name: str) -> str:
    for module in modules:
        if not name.startswith(module + '.'):
            break
        name = name.removeprefix(module + '.')
    return name
