"""The dashboard beside a run, as a process of its own: what it does never holds up the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NICE = 5
"""It gives way to everything that the run does."""

STOP_SECONDS = 5.0


@contextmanager
def dashboard_beside(run_dir: Path, port: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve `run_dir` until the block is left. `tell` gets the line with its address, once it is there, or what it
    says instead. It ends with this process, however that ends: its standard input does."""
    command = [sys.executable, "-c", "from streamrl.main import script; script()", "dash", str(run_dir), "--beside"]
    process = subprocess.Popen(
        [*command, *(["--port", str(port)] if port else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    threading.Thread(target=_listen, args=(process.stdout, tell), name="dashboard", daemon=True).start()
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listen(output: Iterator[str], tell: Callable[[str], None]) -> None:
    """Its first line is for the user; what follows is read so that it never blocks."""
    for number, line in enumerate(output):
        if number == 0:
            tell(line.rstrip())
