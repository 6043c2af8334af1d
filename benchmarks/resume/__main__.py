"""The command. See the package."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import resume
from benchmarks.bars import Bar, report
from benchmarks.resume.account import Outcome
from benchmarks.resume.real import real
from benchmarks.resume.repeats import deterministic
from benchmarks.resume.virtual import virtual


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resume",
        description=resume.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--kills", type=int, default=200, help="in virtual time")
    parser.add_argument("--real", type=int, default=0, metavar="KILLS", help="of real processes, under Ray")
    parser.add_argument("--deterministic", type=int, default=0, metavar="KILLS", help="of runs that must end the same")
    parser.add_argument("--stall", action="store_true", help="measure what a save costs the training")
    parser.add_argument("--jobs", type=int, default=1, help="processes that kill side by side")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bars: list[Bar] = []
    if options.kills:
        share = -(-options.kills // options.jobs)
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            seeds = [(options.seed + 1_000 * job, share) for job in range(options.jobs)]
            outcome = sum(pool.starmap(virtual, seeds), Outcome())
        print(f"kills by kind: {dict(outcome.kinds)}", flush=True)
        bars += outcome.bars("virtual time", options.kills)
    if options.real:
        bars += real(options.seed, options.real).bars("real processes", options.real)
    if options.deterministic:
        bars += deterministic(options.seed, options.deterministic)
    if options.stall:
        from benchmarks.resume.stall import stall  # imports torch

        bars += stall()
    return report(bars, options.json)


if __name__ == "__main__":
    sys.exit(main())
