"""Nothing waits for a rank without end: not the start, not a call, not the close, not the process's own end."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import streamrl.single_controller
from streamrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    RankInfo,
    ResourcePool,
    Worker,
    WorkerTimeout,
    register,
    worker_group,
)
from streamrl.single_controller.ranks import Ranks

ROOM = Path(streamrl.single_controller.__file__).parent
BOUNDED = {"ray.get": "timeout", "ray.wait": "timeout", "asyncio.wait": "timeout", "group.wait": ""}
"""What waits for ranks, and the argument that bounds it (empty: the only one there is)."""
ENDLESS = {"asyncio.Event().wait", "threading.Event().wait"}
"""Waits by design: `watch` (its caller cancels it) and a rank's `until_death` (its process's end is the answer)."""


class Stuck(Worker):
    """Where it is told to."""

    def __init__(self, rank: RankInfo, where: str) -> None:
        super().__init__(rank)
        self._where = where
        self._stop("__init__")

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> str:
        self._stop("work")
        return "done"

    def close(self) -> None:
        self._stop("close")

    def _stop(self, here: str) -> None:
        if here == self._where:
            threading.Event().wait()


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_every_wait_in_the_room_has_a_bound() -> None:
    seen = set()
    for file in sorted(ROOM.glob("*.py")):
        for name, call in calls(ast.parse(file.read_text())):
            if name in BOUNDED:
                bound = BOUNDED[name]
                given = [keyword.arg for keyword in call.keywords] if bound else call.args
                assert (bound in given) if bound else given, f"{file.name}:{call.lineno}: {name} without a bound"
                seen.add(name)
            elif name.endswith((".wait", ".join")) and name not in ENDLESS and "join" not in name:
                raise AssertionError(f"{file.name}:{call.lineno}: {name}: is it bounded? Say so in this test")
    assert seen == {"ray.get", "asyncio.wait", "group.wait"}


def test_ranks_are_an_interface_that_must_be_whole() -> None:
    with pytest.raises(TypeError, match=r"abstract methods '?end'?, '?submit'?, '?watch'?"):
        Ranks({}, 1, timeout=1.0)  # type: ignore[abstract]


def test_a_call_without_a_deadline_of_its_own_has_the_groups() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(Stuck, "work"), timeout=0.05)
    with pytest.raises(WorkerTimeout, match="work: no answer from rank 0 .* after 0.05 s"):
        group.work()
    with pytest.raises(WorkerTimeout):  # at once: that rank is still at it
        group.work()


def test_closing_ends_although_a_worker_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "CLOSE_TIMEOUT", 0.05)
    group = LocalWorkerGroup(ClassWithInitArgs(Stuck, "close"))
    assert group.work() == ["done"]
    began = time.monotonic()
    group.shutdown()
    assert time.monotonic() - began < 1.0


def test_the_process_ends_although_a_call_does_not() -> None:
    code = (
        "from tests.single_controller.test_deadlines import *\n"
        "try: LocalWorkerGroup(ClassWithInitArgs(Stuck, 'work'), timeout=0.05).work()\n"
        "except WorkerTimeout: print('told')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "told\n"


def test_ray_ranks_that_do_not_start_or_close_are_bounded_too(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamrl.single_controller import RayWorkerGroup
    from streamrl.single_controller.ray_ranks import RayRanks

    start = RayRanks._start

    def impatient(ranks: RayRanks, *args: Any) -> None:
        ranks._start_timeout = 0.3 if ranks.name == "__init__" else 60.0
        start(ranks, *args)

    monkeypatch.setattr(RayRanks, "_start", impatient)  # the processes are there; their workers now have so long
    monkeypatch.setattr(worker_group, "CLOSE_TIMEOUT", 0.3)
    with pytest.raises(WorkerTimeout, match=r"__init__: no answer from rank 0 \(pid \d+\) after 0.3 s"):
        RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Stuck, "__init__"), name="__init__")
    group = RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Stuck, "close"))
    assert group.work() == ["done"]
    began = time.monotonic()
    group.shutdown()
    assert time.monotonic() - began < 3.0
