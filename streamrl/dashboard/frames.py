"""The frames that all browsers get, once each, in order: the decisions behind the event stream, without I/O.

A frame has a number. A client that knows frame k and asks on gets k+1, k+2, ...; one that knows nothing, or a frame of
another life of the server, or that fell behind what is kept, gets a snapshot, which says after which frame it was
taken. So nobody sees a gap or anything twice, and a client that reads slowly costs no memory: there is one ring for
all.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import NamedTuple

KEPT = 256
"""Frames kept, two minutes of them at two a second."""


class Frame(NamedTuple):
    number: int
    data: bytes


class FrameLog:
    """Invariant: the frames kept have consecutive numbers, the last one is `last`."""

    def __init__(self, kept: int = KEPT, life: str | None = None) -> None:
        self.life = life or secrets.token_hex(4)
        """Names this life of the server in the ids of frames."""
        self.last = 0
        self._frames: deque[Frame] = deque(maxlen=kept)

    def add(self, data: bytes) -> None:
        self.last += 1
        self._frames.append(Frame(self.last, data))

    def forget(self) -> None:
        """What is kept explains the state no more (too much came at once): everybody needs a snapshot."""
        self.last += 1
        self._frames.clear()

    def after(self, number: int | None) -> list[Frame] | None:
        """The frames after `number`; None: a snapshot is needed."""
        if number is None or number > self.last:
            return None
        if number == self.last:
            return []
        if not self._frames or self._frames[0].number > number + 1:
            return None
        return [frame for frame in self._frames if frame.number > number]

    def id_of(self, number: int) -> str:
        return f"{self.life}.{number}"

    def number_of(self, identity: str) -> int | None:
        """The number of an id, as a browser repeats it in Last-Event-ID; None if it is not of this life."""
        life, _, number = identity.partition(".")
        return int(number) if life == self.life and number.isascii() and number.isdigit() and len(number) < 16 else None
