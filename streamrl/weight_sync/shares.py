"""The ranks of the trainer write one version together: each its own numbers, into one file of full tensors.

```
 rank 0 ─ makes the file, its header ─┐          ┌─ writes its rows ─┐           ┌─ checksums of its tensors ─┐
 rank 1 ──────────────────────────────┴─ agree ──┴─ writes its rows ─┴── agree ──┴─ of its tensors ───────────┴─► rename
```

Nothing is gathered: FSDP2 gives a rank whole rows, and those lie together in the full tensor. Whoever reads the file
sees a plain one, whatever number of ranks wrote it.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.weight_sync.digest import free_threads, tensor_digest
from streamrl.weight_sync.layout import Entry, FileLayout
from streamrl.weight_sync.mapped import map_tensors, opened, views
from streamrl.weight_sync.plan import source_box
from streamrl.weight_sync.protocol import WeightInfo, WeightsNotWritten
from streamrl.weight_sync.ranks import Ranks
from streamrl.weight_sync.removing import remove
from streamrl.weight_sync.saving import as_bytes, make, not_written, pwrite, safetensors_name

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.weight_sync.kept import KeptPages
    from streamrl.weight_sync.shared_memory import WeightStore

_WORD, _LOW = (1 << 64) - 1, (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a tensor: `local`, flat elements `start`, `start + 1`, ... of the full one. Maybe none."""

    name: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    start: int
    local: Tensor

    @property
    def entry(self) -> Entry:
        return Entry(self.name, safetensors_name(self.local), self.shape)


def shares_of(named: Iterable[tuple[str, Tensor]], rank: int, world_size: int) -> Iterator[Share]:
    """Of parameters: sharded by rows (DTensor) what lies here, of those that every rank has this rank's rows. What is
    sharded in another way is gathered. Collective then; every rank has to take the same ones."""
    from torch.distributed.tensor import DTensor, Shard

    for name, parameter in named:
        shape = tuple(parameter.shape)
        rows = source_box(shape, rank, world_size)[0]
        inner = math.prod(shape[1:])
        if isinstance(parameter, DTensor) and tuple(parameter.placements) == (Shard(0),):
            local = parameter.to_local().detach().reshape(-1)
        else:
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            local = full.detach().reshape(-1)[rows.start * inner : rows.stop * inner]
        yield Share(name, shape, rows.start * inner, local)


def cast(shares: Iterable[Share], dtype: str | None) -> Iterator[Share]:
    """Floating point numbers as `dtype` ("bfloat16", ...), None: as they are."""
    import torch

    kind = getattr(torch, dtype) if dtype else None
    for share in shares:
        changes = kind is not None and share.local.is_floating_point()
        yield replace(share, local=share.local.to(kind)) if changes else share


def write_shares(
    store: WeightStore, shares: Sequence[Share], version: int, ranks: Ranks, pages: KeptPages | None = None
) -> WeightInfo | None:
    """Make `version` complete in `store`, not yet findable. Collective; the info on rank 0, None elsewhere. `pages`: of
    this rank's earlier versions, where the store lies in memory.

    Raises FloatingPointError on every rank (a number is not finite), WeightsNotWritten on every rank (no room, ...;
    nothing is left of it), ValueError (negative version, no tensors), WeightsNotPrivate.
    """
    began = time.perf_counter()
    layout = FileLayout.of((share.entry for share in shares), {"version": str(version), "format": "pt"})
    temporary = store.temporary(version)
    step = Together(ranks, version, temporary)
    alone, threads = ranks.world_size == 1, free_threads(ranks.world_size)
    with step:
        if ranks.rank == 0:
            store.begin(version, layout.size)
            make(temporary, layout)
    written: list[_Written] = []
    memory: mmap.mmap | None = None
    with step:
        handle = os.open(temporary, os.O_RDWR)
        try:
            memory = pages.of(handle, layout.size) if pages else None
            write = partial(_copy, memory) if memory else partial(pwrite, handle)
            with ThreadPoolExecutor(threads) as pool:
                written = list(pool.map(lambda share: _write(share, layout, write, alone), shares))
            os.fsync(handle)
        finally:
            os.close(handle)
    step.refuse([share.name for share, each in zip(shares, written, strict=True) if not each.finite])
    total = sum(each.digest for each in written) & _WORD
    with step:
        if not alone:
            names = sorted(share.name for share in shares)[ranks.rank :: ranks.world_size]
            total = _digest(temporary, names, memory)
    low, high = ranks.added_up([total & _LOW, total >> 32 & _LOW])
    digest = f"{low + (high << 32) & _WORD:016x}"
    with step:
        path = store.finish(version) if ranks.rank == 0 else None
    if path is None:
        return None
    took = time.perf_counter() - began
    gathered = sum(each.gather_seconds for each in written) / threads
    stages = {"gather": gathered, "transfer": took - gathered}
    return WeightInfo(version, str(path), layout.size, took, digest, staged=True, stages=stages)


@dataclass(frozen=True, slots=True)
class _Written:
    finite: bool
    digest: int
    """0 where others have parts of the tensor."""
    gather_seconds: float


def _write(share: Share, layout: FileLayout, write: Callable[[memoryview, int], None], alone: bool) -> _Written:
    began = time.perf_counter()
    local = share.local.to("cpu").contiguous()
    is_finite, gathered = finite(local), time.perf_counter() - began
    write(as_bytes(local), layout.offsets[share.name] + share.start * local.element_size())
    digest = tensor_digest(share.name, local.view(share.shape)) if alone else 0
    return _Written(is_finite, digest, gathered)


def finite(tensor: Tensor) -> bool:
    if not tensor.numel() or tensor.dtype.itemsize < 2 or not tensor.is_floating_point():
        return True
    least, most = tensor.aminmax()  # NaN wins in both
    return bool(least.isfinite() and most.isfinite())


def _copy(memory: mmap.mmap, data: memoryview, at: int) -> None:
    """By torch, which lets other threads run meanwhile."""
    import torch

    if data:
        there = torch.frombuffer(memory, dtype=torch.uint8, count=len(data), offset=at)
        there.copy_(torch.frombuffer(data, dtype=torch.uint8))


def _digest(path: Path, names: Iterable[str], memory: mmap.mmap | None) -> int:
    """Of tensors as they lie in the file: each rank looks at some of those that all of them wrote."""
    if memory is None:
        tensors = map_tensors(str(path))
    else:
        handle, entries, _ = opened(str(path))
        os.close(handle)
        tensors = views(memory, entries)
    return sum(tensor_digest(name, tensors[name]) for name in names) & _WORD


def refuse_broken(ranks: Ranks, version: int, broken: Sequence[str]) -> None:
    """Collective. Raises FloatingPointError on all ranks if one of them names tensors that are not finite."""
    if found := ranks.added_up([len(broken)])[0]:
        raise FloatingPointError(
            f"weights of version {version} are not finite ({found} tensors"
            f"{f', the first {broken[0]}' if broken else ', on other ranks'}): the training has diverged. "
            "Lower the learning rate or look at the loss, and go on from a checkpoint"
        )


class Together:
    """`with step:` runs a part of the work; afterwards all ranks know whether it went well on each of them."""

    def __init__(self, ranks: Ranks, version: int, temporary: Path) -> None:
        self._ranks, self._version, self._temporary = ranks, version, temporary

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # the process ends
        failed = self._ranks.added_up([int(error is not None)])[0]
        if not failed:
            return
        self._remove()
        if isinstance(error, OSError) and not isinstance(error, WeightsNotWritten):
            raise not_written(self._version, self._temporary.parent, error) from error
        if error is None:
            raise WeightsNotWritten(f"version {self._version} of the weights: {failed} other ranks could not write it")

    def refuse(self, broken: Sequence[str]) -> None:
        """Numbers that are not finite, here or elsewhere, end it on all ranks."""
        try:
            refuse_broken(self._ranks, self._version, broken)
        except FloatingPointError:
            self._remove()
            raise

    def _remove(self) -> None:
        if self._ranks.rank == 0:
            remove(self._temporary)
