"""The one exception class that the library raises on a user's mistake, and checks that raise it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's, told in one finished sentence; commands print it and exit 1."""


def known_key(what: str, name: str, known: Iterable[str]) -> str:
    """`name` if it is known; otherwise an error that names the nearest that is."""
    known = list(known)
    if name in known:
        return name
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f'the nearest known one is {nearest[0]!r}' if nearest else 'there is none'
    raise UserError(f'{what} {name!r} does not exist; {hint}.')
