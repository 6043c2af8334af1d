"""Weights by broadcast, without a file: from every training rank to the workers of all servers, in buckets.

```
 rank 0 ──lane (0, 0)──► worker 0 of server A, of server B, ...       a lane is a process group of its own:
 rank 0 ──lane (0, 1)──► worker 1 of server A, of server B, ...       one rank, and the workers with one number
 rank 1 ──lane (1, 0)──► worker 0 of server A, of server B, ...
```

No rank gathers anything; plan.lane says what travels on a lane, and each ends with the checksum of its bytes. gloo on
CPUs, NCCL on GPUs (then a rank and a worker cannot share one). The groups are kept for as long as the same servers take
part (address.Epochs) and made anew otherwise; none of them is torch's global one, an engine has its own beside them.

The ranks keep the last two versions that they published, on their devices: who joins while training goes on gets the
one in service, also while the next is not taken yet.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from streamrl.weight_sync.address import Address
from streamrl.weight_sync.layout import WIDTHS, Entry
from streamrl.weight_sync.mapped import torch_types
from streamrl.weight_sync.plan import Box, Piece, Split, buckets, lane, source_box, target_box, whole
from streamrl.weight_sync.protocol import WeightInfo, WeightsDamaged, WeightsMissing
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.weight_sync.ranks import Ranks
from streamrl.weight_sync.shared_memory import make_private
from streamrl.weight_sync.shares import Share, as_bytes, finite, refuse_broken

Lane = tuple[int, int]


class Groups:
    """The process groups of one member, by lane. Invariant: all of one epoch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._epoch: tuple[str, int] = ("", -1)
        self._groups: dict[Lane, Any] = {}
        self._store: Store | None = None
        self.made = 0
        """Groups made so far."""

    def store(self, address: Address) -> Store:
        """Raises ValueError, and torch's errors when nobody is there."""
        if self._store is None or self._epoch[0] != address.store:
            self._store = _open_store(address)
        if self._epoch != (address.store, address.epoch):
            self._epoch, self._groups = (address.store, address.epoch), {}
        return self._store

    def of(self, lane: Lane, address: Address, rank: int) -> Any:
        """Waits for the others. `rank`: 0 sends, the servers follow."""
        store = self.store(address)
        if lane not in self._groups:
            prefix = PrefixStore(f"{address.epoch}/{lane[0]}/{lane[1]}", store)
            size, limit = 1 + address.members, timedelta(seconds=address.seconds)
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._groups[lane] = dist.ProcessGroupNCCL(prefix, rank, size, options)
            else:
                self._groups[lane] = dist.ProcessGroupGloo(prefix, rank, size, limit)
            self.made += 1
        return self._groups[lane]

    def forget(self) -> None:
        """After a failure nobody knows what the others have seen."""
        self._epoch, self._groups = ("", -1), {}


class Sender:
    """A training rank's end. Implements `Publisher`; `send` is called once the servers have been told to receive."""

    def __init__(self, settings: SyncSettings, directory: str, ranks: Ranks, rendezvous: str = "") -> None:
        """`rendezvous`: of the ranks; with tcp:// servers may be on other nodes, and meet the ranks at that host."""
        self._settings, self._ranks = settings, ranks
        self._directory, self._rendezvous = Path(directory), rendezvous
        self._held: dict[int, list[Share]] = {}
        self._groups: Groups | None = None
        self._address = ""
        self._master: Store | None = None

    def publish(self, shares: Iterable[Share], version: int) -> WeightInfo | None:
        """Keeps a copy."""
        held = [Share(share.name, share.shape, share.start, share.local.clone()) for share in shares]
        refuse_broken(self._ranks, version, [share.name for share in held if not finite(share.local)])
        self._held = {v: kept for v, kept in [*self._held.items()][-1:]} | {version: held}
        if self._groups is None:
            self._groups = Groups(held[0].local.device)
        size = sum(share.entry.nbytes for share in held)
        if self._ranks.rank:
            return None
        entries = [[s.name, s.entry.dtype, list(s.shape)] for s in held]
        address = Address(self._meeting(), version, self._ranks.world_size, self._settings.bucket_bytes)
        _open_store(address).set(f"version {version}", json.dumps(entries))
        return WeightInfo(version, str(address), size)

    def send(self, path: str, *, workers: int = 1, split: Split = whole) -> None:
        """To the members of `path`. Raises WeightsMissing (not held any more), RuntimeError (a member is gone)."""
        address = Address.parse(path)
        shares = self._held.get(address.version)
        if shares is None or self._groups is None:
            raise WeightsMissing(f"version {address.version} is not held any more; {sorted(self._held)} are")
        local = {share.name: share for share in shares}
        shapes = [(share.name, share.shape) for share in shares]
        rank, world_size = self._ranks.rank, self._ranks.world_size
        group: Any = None
        try:
            for target in range(workers):
                group = self._groups.of((rank, target), address, 0)
                plan = lane(shapes, split, source=rank, ranks=world_size, target=target, workers=workers)
                hashed = xxhash.xxh3_64()
                for bucket in buckets(plan, lambda name: local[name].local.element_size(), address.bucket_bytes):
                    data = torch.cat([_bytes(_cut(local[name], piece, rank, world_size)) for name, piece in bucket])
                    hashed.update(as_bytes(data.cpu()))
                    _broadcast(group, data, address)
                _broadcast(group, _sum(hashed, self._groups.device), address)
        except BaseException:
            self._groups.forget()
            group = None  # its end is how the servers notice
            raise

    def close(self) -> None:
        self._held, self._groups, self._master = {}, None, None

    def _meeting(self) -> str:
        if not self._address:
            if self._rendezvous.startswith("tcp://"):
                host = self._rendezvous.removeprefix("tcp://").rpartition(":")[0]
                store = self._master = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                self._address = f"tcp://{host}:{store.port}"
            else:
                make_private(self._directory)
                self._address = f"file://{self._directory}/lanes"
                Path(self._directory, "lanes").unlink(missing_ok=True)
        return self._address


class Receiver:
    """One worker of a server: `worker` of `workers`, which hold a tensor's parts as `split` says."""

    def __init__(
        self, device: torch.device | str = "cpu", *, worker: int = 0, workers: int = 1, split: Split = whole,
    ) -> None:  # fmt: skip
        self._device, self._worker, self._workers, self._split = torch.device(device), worker, workers, split
        self._groups = Groups(self._device)
        self._lock = threading.Lock()

    @property
    def groups_made(self) -> int:
        return self._groups.made

    def receive(self, path: str) -> dict[str, Tensor]:
        """This worker's part of every tensor, beside what it serves. Blocks; one at a time. Raises WeightsMissing (the
        others are gone, or slow), WeightsDamaged."""
        address = Address.parse(path)
        if not self._lock.acquire(timeout=address.seconds):
            raise WeightsMissing("an earlier broadcast has not ended")
        try:
            return self._receive(address)
        except (RuntimeError, ValueError) as error:
            self._groups.forget()
            if isinstance(error, WeightsDamaged):
                raise
            raise WeightsMissing(f"the broadcast of version {address.version} broke off: {error}") from error
        finally:
            self._lock.release()

    def _receive(self, address: Address) -> dict[str, Tensor]:
        store = self._groups.store(address)
        entries = _entries(store.get(f"version {address.version}"))
        shapes, types = [(entry.name, entry.shape) for entry in entries.values()], torch_types()
        split = self._split if self._workers > 1 else whole

        def width(name: str) -> int:
            return WIDTHS[entries[name].dtype]

        boxes = {e.name: target_box(e.shape, split(e.name), self._worker, self._workers) for e in entries.values()}
        found = {
            name: torch.empty([len(r) for r in box], dtype=types[entries[name].dtype], device=self._device)
            for name, box in boxes.items()
        }  # fmt: skip
        for rank in range(address.ranks):
            group = self._groups.of((rank, self._worker), address, 1 + address.index)
            plan = lane(shapes, split, source=rank, ranks=address.ranks, target=self._worker, workers=self._workers)
            parts = list(buckets(plan, width, address.bucket_bytes))
            self._take(partial(_broadcast, group, address=address), parts, entries, boxes, found)
        return {
            name: tensor.view(entries[name].shape) if split(name) is None else tensor for name, tensor in found.items()
        }

    def _take(
        self, receive: Callable[[Tensor], None], lane: list[list[tuple[str, Piece]]], entries: Mapping[str, Entry],
        boxes: Mapping[str, Box], found: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """All of one lane, bucket by bucket."""
        hashed = xxhash.xxh3_64()
        for bucket in lane:
            sizes = [piece.numbers * WIDTHS[entries[name].dtype] for name, piece in bucket]
            data = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            receive(data)
            hashed.update(as_bytes(data.cpu()))
            for (name, piece), part in zip(bucket, data.split(sizes), strict=True):
                target = found[name]
                target[piece.inside(boxes[name])] = _typed(part, target.dtype).view(piece.shape)
        theirs = torch.empty(8, dtype=torch.uint8, device=self._device)
        receive(theirs)
        if not torch.equal(theirs, _sum(hashed, self._device)):
            raise WeightsDamaged("what arrived has another checksum than what was sent")


def _broadcast(group: Any, data: Tensor, address: Address) -> None:
    group.broadcast(data, 0, timeout=timedelta(seconds=address.seconds)).wait()


def _cut(share: Share, piece: Piece, rank: int, ranks: int) -> Tensor:
    box = source_box(share.shape, rank, ranks)
    return share.local.view([len(r) for r in box])[piece.inside(box)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.view(dtype) if data.storage_offset() % dtype.itemsize == 0 else data.clone().view(dtype)


def _sum(hashed: xxhash.xxh3_64, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8).to(device)


def _entries(data: bytes) -> dict[str, Entry]:
    """Raises WeightsDamaged."""
    try:
        found = [Entry(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in json.loads(data)]
        if any(entry.dtype not in WIDTHS for entry in found):
            raise ValueError("types that are not known")
    except (ValueError, TypeError) as error:
        raise WeightsDamaged(f"the ranks announce tensors that are none ({error})") from error
    return {entry.name: entry for entry in found}


def _open_store(address: Address) -> Store:
    scheme, _, place = address.store.partition("://")
    store: Store
    if scheme == "file":
        store = FileStore(place, -1)
    elif scheme == "tcp":
        host, _, port = place.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=address.seconds))
    else:
        raise ValueError(f"{address.store!r} is neither file:// nor tcp://")
    store.set_timeout(timedelta(seconds=address.seconds))
    return store
