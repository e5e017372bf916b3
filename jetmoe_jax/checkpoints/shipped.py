"""The two dense ViTs that ship with the package, pre-trained by configs/pretrain_digits.py."""

from pathlib import Path

from jetmoe_jax.errors import known_key

FOLDER = Path(__file__).parent / 'weights'
NAMES = ('digits_vit_96', 'digits_vit_48')


def shipped_path(name: str) -> str:
    """Path of a shipped `.safetensors` file; a UserError names the nearest if there is none."""
    return str(FOLDER / f'{known_key("shipped checkpoint", name, NAMES)}.safetensors')
