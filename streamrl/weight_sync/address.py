"""Who takes part in a broadcast, as a text that stands where other versions have a path; and who decides it. No I/O.

    collective:{"store": "file:///.../lanes", "version": 5, "ranks": 2}                            from the ranks
    collective:{..., "epoch": 3, "members": 2, "index": 0, "seconds": 120.0}                       to a server
    collective:{..., "epoch": 3, "members": 2, "index": -1, "seconds": 120.0}                      to the ranks: send

An epoch is a set of servers that have met. Its groups stay as long as the same servers take part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from streamrl.weight_sync.protocol import WeightsDamaged

SCHEME = "collective:"


@dataclass(frozen=True, slots=True)
class Address:
    store: str
    """Where they meet: file:// on one node, tcp:// beyond."""
    version: int
    ranks: int
    bucket_bytes: int = 256 << 20
    epoch: int = -1
    members: int = 0
    index: int = -1
    """Of a server among the members; -1: a training rank."""
    seconds: float = 120.0
    """For every operation."""

    def __str__(self) -> str:
        return SCHEME + json.dumps(asdict(self))

    @classmethod
    def parse(cls, path: str) -> Address:
        """Raises WeightsDamaged."""
        try:
            given = json.loads(path.removeprefix(SCHEME))
            found = cls(
                str(given["store"]), int(given["version"]), int(given["ranks"]), int(given["bucket_bytes"]),
                int(given["epoch"]), int(given["members"]), int(given["index"]), float(given["seconds"]),
            )  # fmt: skip
            if (
                found.ranks < 1
                or not -1 <= found.index < max(1, found.members)
                or min(found.seconds, found.bucket_bytes) <= 0
            ):
                raise ValueError("numbers out of range")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WeightsDamaged(f"{path[:200]!r} is no address of a broadcast ({error})") from error
        return found


def is_broadcast(path: str) -> bool:
    return path.startswith(SCHEME)


class Epochs:
    """Invariant: two broadcasts of one epoch have the same members, and none between them failed."""

    def __init__(self) -> None:
        self._number = 0
        self._members: tuple[object, ...] = ()

    def addresses(self, path: str, members: Sequence[object], seconds: float) -> tuple[str, list[str]]:
        """For the ranks, and for each member (anything that tells two servers apart)."""
        if tuple(members) != self._members:
            self._number, self._members = self._number + 1, tuple(members)
        address = replace(Address.parse(path), epoch=self._number, members=len(members), seconds=seconds)
        return str(address), [str(replace(address, index=index)) for index in range(len(members))]

    def broken(self) -> None:
        """The members have lost each other."""
        self._members = ()
