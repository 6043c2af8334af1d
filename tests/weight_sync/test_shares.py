"""Ranks write one file together: what a reader finds is what one rank alone would have written, or nothing new."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.weight_sync import WeightInfo, WeightsDamaged, WeightsNotWritten, WeightStore
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.kept import KeptPages
from streamrl.weight_sync.mapped import map_tensors
from streamrl.weight_sync.publisher import Backend, SyncSettings, publisher
from streamrl.weight_sync.ranks import OneRank
from streamrl.weight_sync.shares import shares_of, write_shares
from tests.weight_sync.ranks import ThreadRanks, on_all, rank_threads

TENSORS = {
    "a.weight": torch.randn(5, 3), "b.bias": torch.randn(7).to(torch.bfloat16), "c": torch.tensor(2.5),
    "d.one_row": torch.randn(1, 9), "e.empty": torch.empty(0, 4), "f.long": torch.arange(6),
}  # fmt: skip


def written(
    store: WeightStore, tensors: dict[str, torch.Tensor], version: int, world_size: int, *pages: KeptPages
) -> list[object]:
    def one(ranks: ThreadRanks) -> WeightInfo | None:
        mine = list(shares_of(tensors.items(), ranks.rank, world_size))
        return write_shares(store, mine, version, ranks, *pages[ranks.rank : ranks.rank + 1])

    return on_all(rank_threads(world_size), one)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_any_number_of_ranks_writes_the_same_file(tmp_path: Path, world_size: int) -> None:
    info, *others = written(WeightStore(tmp_path / "w"), TENSORS, 3, world_size)
    assert isinstance(info, WeightInfo)
    assert others == [None] * (world_size - 1)
    assert info.digest == weights_digest(TENSORS.items())
    assert info.bytes == os.stat(info.path).st_size
    found = load_file(info.path)  # by the reference implementation
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_a_version_is_findable_once_it_is_published(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    info = written(store, TENSORS, 1, 2)[0]
    assert isinstance(info, WeightInfo)
    assert info.staged
    assert store.latest() is None
    store.publish(1, info.path)
    latest = store.latest()
    assert latest is not None
    assert latest.version == 1


@pytest.mark.parametrize("backend", ["shm", "disk", "delta"])
def test_whoever_publishes_replaces_a_damaged_pointer(tmp_path: Path, backend: Backend) -> None:
    store = WeightStore(tmp_path / "w")
    writer = publisher(SyncSettings(backend=backend), str(store.directory), OneRank())
    for version, content in enumerate((b"", b"\xff\xfe\x00garbage", b"[" * 100_000), 1):
        store.directory.mkdir(mode=0o700, exist_ok=True)
        (store.directory / "LATEST").write_bytes(content)
        info = writer.publish(shares_of(TENSORS.items(), 0, 1), version)
        latest = store.latest()
        assert info is not None
        assert latest is not None
        assert (latest.version, latest.digest) == (version, weights_digest(TENSORS.items()))
    writer.close()


def test_a_version_that_was_not_published_is_replaced_and_the_published_one_stays(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    store.write(TENSORS, 1)
    for version in (2, 3, 4):
        written(store, TENSORS, version, 1)
    assert {path.name for path in store.directory.glob("v*")} == {"v00000001.safetensors", "v00000004.safetensors"}


def test_numbers_that_are_not_finite_are_refused_on_all_ranks_and_leave_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    store.write(TENSORS, 1)
    bad = TENSORS | {"a.weight": torch.full((5, 3), float("nan"))}
    found = written(store, bad, 2, 2)
    assert all(isinstance(error, FloatingPointError) for error in found)
    assert sorted(path.name for path in store.directory.iterdir()) == ["LATEST", "v00000001.safetensors"]


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_old_version_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path / "w")
    store.write(TENSORS, 1)
    pwrite, wrote = os.pwrite, []

    def full(handle: int, data: memoryview, at: int) -> int:
        wrote.append(at)
        if len(wrote) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    found = written(store, TENSORS, 2, 2)
    assert all(isinstance(error, WeightsNotWritten) for error in found)
    assert any("no room for version 2" in str(error) for error in found)
    assert sorted(path.name for path in store.directory.iterdir()) == ["LATEST", "v00000001.safetensors"]
    monkeypatch.undo()
    assert isinstance(written(store, TENSORS, 2, 2)[0], WeightInfo)


def test_a_version_larger_than_what_is_free_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotWritten, match=r"no room for version 1 .* takes 1099511627776.0 MiB"):
        WeightStore(tmp_path / "w").begin(1, 1 << 60)


def test_pages_of_an_old_version_are_written_again_unless_somebody_reads_them(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    nodes = []
    for version in (1, 2, 3):
        info = written(store, TENSORS, version, 1)[0]
        assert isinstance(info, WeightInfo)
        store.publish(version, info.path)
        nodes.append(os.stat(info.path).st_ino)
    assert nodes[2] == nodes[0]
    held = map_tensors(str(store.path(2)))
    before = {name: tensor.clone() for name, tensor in held.items()}
    for version in (4, 5):
        info = written(store, {name: t + 1 for name, t in TENSORS.items()}, version, 1)[0]
        assert isinstance(info, WeightInfo)
        store.publish(version, info.path)
        assert os.stat(info.path).st_ino != nodes[1]
    assert all(torch.equal(held[name], before[name]) for name in held)


@pytest.mark.parametrize("world_size", [1, 3])
def test_versions_that_are_written_through_kept_pages_are_the_same(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages = WeightStore(tmp_path / "w"), [KeptPages() for _ in range(world_size)]
    pwrite, wrote = os.pwrite, []
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: wrote.append(at) or pwrite(handle, data, at))
    for version in range(1, 7):
        tensors = {name: tensor + version for name, tensor in (TENSORS | {"g.pages": torch.randn(9000)}).items()}
        wrote.clear()
        info = written(store, tensors, version, world_size, *pages)[0]
        assert isinstance(info, WeightInfo)
        store.publish(version, info.path)
        assert info.digest == weights_digest(tensors.items())
        found = load_file(info.path)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert (len(wrote) == 1) == (version > 2), "from the third on only the header"
    larger = {"a": torch.randn(20_000)}
    info = written(store, larger, 7, world_size, *pages)[0]
    assert isinstance(info, WeightInfo)
    assert torch.equal(load_file(info.path)["a"], larger["a"])


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_is_cut_is_damaged(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(4, 4)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut >= 0 else data + b"more")
    with pytest.raises(WeightsDamaged, match="no whole safetensors file"):
        map_tensors(str(path))
