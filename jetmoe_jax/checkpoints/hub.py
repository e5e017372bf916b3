"""timm's checkpoints on the Hugging Face hub, and what a `config.json` says beside the weights."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jetmoe_jax.errors import UserError

WEIGHTS = 'model.safetensors'
CONFIG = 'config.json'

_NAME = re.compile(r'timm/[\w.-]+|(vit|deit3?|flexivit|convnext)_\w+(\.\w+)?')

# Heads where they are not 64 wide, by the start of the name (timm/models/vision_transformer.py).
_HEADS = {'vit_so400m': 16, 'vit_huge': 16, 'vit_giant': 16, 'vit_gigantic': 16}


def is_hub_name(source: str) -> bool:
    """Whether a string looks like `timm/NAME`, or like the name of a ViT or ConvNeXt of timm."""
    return _NAME.fullmatch(source) is not None


def download(name: str, revision: str | None = None) -> Path:
    """The path of a timm model's weights in the hub's cache, fetched where they are not there yet.

    The cache's place and the offline mode are those of huggingface_hub (HF_HOME, HF_HUB_OFFLINE).

    Args:
      name: `timm/NAME` or NAME.
      revision: a branch, a tag or a commit.

    Raises:
      UserError: there is no such model or revision, or the hub cannot be reached.
    """
    repo = f'timm/{name.removeprefix("timm/")}'
    at = f' at revision {revision!r}' if revision else ''
    try:
        path = Path(hf_hub_download(repo, WEIGHTS, revision=revision))
        _fetch_config(repo, revision)
    except RevisionNotFoundError as error:
        raise UserError(f'{repo} on the Hugging Face hub has no revision {revision!r}.') from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f'there is no public model {repo} on the Hugging Face hub; check the name and its tag '
            '(as in vit_small_patch16_224.augreg_in21k).'
        ) from error
    except RemoteEntryNotFoundError as error:
        raise UserError(f'{repo}{at} on the Hugging Face hub has no {WEIGHTS}.') from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = constants.is_offline_mode()
        why = 'HF_HUB_OFFLINE is set' if offline else 'the Hugging Face hub cannot be reached'
        raise UserError(
            f'{repo}{at} is not in the cache {constants.HF_HUB_CACHE}, and {why}; download '
            f'{WEIGHTS} and {CONFIG} of the model {repo} from huggingface.co into one folder, and '
            f'give the path of that {WEIGHTS} in place of the name (INPUT or --config.dense=PATH).'
        ) from error
    return path


def hints_beside(path: Path) -> dict[str, Any]:
    """What the configuration beside weights says that shapes cannot, where named as on the hub.

    Returns:
      Attributes of the model, and mean and std; empty when there are no such files.

    Raises:
      UserError: a configuration is damaged, or asks for an activation other than GELU.
    """
    if path.name not in (WEIGHTS, 'pytorch_model.bin'):
        return {}
    config = _read_json(path.with_name(CONFIG))
    if 'architecture' in config:
        return _timm_hints(config, path)
    hints: dict[str, Any] = {}
    if 'num_attention_heads' in config:
        _check_activation(config.get('hidden_act', 'gelu'), path)
        hints['num_heads'] = config['num_attention_heads']
    processor = _read_json(path.with_name('preprocessor_config.json'))
    for ours, theirs in (('mean', 'image_mean'), ('std', 'image_std')):
        if theirs in processor:
            hints[ours] = tuple(processor[theirs])
    return hints


def _timm_hints(config: dict[str, Any], path: Path) -> dict[str, Any]:
    pretrained = config.get('pretrained_cfg') or config  # older files have its entries at the top
    hints: dict[str, Any] = {k: tuple(pretrained[k]) for k in ('mean', 'std') if k in pretrained}
    architecture = config['architecture']
    if architecture.startswith('convnext'):
        return hints
    arguments = config.get('model_args') or {}
    quick = 'quick_gelu' if 'quickgelu' in architecture else 'gelu'
    _check_activation(arguments.get('act_layer', quick), path)
    if config.get('global_pool') in ('token', 'avg'):
        hints['pool'] = config['global_pool']
    heads = next((n for start, n in _HEADS.items() if architecture.startswith(start)), None)
    if heads := arguments.get('num_heads', heads):
        hints['num_heads'] = heads
    height, width = pretrained.get('input_size', (3, 0, 0))[1:]
    if height != width:  # the rows of a position embedding tell the size of a square alone
        hints['image_size'] = (height, width)
    return hints


def _check_activation(name: str, path: Path) -> None:
    if name != 'gelu':
        raise UserError(
            f'{path.with_name(CONFIG)} asks for the activation {name!r}; only GELU is supported.'
        )


def _fetch_config(repo: str, revision: str | None) -> None:
    # Without it the weights load too, with what their shapes tell alone.
    with contextlib.suppress(EntryNotFoundError):
        hf_hub_download(repo, CONFIG, revision=revision)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding='utf-8')))
    except ValueError as error:
        raise UserError(
            f'{path} is not valid JSON ({error}); copy or download it again.'
        ) from error
