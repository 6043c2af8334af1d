"""The dashboard beside a run: it tells its address, and ends with the run, however that ends."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from streamrl.config import load_config
from streamrl.dashboard import beside
from streamrl.dashboard.beside import dashboard_beside
from streamrl.runtime.launch import _dashboard
from streamrl.runtime.run_dir import RunDirectory
from tests.dashboard.scripted import Scripted

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes")


def test_it_serves_the_run_and_ends_with_the_block(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "run")
    told, lines = threading.Event(), []
    others = set(psutil.Process().children())
    with dashboard_beside(run.path, 0, lambda line: (lines.append(line), told.set())):
        assert told.wait(60)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/#key=", lines[0])
        assert found, lines
        with urllib.request.urlopen(f"{found[1]}/api/whoami", timeout=10) as answer:
            assert answer.status == 200
        (child,) = set(psutil.Process().children()) - others
        assert child.nice() >= 5
    assert not set(psutil.Process().children()) - others


PARENT = """
import sys
from pathlib import Path
from streamrl.dashboard.beside import dashboard_beside
with dashboard_beside(Path(sys.argv[1]), 0, lambda line: print(line, flush=True)):
    sys.stdin.read()
"""


def test_it_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "run")
    command = [sys.executable, "-c", PARENT, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert "http://" in parent.stdout.readline()
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()


@pytest.mark.parametrize(
    ("told", "terminal", "serves"),
    [((), False, False), ((), True, True), ((True,), False, True), ((False,), True, False)],
)
def test_a_run_serves_its_pages_where_somebody_looks_or_asked_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: tuple[bool, ...], terminal: bool, serves: bool
) -> None:
    served: list[Path] = []
    monkeypatch.setattr(beside, "dashboard_beside", lambda run_dir, *_: served.append(run_dir) or nullcontext())
    config = load_config(["experiment=calculator", *(f"monitor.dashboard.enabled={yes}" for yes in told)]).config
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with _dashboard(config, RunDirectory(tmp_path, False), console):
        assert served == [tmp_path] * serves
