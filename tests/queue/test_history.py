"""Snapshots: recovery takes the newest good one and the records after it, whichever files were damaged or lost."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.recovery import recover, restore, sections
from transfer_queue.errors import Corrupt
from transfer_queue.net import messages as m
from transfer_queue.service.lifetime import wait_for_exit
from transfer_queue.storage import history
from transfer_queue.storage.history import History
from transfer_queue.storage.journal import JournalFailed, distrusted, journal_files
from transfer_queue.storage.snapshot import read_snapshot, snapshots, write_snapshot


class Controller:
    """A core with one client that writes plain rows."""

    def __init__(self, directory: Path, *, fork: bool = False) -> None:
        self.answers: list[m.Response] = []
        self.path = directory / "journal"
        self.fork = fork
        self.clock = 0.0
        self.requests = 0
        self.start()

    def start(self) -> None:
        self.clock += 1
        self.core = ControllerCore.recover(self.path, send=self.take, now=self.clock, run="r", fork=self.fork)
        self.core.handle("c", m.Request(0, m.Hello(1, "r", "", "writer")), self.clock)

    def take(self, client: str, response: m.Response) -> None:
        self.answers.append(response)

    def ask(self, body: m.Mutation | m.Query, request: int | None = None) -> Any:
        if request is None:
            request = self.requests = self.requests + 1
        self.clock += 0.001
        self.core.handle("c", m.Request(request, body), self.clock)
        assert self.answers[-1].id == request
        return self.answers[-1].body

    def put(self, *keys: str) -> Any:
        return self.ask(m.Commit("p", list(keys), tags=[{"at": self.requests, "key": key} for key in keys]))

    def crash(self) -> None:
        """Nothing is closed but what the operating system closes."""
        self.core.close()

    def keys(self) -> set[str]:
        return set(self.core.ledger.partition("p").rows.ids)


@pytest.fixture
def every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after each of them."""
    monkeypatch.setattr(history, "TAIL", 0.0)


@pytest.mark.usefixtures("every_request")
@pytest.mark.parametrize("fork", [False, True])
def test_a_controller_goes_on_from_its_snapshot_and_keeps_no_more_than_two(tmp_path: Path, fork: bool) -> None:
    controller = Controller(tmp_path, fork=fork)
    for i in range(12):
        controller.put(f"k{i}", f"l{i}")
        wait_for_snapshot(controller)
    fingerprint = controller.core.ledger.fingerprint()
    assert len(snapshots(controller.path)) == 2
    assert len(journal_files(controller.path)) <= 3
    assert list(tmp_path.glob("snapshot-*.*")) == []
    controller.crash()
    assert recover(controller.path, run="r").ledger.fingerprint() == fingerprint
    controller.start()
    assert controller.keys() == {f"{k}{i}" for k in "kl" for i in range(12)}


def wait_for_snapshot(controller: Controller) -> None:
    """Let the writing child end, if there is one, and be noticed."""
    child = controller.core._journal._child  # pyright: ignore
    if child is not None:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        controller.core.tick(controller.clock)


@pytest.mark.usefixtures("every_request")
def test_an_answer_that_a_snapshot_holds_is_given_again_and_not_done_again(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    first = controller.put("a")
    controller.ask(m.OpenPartition("g", [m.TaskSpec("generate", "prompt")]))
    controller.ask(m.Admit("g", [m.GroupSpec("u", 1, 0), m.GroupSpec("v", 1, 1)]))
    leased = controller.ask(m.Lease("g", "generate", "writer", groups=1), 90)
    merged = controller.ask(m.Commit("p", ["a"], tags=[{"more": 1}]), 91)
    controller.crash()
    controller.start()
    assert controller.ask(m.Commit("p", ["a"], tags=[{"at": 0, "key": "a"}]), 1) == first
    again = controller.ask(m.Lease("g", "generate", "writer", groups=1), 90)
    assert [again.token, [group.uid for group in again.groups]] == [leased.token, ["u"]]
    assert msgspec.msgpack.encode(controller.ask(m.Commit("p", ["a"], tags=[{"more": 1}]), 91)) == (
        msgspec.msgpack.encode(merged)
    )
    controller.ask(m.ReleaseHolder("writer", died=False))
    anew = controller.ask(m.Lease("g", "generate", "writer", groups=1), 90)
    assert anew.token != leased.token


@pytest.mark.usefixtures("every_request")
def test_a_damaged_snapshot_is_put_aside_for_the_one_before_it(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    for i in range(5):
        controller.put(f"k{i}")
    fingerprint = controller.core.ledger.fingerprint()
    controller.crash()
    _, newest = snapshots(controller.path)[0]
    flip(newest, newest.stat().st_size // 2)
    assert recover(controller.path, run="r").ledger.fingerprint() == fingerprint
    assert not newest.exists()
    assert newest.with_name(f"{newest.name}.damaged").exists()


@pytest.mark.usefixtures("every_request")
def test_when_no_snapshot_is_good_and_the_journal_does_not_reach_back_it_says_so(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    for i in range(5):
        controller.put(f"k{i}")
    controller.crash()
    for _, file in snapshots(controller.path):
        flip(file, 30)
    with pytest.raises(Corrupt, match=r"snapshot-.*snapshot-.*and nothing older serves: .*those from 1 on are gone"):
        recover(controller.path, run="r")
    assert len(snapshots(controller.path)) == 2
    for file in tmp_path.glob("journal*"):
        file.unlink()
    with pytest.raises(Corrupt, match="there is no journal"):
        recover(controller.path, run="r")


def test_any_flipped_bit_and_any_cut_of_a_snapshot_is_found(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.put("a", "b")
    path = write_snapshot(controller.path, "r", 2, sections(controller.core.ledger, controller.core._replies))
    whole = path.read_bytes()
    assert restore(read_snapshot(path, 2, "r")).ledger.fingerprint() == controller.core.ledger.fingerprint()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(Corrupt, match="snapshot-"):
            list(read_snapshot(path, 2, "r"))
        path.write_bytes(whole[:at])
        with pytest.raises(Corrupt, match="snapshot-"):
            list(read_snapshot(path, 2, "r"))
    path.write_bytes(whole + b"x")
    with pytest.raises(Corrupt, match="something more"):
        list(read_snapshot(path, 2, "r"))
    path.write_bytes(whole)
    with pytest.raises(Corrupt, match="belongs to run 'r', not to 's'"):
        list(read_snapshot(path, 2, "s"))
    with pytest.raises(Corrupt, match="does not begin as the snapshot after record 3"):
        list(read_snapshot(path, 3, "r"))


@pytest.mark.usefixtures("every_request")
def test_random_histories_with_crashes_and_damage_lose_nothing_that_was_answered(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    controller, expected = Controller(tmp_path), {"first"}
    controller.put("first")
    for _ in range(150):
        key = f"k{rng.randrange(40)}"
        if rng.random() < 0.7:
            controller.put(key, key + "x")
            expected |= {key, key + "x"}
        else:
            controller.ask(m.Clear("p", [key]))
            expected.discard(key)
        if rng.random() < 0.2:
            fingerprint = controller.core.ledger.fingerprint()
            controller.crash()
            damage(controller.path, rng)
            assert recover(controller.path, run="r").ledger.fingerprint() == fingerprint
            controller.start()
            assert controller.keys() == expected


def damage(path: Path, rng: random.Random) -> None:
    """What recovery is to survive: a torn record, a half-written snapshot, a damaged newest snapshot."""
    kind, found = rng.randrange(4), snapshots(path)
    if kind == 0:
        with path.open("ab") as file:
            file.write(b"\\x10\\0\\0" if rng.random() < 0.5 else bytes(20))
    elif kind == 1 and found:
        path.with_name(f"snapshot-{found[0][0] + 1:016x}.77").write_bytes(found[0][1].read_bytes()[:50])
    elif kind == 2 and len(found) > 1:
        flip(found[0][1], rng.randrange(found[0][1].stat().st_size))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.usefixtures("every_request")
def test_a_snapshot_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    controller = Controller(tmp_path)
    monkeypatch.setattr(history, "write_snapshot", full)
    controller.put("a")
    controller.put("b")
    assert "no snapshot after record" in caplog.text
    controller.crash()
    controller.start()
    assert controller.keys() == {"a", "b"}


def test_after_a_sync_that_failed_all_is_written_anew_before_anything_more_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    controller = Controller(tmp_path, fork=True)
    controller.put("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(JournalFailed, match="Input/output error.*journal'"):
            controller.core._journal.sync()
    controller.crash()
    controller.start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(JournalFailed, match="Input/output error.*journal'"):
            controller.put("b")
    controller.crash()
    controller.start()
    controller.put("c")
    for _, file in journal_files(controller.path)[:-1]:
        file.unlink()  # nobody knows what of it is on the disk
    controller.crash()
    controller.start()
    assert set(controller.ask(m.ListKeys("p")).partitions["p"]) == {"a", "b", "c"}
    assert not distrusted(controller.path).exists()


def test_a_writer_that_is_killed_leaves_the_journal_in_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    controller = Controller(tmp_path, fork=True)
    monkeypatch.setattr(history, "TAIL", 0.0)
    monkeypatch.setattr(history, "write_snapshot", lambda *_: os.kill(os.getpid(), 9))
    controller.put("a")
    wait_for_snapshot(controller)
    assert "its writer was ended by signal 9" in caplog.text
    monkeypatch.setattr(history, "write_snapshot", lambda *_: 1 / 0)
    controller.put("b")
    wait_for_snapshot(controller)
    assert "its writer ended with 1" in caplog.text
    controller.put("c")
    controller.crash()
    assert snapshots(controller.path) == []
    controller.start()
    assert controller.keys() == {"a", "b", "c"}


KILLED = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from test_history import Controller, history
controller = Controller(Path({directory!r}), fork=True)
controller.put("a")
history.TAIL = 0.0
history.write_snapshot = lambda *_: time.sleep(60)
controller.put("b")
controller.put("c")
print(controller.core._journal._child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_controller_that_is_killed_takes_the_writer_of_its_snapshot_along(tmp_path: Path) -> None:
    code = KILLED.format(here=str(Path(__file__).parent), directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert wait_for_exit(int(done.stdout), 5.0)
    assert set(recover(tmp_path / "journal", run="r").ledger.partition("p").rows.ids) == {"a", "b", "c"}


def test_a_snapshot_is_due_when_a_replay_would_take_too_long(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    taken = History(path, "r", 0)
    commit = m.Commit("p", [f"k{i}" for i in range(1000)])
    for seq in range(1, 1000):
        taken.append(m.Record(seq, 0.0, "", 0, commit))
        taken.settle(lambda: iter([["ledger"]]))
        if snapshots(path):
            break
    taken.close()
    assert history.TAIL < seq * history.replay_seconds(commit) < 1.1 * history.TAIL
