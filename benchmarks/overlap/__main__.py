"""The command. See the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import overlap
from benchmarks.bars import Bar, report
from benchmarks.overlap import calculator, plots, simulation, tables

PARTS = ("simulation", *calculator.PARTS)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap", description=overlap.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--seeds", type=int, default=5, help="of the calculator job")
    parser.add_argument("--sweep", choices=list(simulation.SWEEPS), action="append", help="simulation: only this one")
    parser.add_argument("--jobs", type=int, default=2, help="simulation: runs side by side")
    parser.add_argument("--outcomes", type=Path, help="simulation: write what was measured of each run here (JSON)")
    parser.add_argument("--plots", type=Path, help="simulation: a directory for charts (SVG)")
    parser.add_argument("--markdown", type=Path, help="simulation: write the tables here")
    options = parser.parse_args()
    parts = options.part or PARTS
    bars: list[Bar] = []
    if "simulation" in parts:
        bars += _simulate(options)
    bars += calculator.measure(parts, options.seeds)
    return report(bars, options.json)


def _simulate(options: argparse.Namespace) -> list[Bar]:
    results: dict[str, simulation.Outcomes] = {}
    for name in options.sweep or simulation.SWEEPS:
        results[name] = simulation.run_all(simulation.SWEEPS[name](), 1 if name == "real" else options.jobs)
        if options.outcomes is not None:
            options.outcomes.write_text(json.dumps(results, indent=1) + "\n")
    if options.plots is not None:
        plots.write(results, options.plots)
    if options.markdown is not None:
        options.markdown.write_text(tables.markdown(results))
    return simulation.bars(results)


if __name__ == "__main__":
    sys.exit(main())
