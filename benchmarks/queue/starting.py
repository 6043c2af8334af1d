"""init() in a fresh process that has imported the package. The peer's Ray is started before its clock starts."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from benchmarks.bars import Bar
from benchmarks.queue.workload import Figures, Workload

OURS = """
import time, transfer_queue as tq, transfer_queue.interface
began = time.perf_counter(); tq.init(); print("seconds", time.perf_counter() - began, flush=True); tq.close()
"""


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Ours: a queue of its own, beside the one in use. The peer has one per Ray cluster: how long that one took."""
    if driver.name == "peer":
        return {"init": driver.init_seconds}
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", OURS], capture_output=True, text=True, check=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("seconds"))
    return {"init": float(line.split()[1])}


def bars(figures: Figures) -> list[Bar]:
    rows = [Bar("starting: init() after the import", figures.median("ours", "init"), "s", 1.0, "at most")]
    if figures.has("peer", "init"):
        rows.append(Bar("starting: the peer's init(), its Ray already up", figures.median("peer", "init"), "s"))
    return rows


WORKLOADS = [Workload("starting", one_round, bars, sides=("ours", "peer"), rounds=5)]
