"""The one place where keys are made and split.

A prompt group has key `{uid}`; a trajectory row has key `{uid}_{session}_{index}`: session is which of the n
samples of the prompt, index is which output of that session.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from transfer_queue.errors import Invalid

UNNAMED = "\0"
"""What keys and partitions begin with that nobody named: rows put without keys, loads under way. No listing shows them,
and no name that a caller gives may begin so."""

LOADING = f"{UNNAMED}load."
"""What partitions begin with while a load of a checkpoint fills them."""


_OWN = {
    "key": re.compile(r"\0[0-9a-f]{16}\.[0-9]{1,18}"),
    "partition": re.compile(r"\0load\.[0-9a-f]{1,64}(\.[0-9]{1,18})?"),
}


def unnamed_keys(count: int) -> list[str]:
    """Keys of so many rows that nobody names."""
    stem = f"{UNNAMED}{secrets.token_hex(8)}"
    return [f"{stem}.{i}" for i in range(count)]


def check_given(what: str, name: str) -> None:
    """Raises Invalid for a name (of a key, partition, uid, task, field or holder) that begins with a NUL and was not
    made here."""
    if name[:1] == UNNAMED and not (what in _OWN and _OWN[what].fullmatch(name)):
        raise Invalid(f"{what} {name[:40]!r} begins with a NUL; such names are the queue's own")


class RowKey(NamedTuple):
    uid: str
    session: int
    index: int


def row_key(uid: str, session: int, index: int = 0) -> str:
    """The key of output `index` of session `session` of prompt group `uid`."""
    return f"{uid}_{session}_{index}"


def split_row_key(key: str) -> RowKey:
    """The parts of a trajectory row's key. Raises Invalid for a key that is none."""
    parts = try_split_row_key(key)
    if parts is None:
        raise Invalid(f"{key!r} is not a trajectory key; expected '<uid>_<session>_<index>'")
    return parts


def try_split_row_key(key: str) -> RowKey | None:
    """The parts of a trajectory row's key, or None for a key that is none."""
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not parts[0]:
        return None
    digits = parts[1] + parts[2]
    if not (parts[1] and parts[2] and digits.isascii() and digits.isdigit() and len(digits) <= 36):
        return None
    return RowKey(parts[0], int(parts[1]), int(parts[2]))


def prompt_uid(epoch: int, position: int) -> str:
    """The uid of the prompt at `position` of the shuffled dataset in `epoch`: the same after every restart."""
    return f"e{epoch}p{position:07d}"


_PROMPT_UID = re.compile(r"e(0|[1-9][0-9]{0,8})p([0-9]{7}|[1-9][0-9]{7,15})")


def split_prompt_uid(uid: str) -> tuple[int, int] | None:
    """(epoch, position) of a uid made by `prompt_uid`, or None for any other uid. Exactly its inverse."""
    match = _PROMPT_UID.fullmatch(uid)
    return (int(match[1]), int(match[2])) if match else None
