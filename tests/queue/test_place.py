"""Where segments may lie, found out before anything starts: small /dev/shm, memory limits, Ray's store, NFS."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

import pytest

from transfer_queue.errors import Invalid
from transfer_queue.storage import filesystems, place
from transfer_queue.storage.filesystems import journal_on_shared, kind_of
from transfer_queue.storage.leftovers import find_leftovers, remove_leftover
from transfer_queue.storage.place import choose_storage, memory_limit, ray_store_bytes

MIB = 1 << 20


@pytest.fixture
def small_shm(monkeypatch, tmp_path):
    """A container's /dev/shm: in memory, with 64 MiB."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(place, "SHM", shm)
    monkeypatch.setattr(place, "kind_of", lambda directory: "tmpfs" if directory == shm else "ext4")
    real = os.statvfs

    def statvfs(directory):
        info = real(directory)
        return type("Statvfs", (), {"f_bavail": 64 * MIB // info.f_frsize, "f_frsize": info.f_frsize})

    monkeypatch.setattr(place.os, "statvfs", lambda d: statvfs(d) if Path(d) == shm else real(d))
    monkeypatch.setattr(place, "ray_store_bytes", lambda: 0)
    return shm


def test_a_small_shm_is_left_alone_and_the_log_says_how_to_enlarge_it(small_shm, caplog):
    with caplog.at_level(logging.WARNING):
        parent, _ = choose_storage(None, 2, None)
    assert parent != small_shm
    assert "64 MiB" in caplog.text
    assert "--shm-size" in caplog.text
    assert "storage_dir" in caplog.text


def test_a_small_shm_that_was_asked_for_is_an_error_with_the_remedy(small_shm):
    with pytest.raises(Invalid, match=r"64 MiB free .* lower unit_budget_bytes, enlarge it .*shm-size.* storage_dir"):
        choose_storage(small_shm, 2, 64 * MIB)


def test_what_rays_store_may_take_of_shm_is_not_counted_as_free(small_shm, monkeypatch, caplog):
    assert choose_storage(None, 1, 32 * MIB)[0] == small_shm
    monkeypatch.setattr(place, "ray_store_bytes", lambda: 48 * MIB)
    assert choose_storage(None, 1, 32 * MIB)[0] != small_shm
    assert "Ray's object store may take 48 MiB" in caplog.text


def test_rays_store_is_read_from_the_arguments_of_its_node_processes(tmp_path):
    for pid, arguments in enumerate(
        [
            [b"/x/raylet/raylet", b"--object_store_memory=1000", b"--plasma_directory=/dev/shm"],
            [b"/x/raylet/raylet", b"--object_store_memory=500", b"--plasma_directory=/tmp"],
            [b"python", b"--object_store_memory=7"],
            [b""],
        ]
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(b"\0".join(arguments))
    assert ray_store_bytes(tmp_path.iterdir()) == 1000


def test_the_memory_limit_of_the_cgroup_bounds_a_directory_in_memory(small_shm, monkeypatch, tmp_path):
    (tmp_path / "max").write_text(str(100 * MIB))
    (tmp_path / "used").write_text(str(90 * MIB))
    monkeypatch.setattr(place, "_CGROUP_LIMITS", ((tmp_path / "max", tmp_path / "used"),))
    assert memory_limit() == (100 * MIB, 90 * MIB)
    assert place.free_bytes(small_shm) == 10 * MIB
    (tmp_path / "max").write_text("max\n")
    assert memory_limit() is None
    assert place.free_bytes(small_shm) == 64 * MIB


@pytest.mark.parametrize("magic", [0x6969, 0xFF534D42, 0x00C36400])
def test_segments_never_go_where_another_machine_may_map_them(tmp_path, monkeypatch, magic):
    monkeypatch.setattr(filesystems, "magic_of", lambda _: magic)
    with pytest.raises(Invalid, match="which other machines may share: segments are mapped"):
        choose_storage(tmp_path, 1, MIB)


def test_a_journal_on_nfs_says_what_locks_renames_and_fdatasync_mean_there(tmp_path, monkeypatch):
    assert journal_on_shared(tmp_path) is None
    monkeypatch.setattr(filesystems, "magic_of", lambda _: 0x6969)
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw,vers=3,{{}}hard 0 0\n"
    found = journal_on_shared(tmp_path / "queue", mounts.format(""))
    assert found is not None
    assert all(word in found[0] for word in ("nfs", "rename", "fdatasync", "lock"))
    assert "local disk" in found[1]
    found = journal_on_shared(tmp_path / "queue", mounts.format("local_lock=all,"))
    assert found is not None
    assert "local_lock=all" in found[1]


def test_filesystems_are_known_by_their_magic_number():
    assert kind_of(Path("/dev/shm")) == "tmpfs"
    assert kind_of(Path("/proc")) == "0x9fa0"
    with pytest.raises(FileNotFoundError):
        kind_of(Path("/nowhere"))


@pytest.fixture
def storage(tmp_path):
    """Makes storage directories that are an hour old."""

    def make(run: str, owner: Path | None) -> Path:
        home = tmp_path / f"tq-{run}"
        (home / "unit-0").mkdir(parents=True)
        (home / "lock").touch()
        (home / "unit-0" / "a.seg").write_bytes(bytes(100_000))
        if owner is not None:
            (home / "owner").write_text(str(owner))
        hour_ago = time.time() - 3600
        for path in (*home.rglob("*"), home):
            os.utime(path, (hour_ago, hour_ago))
        return home

    return make


def test_leftovers_are_listed_with_run_age_and_bytes_and_only_dead_ones_go(storage, tmp_path):
    stopped_owner = tmp_path / "queue"
    stopped_owner.mkdir()
    (stopped_owner / "run.json").touch()
    homes = {
        "dead": storage("dead", tmp_path / "gone"), "stopped": storage("stopped", stopped_owner),
        "live": storage("live", tmp_path / "gone"), "local-x": storage("local-x", None),
    }  # fmt: skip
    fd = os.open(homes["live"] / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    found = {leftover.run: leftover for leftover in find_leftovers([tmp_path])}
    assert {run: leftover.state for run, leftover in found.items()} == {
        "dead": "dead", "stopped": "stopped", "live": "live", "local-x": "dead",
    }  # fmt: skip
    assert 3500 < found["dead"].age < 3700
    assert 100_000 <= found["dead"].nbytes < 200_000
    assert [run for run, leftover in found.items() if remove_leftover(leftover)] in (
        ["dead", "local-x"], ["local-x", "dead"],
    )  # fmt: skip
    assert sorted(tmp_path.glob("tq-*")) == [homes["live"], homes["stopped"]]
    assert remove_leftover(found["stopped"], stopped=True)
    assert not remove_leftover(found["live"], stopped=True)
    os.close(fd)


def test_the_queue_of_a_script_that_was_killed_is_dead_and_goes_with_its_directory(storage, tmp_path):
    owner = tmp_path / "tq-kv-1"
    owner.mkdir()
    for name in ("run.json", "anonymous"):
        (owner / name).touch()
    home = storage("anonymous", owner)
    (home / "lock").write_text("4000000")
    os.utime(home)
    (found,) = find_leftovers([tmp_path])
    assert found.state == "dead", "also if it is a second old"
    assert remove_leftover(found)
    assert list(tmp_path.iterdir()) == []


def test_a_link_or_a_foreign_directory_is_no_leftover(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tq-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tq-nolock").mkdir()
    assert find_leftovers([tmp_path]) == []
