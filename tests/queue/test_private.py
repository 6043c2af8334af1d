"""What another user of the machine may have put where our directories and files belong, and is not taken."""

from __future__ import annotations

import os
import socket
import stat
from functools import partial
from pathlib import Path

import pytest

from transfer_queue.checkpoint import read_manifest
from transfer_queue.checkpoint.format import PageEntry, PartitionEntry, pages_of
from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.local import LocalQueue
from transfer_queue.net.transport import read_key
from transfer_queue.service import attached
from transfer_queue.service.queue_service import QueueService
from transfer_queue.storage import private
from transfer_queue.storage.journal import read_journals
from transfer_queue.storage.private import open_regular, private_directory, read_regular
from transfer_queue.storage.segments import map_segment, segment_file
from transfer_queue.storage.snapshot import read_snapshot, snapshot_file
from transfer_queue.storage.unit_files import UnitFiles

SIZE = 64 << 10


def service(tmp_path: Path) -> QueueService:
    return QueueService(
        tmp_path / "queue", storage_dir=tmp_path, spill_dir=tmp_path, spill_budget_bytes=SIZE, units=1,
        unit_budget_bytes=SIZE, segment_bytes=SIZE, run="known",
    )  # fmt: skip


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


def an_open_one(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize("make", [a_link, an_open_one])
@pytest.mark.parametrize("name", ["queue", "tq-known"])
def test_a_service_takes_no_directory_that_others_can_have_prepared(tmp_path, make, name):
    make(tmp_path / name)
    with pytest.raises(Invalid, match=rf"{tmp_path}/{name} (has mode 0777.*chmod go-w|is a symbolic link.*remove it)"):
        service(tmp_path)


@pytest.mark.parametrize("make", [a_link, an_open_one])
def test_a_unit_takes_no_such_directory_in_memory_or_on_disk(tmp_path, make):
    make(tmp_path / "unit-0")
    with pytest.raises(Invalid, match="unit-0"):
        UnitFiles(tmp_path / "unit-0", 0, budget=SIZE)
    with pytest.raises(Invalid, match="unit-0"):
        UnitFiles(tmp_path / "memory", 0, budget=SIZE, spill=tmp_path / "unit-0")


@pytest.mark.parametrize("make", [a_link, an_open_one])
async def test_init_and_a_queue_in_one_process_take_no_such_directory(tmp_path, make):
    make(tmp_path / "queue")
    with pytest.raises(Invalid, match=f"{tmp_path}/queue"):
        attached.init({"directory": str(tmp_path / "queue")})
    with pytest.raises(Invalid, match=f"{tmp_path}/queue"):
        LocalQueue(directory=tmp_path / "queue")


def test_a_directory_of_another_user_is_refused_naming_both(tmp_path, monkeypatch):
    (tmp_path / "queue").mkdir(mode=0o700)
    monkeypatch.setattr(private.os, "getuid", lambda: 12345)
    with pytest.raises(Invalid, match=rf"queue belongs to user {os.geteuid()} \(mode 0700\), not to 12345: remove it"):
        private_directory(tmp_path / "queue")


def test_a_directory_of_ours_is_made_private_and_found_again(tmp_path):
    for _ in range(2):
        private_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def put_a(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "symbolic link":
            path.symlink_to("/etc/hostname")
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))


KINDS = ["pipe", "directory", "symbolic link", "socket"]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind, flags):
    put_a(kind, tmp_path / "x")
    with pytest.raises(Corrupt, match=f"{tmp_path}/x is a {kind}, not a regular file"):
        open_regular(tmp_path / "x", flags, error=Corrupt)


def test_a_file_is_read_and_a_missing_one_is_said_to_be(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    assert read_regular(tmp_path / "x") == b"content"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "y")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["queue/run.json", "queue/key", "queue/service.lock", "tq-known/lock"])
def test_a_service_says_at_once_which_of_its_files_is_none(tmp_path, kind, name):
    first = service(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    put_a(kind, tmp_path / name)
    again = first.start if name.endswith("lock") else partial(service, tmp_path)
    with pytest.raises(Invalid, match=f"{tmp_path}/{name} is a {kind}"):
        again()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["init.lock", "service.lock"])
def test_init_says_at_once_which_file_is_none(tmp_path, kind, name):
    put_a(kind, tmp_path / name)
    with pytest.raises(Invalid, match=f"{tmp_path}/{name} is a {kind}"):
        attached.init({"directory": str(tmp_path)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "nonce", "incarnation"])
def test_a_unit_says_at_once_which_of_its_files_is_none(tmp_path, kind, name):
    UnitFiles(tmp_path, 0, budget=SIZE).close()
    (tmp_path / name).unlink()
    put_a(kind, tmp_path / name)
    with pytest.raises(Invalid, match=f"{tmp_path}/{name} is a {kind}"):
        UnitFiles(tmp_path, 0, budget=SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_or_a_snapshot_that_is_no_file_is_damage(tmp_path, kind):
    put_a(kind, tmp_path / "journal")
    with pytest.raises(Corrupt, match=f"{tmp_path}/journal is a {kind}"):
        list(read_journals(tmp_path / "journal"))
    put_a(kind, snapshot_file(tmp_path / "journal", 3))
    with pytest.raises(Corrupt, match=f"is a {kind}"):
        list(read_snapshot(snapshot_file(tmp_path / "journal", 3), 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_or_rows_of_a_checkpoint_that_are_no_file_are_damage(tmp_path, kind):
    put_a(kind, tmp_path / "manifest.json")
    with pytest.raises(Corrupt, match=f"manifest.json is a {kind}"):
        read_manifest(tmp_path)
    put_a(kind, tmp_path / "0.rows")
    with pytest.raises(Corrupt, match=f"0.rows is a {kind}"):
        list(pages_of(tmp_path, PartitionEntry("p", "0.rows", 1, [PageEntry(1, 1, "")])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_that_is_no_file_is_refused_and_freed(tmp_path, kind):
    files = UnitFiles(tmp_path, 0, budget=SIZE)
    (made,) = files.make(1, SIZE // 4)
    path = tmp_path / segment_file(made.segment)
    path.unlink()
    put_a(kind, path)
    with pytest.raises(Invalid, match=f"{path} is a {kind}"):
        files.read(made.segment, 0, 1)
    with pytest.raises(Invalid, match=f"{path} is a {kind}"):
        map_segment(str(tmp_path), made.segment)
    files.free([made.segment])
    assert files.inventory() == []


def test_a_segment_of_another_user_or_with_another_name_is_not_mapped(tmp_path, monkeypatch):
    files = UnitFiles(tmp_path, 0, budget=SIZE)
    (made,) = files.make(1, SIZE // 4)
    os.link(tmp_path / segment_file(made.segment), tmp_path / "second")
    with pytest.raises(Invalid, match="has a second name"):
        map_segment(str(tmp_path), made.segment)
    (tmp_path / "second").unlink()
    map_segment(str(tmp_path), made.segment)
    monkeypatch.setattr(private.os, "getuid", lambda: 12345)
    with pytest.raises(Invalid, match="belongs to user"):
        map_segment(str(tmp_path), made.segment)


def test_a_key_that_others_may_read_is_refused_by_service_and_clients(tmp_path):
    first = service(tmp_path)
    key = tmp_path / "queue" / "key"
    key.chmod(0o644)
    for use in (first.start, partial(service, tmp_path), partial(read_key, str(key))):
        with pytest.raises(Invalid, match=rf"{key} has mode 0644: others may read it.*chmod go= {key}"):
            use()
    key.chmod(0o600)
    service(tmp_path)


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    service(tmp_path)
    monkeypatch.setattr(private.os, "getuid", lambda: 12345)
    with pytest.raises(Invalid, match="key belongs to user .* not to 12345"):
        read_key(str(tmp_path / "queue" / "key"))
