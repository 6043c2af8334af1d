"""The dashboard beside a run: it tells its address, and ends with the run, however that ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from streamrl.dashboard.beside import dashboard_beside
from tests.dashboard.scripted import Scripted

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes")


def test_it_serves_the_run_and_ends_with_the_block(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "run")
    told, lines = threading.Event(), []
    with dashboard_beside(run.path, 0, lambda line: (lines.append(line), told.set())):
        assert told.wait(60)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/#key=", lines[0])
        assert found, lines
        with urllib.request.urlopen(f"{found[1]}/api/whoami", timeout=10) as answer:
            assert answer.status == 200
        (child,) = psutil.Process().children()
        assert child.nice() >= 5
    assert psutil.Process().children() == []


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
