"""CPU time of a process and those below it, living and dead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from streamrl.monitor.cpu import CpuMeter
from streamrl.monitor.events import EventLog

BUSY = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"


def test_what_a_child_took_counts_while_it_lives_and_after_its_death() -> None:
    meter = CpuMeter()
    before = meter.seconds()
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"done\n"
    alive = meter.seconds()
    child.kill()
    child.communicate()
    after = meter.seconds()
    assert before is not None
    assert alive is not None
    assert after is not None
    assert alive - before >= 0.45
    assert after >= alive


def test_the_root_is_the_launcher_of_the_run(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events", "launcher"):
        pass
    found = CpuMeter.of(tmp_path).seconds()
    assert found is not None
    assert found >= 0.9 * time.process_time()
    assert CpuMeter.of(tmp_path / "nothing").seconds() is not None


def test_a_run_whose_processes_are_not_below_its_launcher_says_nothing() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert CpuMeter(other.pid).seconds() is None
    finally:
        other.communicate()
    assert CpuMeter(other.pid).seconds() is None
    assert CpuMeter(os.getpid()).seconds() is not None
