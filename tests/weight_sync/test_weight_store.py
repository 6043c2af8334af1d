"""Published weights: whole or absent, newest findable, damage named."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamrl.errors import UserError
from streamrl.weight_sync import WeightsDamaged, WeightsMissing, WeightsNotPrivate, WeightsNotWritten, WeightStore


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((3, 2), value), "b.weight": torch.full((4,), value, dtype=torch.bfloat16)}


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    info = store.write(state(1.5), 7)
    assert store.latest() is not None
    assert (info.version, info.bytes) == (7, os.stat(info.path).st_size)
    assert Path(info.path).name == "v00000007.safetensors"
    got = store.read(info.path)
    assert set(got) == {"a.weight", "b.weight"}
    assert all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in state(1.5).items())


def test_no_version_yet_is_none(tmp_path: Path) -> None:
    assert WeightStore(tmp_path / "absent").latest() is None
    assert WeightStore(tmp_path).read_latest() is None


def test_latest_is_a_small_json_and_the_last_two_files_are_kept(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    for version in (1, 2, 3):
        store.write(state(version), version)
    assert json.loads((tmp_path / "LATEST").read_text())["version"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "v00000002.safetensors", "v00000003.safetensors"]


def test_a_restored_run_may_publish_a_smaller_version(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    for version in (9, 10, 8):
        store.write(state(version), version)
    newest = store.latest()
    assert newest is not None
    assert newest.version == 8
    assert torch.equal(store.read(newest.path)["a.weight"], state(8)["a.weight"])
    assert sorted(p.name for p in tmp_path.glob("v*")) == ["v00000008.safetensors", "v00000010.safetensors"]


def test_a_mapped_version_outlives_its_file_and_a_rewrite(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    tensors = store.read(store.write(state(1), 1).path)
    for version in (1, 2, 3):
        store.write(state(50 + version), version)
    assert torch.equal(tensors["a.weight"], state(1)["a.weight"])


def test_tied_tensors_are_written_once_and_views_without_their_base(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    base = torch.arange(1000.0)
    tied = torch.ones(5)
    info = store.write({"embed": tied, "head": tied, "slice": base[:4], "turned": base[:6].view(2, 3).t()}, 0)
    got = store.read(info.path)
    assert set(got) == {"embed", "slice", "turned"}
    assert torch.equal(got["turned"], base[:6].view(2, 3).t())
    assert info.bytes < 1000


def test_streamed_temporaries_are_not_taken_for_tied(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    base = torch.zeros(64)
    info = store.write(((f"p{i}", (base + i)[:32]) for i in range(20)), 1)
    got = store.read(info.path)
    assert [float(got[f"p{i}"][0]) for i in range(20)] == list(range(20))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = Path(WeightStore(tmp_path).write(state(1), 1).path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-5], "garbage": b"\xff" * 100, "empty": b""}[damage])
    with pytest.raises(WeightsDamaged, match=r"v00000001\.safetensors"):
        WeightStore(tmp_path).read(str(path))


def test_a_missing_file_says_what_to_load(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    info = store.write(state(1), 1)
    os.unlink(info.path)
    with pytest.raises(WeightsMissing, match="LATEST"):
        store.read(info.path)
    with pytest.raises(WeightsMissing, match="publish again"):
        store.latest()


def names(path: str, version: int = 1) -> bytes:
    return json.dumps({"version": version, "path": path}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'"x"', b'{"version": "x", "path": "p"}', b'{"version": -1, "path": "p"}',
        b"\xff\xfe\x00garbage", b"[" * 100_000, b"0" * (2 << 20), b'{"version": ' + b"9" * 5000,
        names("a\0b"), names("x" * 5000), names("\ud800"), names(".."), names("v2.safetensors"),
        names(f"v{'9' * 300}.safetensors", 10**300 - 1),
        b'{"version": 1, "path": "v1.safetensors", "digests": {"v1.safetensors": 5}}',
    ],
    ids=lambda content: repr(content[:25]),
)  # fmt: skip
def test_a_damaged_pointer_is_named_and_the_next_write_mends_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "LATEST").write_bytes(content)
    check_named_and_mended(tmp_path)


@pytest.mark.parametrize("stands_there", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_at_the_pointers_place_is_named_at_once_and_replaced(
    tmp_path: Path, stands_there: Callable[[Path], None]
) -> None:
    stands_there(tmp_path / "LATEST")
    check_named_and_mended(tmp_path)


def check_named_and_mended(directory: Path) -> None:
    store = WeightStore(directory)
    for use in (store.latest, store.read_latest, lambda: store.digest_of("v00000001.safetensors")):
        with pytest.raises(WeightsDamaged, match="LATEST"):
            use()
    store.write(state(2), 2)
    newest = store.latest()
    assert newest is not None
    assert newest.version == 2
    assert not list(directory.glob(".*.tmp"))


def flipped(path: Path) -> None:
    """One bit of the last number."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


def test_the_pointer_has_the_checksum_and_other_bytes_are_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    info = store.write(state(1), 1)
    newest = store.latest()
    assert newest is not None
    assert newest.digest == info.digest
    flipped(Path(info.path))
    with pytest.raises(WeightsDamaged, match=info.digest):
        WeightStore(tmp_path).read_latest()


def test_a_directory_without_checksums_is_read_as_it_is(tmp_path: Path) -> None:
    info = WeightStore(tmp_path).write(state(1), 1)
    (tmp_path / "LATEST").write_bytes(names(info.path))
    found = WeightStore(tmp_path).read_latest()
    assert found is not None
    assert found[0].digest == ""


def test_checksums_are_known_of_the_versions_that_are_kept_until_a_file_gets_other_contents(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, older=1)
    infos = [store.write(state(version), version) for version in range(4)]
    assert [bool(store.digest_of(info.path)) for info in infos] == [False, False, True, True]
    assert store.digest_of(infos[2].path) == infos[2].digest
    store.begin(3)
    store.temporary(3).write_bytes(b"another one, which is staged")
    store.finish(3)
    assert store.digest_of(infos[3].path) == ""
    assert store.digest_of(infos[2].path) == infos[2].digest


@pytest.mark.parametrize("header", [
    b"[" * 100_000, b'{"a": {"dtype": "F32", "shape": [0, 9223372036854775808], "data_offsets": [0, 0]}}', b"\xff" * 20,
])  # fmt: skip
def test_a_header_that_cannot_be_is_damage(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "v00000001.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsDamaged):
        WeightStore(tmp_path).read(str(path))


@pytest.mark.parametrize("kind", [os.mkfifo, Path.mkdir])
def test_a_version_that_is_no_file_is_damage_at_once(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    kind(path := tmp_path / "v00000001.safetensors")
    with pytest.raises(WeightsDamaged, match="v00000001"):
        WeightStore(tmp_path).read(str(path))


def test_a_full_disk_is_told_and_nothing_is_left_of_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path)
    store.write(state(1), 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for operation in ("pwrite", "fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, operation, full)
            with pytest.raises(WeightsNotWritten, match=f"no room for version 2 of the weights in {tmp_path}"):
                store.write(state(2), 2)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(WeightsNotWritten, match="no room for version 1"):
            store.publish(1, store.path(1))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_to_publish_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        WeightStore(tmp_path).write({}, 1)
    with pytest.raises(ValueError, match="-1"):
        WeightStore(tmp_path).write(state(1), -1)


def _publish_for_ever(directory: str) -> None:
    version = 0
    while True:
        version += 1
        WeightStore(directory).write({"w": torch.full((20_000,), float(version))}, version)


def test_readers_beside_a_writer_that_is_killed_see_whole_versions_only(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=_publish_for_ever, args=(str(tmp_path),), daemon=True)
    writer.start()
    store = WeightStore(tmp_path)
    seen: set[int] = set()
    while len(seen) < 20 and writer.is_alive():
        found = store.read_latest()
        if found is not None:
            info, tensors = found
            assert bool((tensors["w"] == info.version).all())
            seen.add(info.version)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(10)
    found = store.read_latest()
    assert found is not None
    assert bool((found[1]["w"] == found[0].version).all())
    store.write(state(1), 1)
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_directory_and_its_files_are_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        WeightStore(tmp_path / "weights").write(state(1), 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o700
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "weights").iterdir()} == {
        "LATEST": 0o600,
        "v00000001.safetensors": 0o600,
    }


def open_to_others(path: Path) -> None:
    path.chmod(0o701)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_file(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.touch()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (open_to_others, r"is open to others \(mode 0701, must be 0700\)"),
        (a_link, "is no directory"),
        (a_file, "is no directory"),
    ],
)
def test_a_directory_that_is_not_private_is_neither_written_nor_read(
    tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    store = WeightStore(tmp_path / "weights")
    store.write(state(1), 1)
    spoil(store.directory)
    for use in (lambda: store.write(state(2), 2), store.latest, store.read_latest):
        with pytest.raises(WeightsNotPrivate, match=told) as caught:
            use()
        assert isinstance(caught.value, UserError)


def test_a_directory_of_another_user_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path)
    store.write(state(1), 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for use in (lambda: store.write(state(2), 2), store.latest, store.read_latest):
        with pytest.raises(WeightsNotPrivate, match=f"belongs to user {os.getuid()}"):
            use()
