"""Failpoints: each stands somewhere, costs nothing when it is off, and does what the environment says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from transfer_queue import failpoints
from transfer_queue.__main__ import main
from transfer_queue.errors import Invalid
from transfer_queue.failpoints import FAILPOINTS, failpoint, hooked, parse, sites


def run(code: str, **environment: object) -> subprocess.CompletedProcess:
    env = os.environ | {name: str(value) for name, value in environment.items()}
    code = f"from transfer_queue.failpoints import failpoint\n{code}"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)


def test_each_failpoint_stands_at_one_place_at_least_and_is_described(capsys) -> None:
    assert set(sites()) == set(FAILPOINTS)
    assert [name for name, where in sites().items() if not where] == []
    assert main(["failpoints"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FAILPOINTS)
    assert "storage/snapshot.py:" in out


def test_a_failpoint_that_is_off_costs_less_than_100_ns() -> None:
    best = min(timed(100_000) for _ in range(5))
    assert best < 100e-9 * 100_000


def timed(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        failpoint("controller.after_append")
    return time.perf_counter() - began


def test_the_environment_kills_a_process_at_the_nth_time() -> None:
    code = "import sys\nfor i in range(9):\n    print(i, flush=True)\n    failpoint('unit.after_make')"
    done = run(code, TQ_FAILPOINTS="unit.after_make=kill@3")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]


def test_what_has_fired_does_not_fire_in_the_next_process(tmp_path) -> None:
    arm = {"TQ_FAILPOINTS": "unit.after_make=raise; unit.mid_make=sleep:0.01", "TQ_FAILPOINTS_ONCE": tmp_path}
    first, second = (run("failpoint('unit.after_make')", **arm) for _ in range(2))
    assert "InjectedError: failpoint unit.after_make" in first.stderr
    assert second.returncode == 0
    assert os.listdir(tmp_path) == ["unit.after_make"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("unit.nowhere=kill", "no failpoint 'unit.nowhere'"), ("unit.after_make", "is not name=kill"), ("a=b", "a=b")],
)
def test_an_entry_that_is_none_is_an_error(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse(text)


def test_a_hook_sees_the_failpoints_that_are_passed() -> None:
    seen: list[str] = []
    with hooked(seen.append):
        failpoint("unit.after_make")
    failpoint("unit.mid_make")
    assert seen == ["unit.after_make"]
    assert failpoints._hook is None
