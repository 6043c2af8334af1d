"""What the other side of a connection says, made fit for an error message: short, printable, and without our key.

A service may repeat the key that it does not like: whole, in part, or as JSON, HTML, URLs or base64 write it.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

PART = 6
"""Characters of a secret that are told by nobody: a run of text in which so many of them stand in a row is hidden."""

_READ = 1 << 14
_ROUNDS = 4
_JSON_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|([/"\\]))')
_BORDERS = frozenset(" \"'<>{}[](),;")


class Hiding:
    """`hide(text)` is the text with three stars in place of every word that has a part of a secret in it."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._parts: dict[int, set[str]] = {}
        for form in {form for secret in secrets for form in _forms(secret)}:
            size = min(PART, len(form))
            parts = (form[at : at + size].lower() for at in range(len(form) - size + 1))
            self._parts.setdefault(size, set()).update(parts)

    def __call__(self, text: str | bytes, most: int = 300) -> str:
        """Hidden first, then cut to `most` characters."""
        given = text[:_READ]
        plain = _plain(given.decode("utf-8", "replace") if isinstance(given, bytes) else given)
        shown, end = [], 0
        for first, last in self._found(plain):
            while first > end and plain[first - 1] not in _BORDERS:
                first -= 1
            if first >= end:
                shown += [plain[end:first], "***"]
            end = max(end, last)
            while end < len(plain) and plain[end] not in _BORDERS:
                end += 1
        return "".join([*shown, plain[end:]])[:most]

    def _found(self, plain: str) -> Iterator[tuple[int, int]]:
        for at in range(len(plain)):
            for size, parts in self._parts.items():
                if plain[at : at + size].lower() in parts:
                    yield at, at + size


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield _plain(secret)
    given = secret.encode()
    forms = [given.hex()]
    for before in range(3):  # bytes in front of it that share its first group of three
        encoded = base64.b64encode(bytes(before) + given).decode().rstrip("=")
        own = encoded[-(-before * 8 // 6) : (before + len(given)) * 8 // 6]  # digits that its bits alone decide
        forms += [own, own.replace("+", "-").replace("/", "_")]
    yield from (form for form in forms if len(form) >= PART)


def _plain(text: str) -> str:
    """Without the ways in which JSON, URLs and HTML write a character, and without what cannot be printed."""
    for _ in range(_ROUNDS):
        read = html.unescape(unquote(_JSON_ESCAPE.sub(lambda found: found[2] or chr(int(found[1], 16)), text)))
        if read == text:
            break
        text = read
    return "".join(each if each.isprintable() else " " * each.isspace() for each in text)
