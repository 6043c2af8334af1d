"""What watchers of a partition have to be told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from transfer_queue.ledger.tags import pack, shown
from transfer_queue.net.messages import Group as GroupView

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(GroupView).decode


class ChangeLog:
    """The groups that changed, each once, with the number of its last change.

    Invariants: `seq` grows by one with each change. Whoever knows the state at number s >= `floor` and is told all
    groups in `after(s)` as they are now knows the state at `seq`. At most `limit` groups are remembered.
    """

    def __init__(self, limit: int) -> None:
        self.seq = 0
        self.floor = 0
        self._limit = limit
        self._entries: OrderedDict[str, tuple[int, GroupView | None]] = OrderedDict()

    def note(self, uid: str, final: GroupView | None = None) -> None:
        """The group changed. `final`: how it is to be shown from now on, when its record is about to be forgotten."""
        self.seq += 1
        self._entries[uid] = (self.seq, final)
        self._entries.move_to_end(uid)
        if len(self._entries) > self._limit:
            _, (self.floor, _) = self._entries.popitem(last=False)

    def forget(self, uid: str, final: GroupView) -> None:
        """The record of the group goes, without a change that watchers would see."""
        entry = self._entries.get(uid)
        if entry is not None:
            self._entries[uid] = (entry[0], final)

    def after(self, since: int) -> list[tuple[str, GroupView | None]] | None:
        """(uid, final view or None) of groups changed after `since`, oldest first; None: that is too long ago."""
        if not self.floor <= since <= self.seq:
            return None
        found: list[tuple[str, GroupView | None]] = []
        for uid, (seq, final) in reversed(self._entries.items()):
            if seq <= since:
                break
            found.append((uid, final))
        return found[::-1]

    def first(self, since: int, count: int) -> tuple[list[tuple[str, GroupView | None]], int] | None:
        """`after`, but the oldest `count` at most; and the number of the last change that they tell."""
        found = self.after(since)
        if found is None or len(found) <= count:
            return None if found is None else (found, self.seq)
        return found[:count], self.number(found[count - 1][0])

    def number(self, uid: str) -> int:
        """Of the last change of a group that is remembered."""
        return self._entries[uid][0]

    def dump(self) -> Iterator[list[Any]]:
        """For `load`; see dump.py."""
        entries = [[uid, seq, _encode(final) if final else None] for uid, (seq, final) in self._entries.items()]
        yield [self.seq, self.floor, entries]

    def load(self, section: list[Any]) -> None:
        self.seq, self.floor, entries = section
        for uid, seq, final in entries:
            self._entries[uid] = (seq, _view(final) if final is not None else None)

    def logical_form(self) -> object:
        """Plain values that are equal for logs that will answer equally."""
        return [self.seq, self.floor, list(self._entries.items())]


def _view(data: bytes) -> GroupView:
    """An ended group: it has no rows whose tags would be packed too."""
    view = _decode(data)
    return msgspec.structs.replace(view, tag=shown(pack(view.uid, view.tag)))
