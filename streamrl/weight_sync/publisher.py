"""The trainer's end of weight sync: a version from the shares of the ranks, by the way that the configuration names.

shm, disk    one file of full tensors, every rank writes its rows      shares.write_shares
delta        what has changed, every rank of its rows; at times all    delta_publisher
collective   nothing is written; ranks broadcast what they keep        collective.Sender
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from streamrl.weight_sync.kept import KeptPages
from streamrl.weight_sync.protocol import WeightInfo
from streamrl.weight_sync.ranks import Ranks
from streamrl.weight_sync.shared_memory import WeightStore

if TYPE_CHECKING:
    from streamrl.weight_sync.shares import Share

Backend = Literal["shm", "disk", "delta", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """How the ranks publish, and where servers find it."""

    backend: Backend = "shm"
    dtype: Literal["bfloat16", "float16"] | None = None
    """In which they travel; None: as they are trained."""
    staged: bool = False
    """LATEST is left to whoever gives the version to the servers (LLMServerManager); else it is named at once."""
    older: int = 0
    """Versions below the newest that servers may still ask for."""
    keep: int = 2
    """Versions that stay, at least (disk, delta)."""
    full_every: int = 16
    """Versions of which one is written whole (delta)."""
    bucket_bytes: int = 256 << 20
    """Of one operation (collective)."""


class Publisher(Protocol):
    def publish(self, shares: Iterable[Share], version: int) -> WeightInfo | None:
        """Collective over the ranks; the info on rank 0. Raises FloatingPointError, WeightError."""
        ...

    def close(self) -> None: ...


class FilePublisher:
    """`shm` and `disk`: the directory says which of the two it is."""

    def __init__(self, settings: SyncSettings, directory: str, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks
        self._store = WeightStore(directory, older=settings.older, keep=settings.keep)
        self._pages = KeptPages() if settings.backend == "shm" else None

    def publish(self, shares: Iterable[Share], version: int) -> WeightInfo | None:
        from streamrl.weight_sync.shares import write_shares

        info = write_shares(self._store, list(shares), version, self._ranks, self._pages)
        if info is not None and not self._settings.staged:
            self._store.publish(version, info.path, info.digest)
            info = replace(info, staged=False)
        return info

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()


def publisher(settings: SyncSettings, directory: str, ranks: Ranks, rendezvous: str = "") -> Publisher:
    """`rendezvous`: where the ranks met; says whether servers may be on other nodes."""
    if settings.backend == "collective":
        from streamrl.weight_sync.collective import Sender

        return Sender(settings, directory, ranks, rendezvous)
    if settings.backend == "delta":
        from streamrl.weight_sync.delta_publisher import DeltaPublisher

        return DeltaPublisher(settings, directory, ranks)
    return FilePublisher(settings, directory, ranks)
