"""The queue as real processes, three clients of it, and SIGKILL at each failpoint of each of them.

The clients' logs, on the disk, say what was acknowledged; a client that comes at the end compares it with what the
queue has. Nothing is lost, no group is trained twice, no byte is another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.queue.chaos.client_process import GROUPS, SESSIONS, TASKS, digest, final_groups, read_log
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.failpoints import FAILPOINTS
from transfer_queue.net.messages import GroupSpec
from transfer_queue.service.queue_service import QueueService

ROLES = ("writer", "generator", "trainer")

NTH = {
    "controller.before_append": 60, "controller.after_append": 90, "controller.before_reply": 120,
    "controller.before_flush": 40, "controller.before_sync": 20, "controller.after_sync": 30, "client.before_sync": 15,
    "recovery.mid_replay": 30, "client.after_send": 25, "client.after_copy": 9,
    "client.after_commit": 9, "client.before_renew": 3, "unit.before_answer": 5,
}  # fmt: skip
"""At which passage it kills; else at the first."""

QUICK = ("controller.after_append", "unit.after_make", "client.after_send")

DEADLINE = 60.0


class Run:
    """One service with its clients; clients that die are started again."""

    def __init__(self, directory: Path, service: QueueService, environment: dict[str, str]) -> None:
        self.directory, self.service, self.environment = directory, service, environment
        self.clients: dict[str, subprocess.Popen] = {}
        self.deaths = self.killed = 0
        self.began = time.monotonic()

    def start(self, role: str) -> None:
        command = [sys.executable, "-m", "tests.queue.chaos.client_process", role]
        command += [json.dumps(self.service.address), str(self.log(role))]
        with open(self.directory / f"{role}.out", "ab") as out:
            self.clients[role] = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def log(self, role: str) -> Path:
        return self.directory / f"{role}.log"

    def tend(self) -> bool:
        """Start again what was killed; whether writer and trainer are done."""
        assert time.monotonic() - self.began < DEADLINE, f"not done in {DEADLINE} s: {self.words()}"
        for role, process in self.clients.items():
            code = process.poll()
            if code == -signal.SIGKILL:
                self.deaths += 1
                self.start(role)
            elif code not in (None, 0):
                raise AssertionError(f"{role} ended with {code}: {self.words()}")
        time.sleep(0.02)
        return all(self.clients[role].poll() == 0 for role in ("writer", "trainer"))

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.tend():
            pass

    def words(self) -> str:
        return "\n".join(f"{role}: {(self.directory / f'{role}.out').read_text()[-1500:]}" for role in self.clients)

    def stop(self) -> None:
        for process in self.clients.values():
            process.kill()
            process.wait()


def run(directory: Path, failpoint: str, monkeypatch: pytest.MonkeyPatch, kill: Callable[[Run], None] | None) -> Run:
    """A whole job, with one process dying at `failpoint` ("": none), and `kill` in its midst."""
    once = directory / "once"
    once.mkdir()
    arm = {"TQ_FAILPOINTS_ONCE": str(once)}
    if failpoint:
        arm["TQ_FAILPOINTS"] = f"{failpoint}=kill@{NTH.get(failpoint, 1)}"
    for name, value in arm.items():
        monkeypatch.setenv(name, value)
    environment = os.environ | arm | {"TQ_FORCE_REMOTE": str(int(failpoint == "unit.before_answer"))}
    budget = 1 << 20 if "spill" in failpoint else 32 << 20
    service = QueueService(directory / "q", storage_dir=directory, unit_budget_bytes=budget, segment_bytes=64 << 10)
    service.start()
    work = Run(directory, service, environment)
    try:
        with SyncQueueClient(service.address, "feeder") as feeder:
            feeder.open_partition("train", tasks=TASKS)
            if failpoint.endswith("_sync"):
                feeder.open_partition("plain", tasks=[], durability="journal")
            for role in ROLES:
                work.start(role)
            for i in range(GROUPS):
                uid = f"u{i}"
                feeder.admit("train", [GroupSpec(uid, SESSIONS, i)], {"raw_prompt": [f"what is {uid}?"]})
            kept = prepare(feeder, failpoint)
            if kill is not None:
                work.until(lambda: len(read_log(work.log("writer"))) > 60)
                kill(work)
            work.until(lambda: False)
            while failpoint == "unit.after_compact" and not os.listdir(once):  # a second after its rows were cleared
                work.tend()
            judge(work, feeder)
            if kept:
                assert all((row == 1).all() for row in feeder.get("many", kept)["x"].rows_list())
        if failpoint:
            assert os.listdir(once) == [failpoint], "nobody came to the failpoint"
    finally:
        work.stop()
        service.stop(clean=True)
    return work


def prepare(client: SyncQueueClient, failpoint: str) -> list[str]:
    """Work that brings the queue to failpoints at which a short job does not come by; the keys of rows of ones."""
    if failpoint.startswith("snapshot."):  # rows without fields, until there are three snapshots
        keys = [f"row {i}" for i in range(20_000)]
        for _ in range(14):
            client.put("many", keys, {})
            client.clear("many", keys)
    elif failpoint == "unit.after_compact":  # of many rows a few survive
        keys = [f"row {i}" for i in range(300)]
        client.put("many", keys, {"x": np.ones((300, 1000))})
        client.clear("many", keys[10:])
        return keys[:10]
    elif "spill" in failpoint:  # more than there is memory for
        keys = [f"row {i}" for i in range(60)]
        for key in keys:
            client.put("many", [key], {"x": np.ones((1, 60 << 10), np.uint8)})
        return keys
    return []


def judge(work: Run, client: SyncQueueClient) -> None:
    """By the logs."""
    rows, cleared = {}, set()
    for kind, key, *found in read_log(work.log("writer")):
        if kind == "ok":
            rows[key] = found[0]
        elif kind == "cleared":
            cleared.add(key)
    kept = sorted(set(rows) - cleared)
    got = client.get("plain", kept)["v"].rows_list()
    assert {key: digest(value) for key, value in zip(kept, got, strict=True)} == {key: rows[key] for key in kept}
    tags = client.list("plain")["plain"]
    assert {key: tag["digest"] for key, tag in tags.items()} == {key: rows[key] for key in kept}
    entries = read_log(work.log("trainer"))
    assert sorted(final_groups(entries)) == sorted(f"u{i}" for i in range(GROUPS)), "not each group once"
    written: dict[str, set[str]] = {}
    acknowledged: dict[str, str] = {}
    for kind, *values in read_log(work.log("generator")):
        if kind == "try":
            written.setdefault(values[0], set()).add(values[1])
        elif kind == "ok":
            assert values[0] not in acknowledged, f"{values[0]} was acknowledged twice"
            acknowledged[values[0]] = values[1]
    for kind, *values in entries:
        if kind == "saw":
            key, found = values
            assert found == acknowledged.get(key, found), f"{key}: other bytes than were acknowledged"
            assert found in written[key], f"{key}: bytes that nobody wrote"


def kill_named(*names: str) -> Callable[[Run], None]:
    def kill(work: Run) -> None:
        for name, pid in work.service.pids().items():
            if name.startswith(names):
                os.kill(pid, signal.SIGKILL)
        for role, process in work.clients.items():
            if role in names:
                process.kill()  # unless it is done already
                work.killed += process.wait() == -signal.SIGKILL

    return kill


def helper_of(failpoint: str) -> Callable[[Run], None] | None:
    """What has to die before anybody comes to the failpoint."""
    if failpoint.startswith("recovery."):
        return kill_named("controller")
    return kill_named("unit") if failpoint in ("unit.mid_keep", "unit.mid_free") else None


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("failpoint", QUICK)
def test_a_kill_at_a_failpoint_loses_nothing(tmp_path, monkeypatch, failpoint) -> None:
    run(tmp_path, failpoint, monkeypatch, helper_of(failpoint))


@pytest.mark.endurance
@pytest.mark.chaos
@pytest.mark.parametrize("failpoint", sorted(set(FAILPOINTS) - set(QUICK)))
def test_a_kill_at_any_failpoint_loses_nothing(tmp_path, monkeypatch, failpoint) -> None:
    run(tmp_path, failpoint, monkeypatch, helper_of(failpoint))


@pytest.mark.endurance
@pytest.mark.chaos
@pytest.mark.parametrize(
    "victims",
    [
        ("controller",), ("unit",), ("writer",), ("generator",), ("trainer",), ("controller", "unit"),
        ("controller", "trainer"), ("unit", "writer"), ("controller", "unit", "writer", "generator", "trainer"),
    ],
)  # fmt: skip
def test_a_kill_at_any_moment_loses_nothing(tmp_path, monkeypatch, victims) -> None:
    work = run(tmp_path, "", monkeypatch, kill_named(*victims))
    assert work.deaths >= work.killed
