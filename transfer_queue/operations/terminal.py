"""Text for a terminal, from values that somebody else wrote: no control or direction signs reach it."""

from __future__ import annotations

from typing import Any


def plain(value: Any, width: int = 120) -> str:
    """`value` on one line of at most `width` characters; whatever is not printable is shown by its code."""
    if isinstance(value, bytes):
        value = value[: width + 1].decode("latin-1")
    text = value if isinstance(value, str) else repr(value)
    shown = "".join(sign if sign.isprintable() else _code(sign) for sign in text[: width + 1])
    return shown if len(shown) <= width else shown[: max(0, width - 3)] + "..."


def _code(sign: str) -> str:
    return sign.encode("unicode_escape").decode() if ord(sign) > 126 or ord(sign) < 32 else f"\\x{ord(sign):02x}"


def size(nbytes: float) -> str:
    """ "17 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if nbytes >= 10 or nbytes == int(nbytes) else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: int, noun: str) -> str:
    """ "1 client", "2 clients"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def age(seconds: float) -> str:
    """ "3 h"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def table(rows: list[list[str]]) -> str:
    """Columns aligned; the first row is the heading."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
