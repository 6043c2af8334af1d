"""Runs workloads on all sides in turns and reports. See the package."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bars import Bar, report
from benchmarks.queue import tables
from benchmarks.queue.all import WORKLOADS
from benchmarks.queue.drivers import Memcpy, Ours
from benchmarks.queue.peer import Peer, default_environment
from benchmarks.queue.workload import Figures, Workload

SEED = 20_260_401


def run_side(side: Any, workload: Workload, quick: bool, seed: int) -> dict[str, float]:
    if isinstance(side, Peer):
        return side.run(workload.name, quick, seed)
    return workload.run(side, quick, seed)


def measure(workload: Workload, sides: list[Any], *, quick: bool, rounds: int, seed: int) -> Figures:
    """All rounds of one workload: A B C A B C ... The first batch serves every round; new keys come from the seed."""
    figures = Figures()
    taking_part = [side for side in sides if side.name in workload.sides]
    for i in range(rounds):
        figures.loads.append(os.getloadavg()[0])
        for side in taking_part:
            figures.add(side.name, run_side(side, workload, quick, seed + (i if "memcpy" not in workload.sides else 0)))
        print(f"{workload.name}: round {i + 1} of {rounds}, load {figures.loads[-1]:.1f}", file=sys.stderr)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the bars here")
    parser.add_argument("--markdown", type=Path, help="write a table of medians and ratios here")
    parser.add_argument("--chart", type=Path, help="write a chart (SVG) here")
    parser.add_argument("--workload", choices=list(WORKLOADS), nargs="+", help="only these")
    parser.add_argument("--peer", action="store_true", help="also TransferQueue from PyPI; installs it once, 2 GB")
    parser.add_argument("--peer-environment", type=Path, default=default_environment(), help="where (%(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, two rounds: only to see that all runs",
    )
    parser.add_argument("--rounds", type=int, help="instead of each workload's own number")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    print(f"seed {options.seed}; load average {os.getloadavg()}", file=sys.stderr)

    chosen = [workload for name, workload in WORKLOADS.items() if not options.workload or name in options.workload]
    heading = f"Queue benchmark, seed {options.seed}, {os.cpu_count()} cores"
    results: dict[str, Figures] = {}
    bars: list[Bar] = []
    with contextlib.ExitStack() as closing:
        sides: list[Any] = [closing.enter_context(contextlib.closing(Ours()))]
        if options.peer:
            sides.append(closing.enter_context(contextlib.closing(Peer(options.peer_environment))))
        sides.append(closing.enter_context(contextlib.closing(Memcpy())))
        for workload in chosen:
            rounds = options.rounds or (2 if options.quick else workload.rounds)
            figures = measure(workload, sides, quick=options.quick, rounds=rounds, seed=options.seed)
            results[workload.name] = figures
            bars += workload.bars(figures)
            bars.append(Bar(f"{workload.name}: load average, median", median(figures.loads), "processes"))
            # so far: the rest may take long
            tables.write(options.markdown, tables.markdown(results, bars, heading, quick=options.quick))
            tables.write(options.chart, tables.chart(results))
    return report(bars, options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
