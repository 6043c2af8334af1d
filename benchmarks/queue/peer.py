"""PyPI's TransferQueue in an environment and a process of its own.

This process writes one JSON line per round, the peer's answers with one: {"workload", "quick", "seed"} -> figures.
The peer runs the very workload functions of this package; only `transfer_queue` is another one there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "0.1.11"
PACKAGES = ["ray[default]==2.60.0", "tensordict==0.15.3", "numpy", "rich", f"TransferQueue=={VERSION}"]
TORCH = ["torch==2.13.0+cpu", "torch==2.13.0"]
"""The first of these that pip finds; the CPU build is a tenth of the other."""


def default_environment() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "streamrl" / f"transfer-queue-{VERSION}"


def make_environment(directory: Path) -> Path:
    """The python of the virtual environment in `directory`, which is made if it is not there: about 2 GB, minutes."""
    python = directory / "bin" / "python"
    done = directory / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if not any(subprocess.run([*pip, torch], check=False).returncode == 0 for torch in TORCH):
            raise RuntimeError(f"pip found none of {TORCH}")
        subprocess.run([*pip, *PACKAGES], check=True)
        done.touch()
    return python


class Peer:
    """The peer's process. Its output goes to a log that an error quotes."""

    name = "peer"

    def __init__(self, environment: Path) -> None:
        script = Path(__file__).with_name("peer_process.py")
        self._log = tempfile.NamedTemporaryFile("w+", prefix="tq-peer-", suffix=".log")  # noqa: SIM115
        removed = ("PYTHONPATH", "TQ_ADDRESS", "RAY_ADDRESS")
        clean = {name: value for name, value in os.environ.items() if name not in removed}
        self._process = subprocess.Popen(
            [str(make_environment(environment)), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, cwd=tempfile.gettempdir(), env=clean,
        )  # fmt: skip
        self._read()

    def run(self, workload: str, quick: bool, seed: int) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps({"workload": workload, "quick": quick, "seed": seed}), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = Path(self._log.name).read_text(errors="replace").splitlines()[-15:]
            raise RuntimeError("the peer's process ended: " + "\n".join(words))
        return json.loads(line)
