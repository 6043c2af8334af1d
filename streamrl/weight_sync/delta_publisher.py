"""The trainer's end of `delta`: each rank remembers what it published, and writes what has changed since.

A rank holds its share twice in host memory: as servers have it, and as it was last staged, until it is known whether
they took that.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.weight_sync.delta_files import MANIFEST, SUFFIX, Manifest, read_manifest, write_part
from streamrl.weight_sync.protocol import WeightInfo, WeightsDamaged, WeightsMissing
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.weight_sync.ranks import Ranks
from streamrl.weight_sync.saving import sync
from streamrl.weight_sync.shared_memory import WeightStore
from streamrl.weight_sync.shares import Share, Together, finite, write_shares

if TYPE_CHECKING:
    from torch import Tensor

WORTH_IT = 0.8
"""A delta that is larger than this share of the full version is not written: reading it takes longer than that."""

Held = tuple[int, "dict[str, Tensor]"]


class DeltaPublisher:
    """Invariant: a delta's base is the version that LATEST named when it was written, so every server that is not
    behind has it."""

    def __init__(self, settings: SyncSettings, directory: str, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks
        self._store = WeightStore(directory, keep=settings.keep)
        self._held: list[Held] = []

    def publish(self, shares: Iterable[Share], version: int) -> WeightInfo | None:
        began = time.perf_counter()
        given = [replace(share, local=share.local.to("cpu", copy=True).contiguous()) for share in shares]
        gathered = time.perf_counter() - began
        info = self._delta(given, version) or self._full(given, version)
        self._held = [*self._held, (version, {share.name: share.local for share in given})][-2:]
        if self._ranks.rank:
            return None
        assert info is not None
        if not self._settings.staged:
            self._store.publish(version, info.path, info.digest)
        stages = {"gather": gathered, "transfer": time.perf_counter() - began - gathered}
        return replace(info, staged=self._settings.staged, stages=stages, seconds=time.perf_counter() - began)

    def close(self) -> None:
        self._held = []

    def _full(self, shares: list[Share], version: int) -> WeightInfo | None:
        return write_shares(self._store, shares, version, self._ranks)

    def _delta(self, shares: list[Share], version: int) -> WeightInfo | None:
        """None where a full version is to be written; on all ranks alike."""
        from streamrl.weight_sync.delta import checksum, encode

        base = self._base(version)
        parts: dict[str, Tensor] = {}
        if base is not None:
            for share in shares:
                parts |= encode(share.name, base[1][share.name], share.local)
        size, whole = (sum(t.nbytes for t in tensors) for tensors in (parts.values(), [s.local for s in shares]))
        without, size, whole = self._ranks.added_up([int(base is None), size, whole])
        if without or base is None or size > WORTH_IT * whole:
            return None
        path = self._store.directory / f"v{version:08d}{SUFFIX}"
        temporary = self._store.directory / f".{path.name}.tmp"
        step = Together(self._ranks, version, temporary)
        with step:
            if self._ranks.rank == 0:
                self._store.begin(version)
                temporary.mkdir(mode=0o700)
        step.refuse([share.name for share in shares if not finite(share.local)])
        with step:
            write_part(temporary, self._ranks.rank, parts, {share.name: checksum(share.local) for share in shares})
        with step:
            if self._ranks.rank == 0:
                self._finish(temporary, path, shares, version)
        return WeightInfo(version, str(path), size)

    def _finish(self, temporary: Path, path: Path, shares: list[Share], version: int) -> None:
        chain = self._chain()
        tensors = {share.name: (share.entry.dtype, share.shape) for share in shares}
        manifest = Manifest(version, self._ranks.world_size, (*chain, path.name), tensors)
        (temporary / MANIFEST).write_text(manifest.to_json())
        sync(temporary / MANIFEST)
        sync(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        sync(path.parent)
        self._store.retire(path.name)

    def _base(self, version: int) -> Held | None:
        """What servers have, as this rank knows it; None where they need a full version."""
        try:
            latest = self._store.latest()
            chain = self._chain()
        except (WeightsMissing, WeightsDamaged):
            return None
        if latest is None or len(chain) >= self._settings.full_every or latest.version >= version:
            return None
        return next((held for held in self._held if held[0] == latest.version), None)

    def _chain(self) -> tuple[str, ...]:
        """Of the version that LATEST names."""
        latest = self._store.latest()
        if latest is None:
            return ()
        name = Path(latest.path).name
        return read_manifest(latest.path).chain if name.endswith(SUFFIX) else (name,)
