"""Arguments of the clients' verbs that say something else than was meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def names_of(what: str, names: Any) -> list[str]:
    """The names as a list. Raises TypeError for one string, which would be taken letter by letter, and for what is no
    sequence at all."""
    if isinstance(names, str | bytes | bytearray):
        raise TypeError(f"{what}={names[:40]!r} is one {type(names).__name__}; give a list of names: [{names[:40]!r}]")
    if not isinstance(names, Iterable):
        raise TypeError(f"{what} is a {type(names).__name__}; give a list of names")
    return list(names)
