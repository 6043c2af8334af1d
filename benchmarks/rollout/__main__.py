"""The command. See the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import rollout
from benchmarks.bars import report
from benchmarks.rollout.agreement import parity, ratio, vllm
from benchmarks.rollout.engines import engines
from benchmarks.rollout.router import router
from benchmarks.rollout.weights import weights

PARTS = {
    "ratio": ratio, "vllm": vllm, "engines": engines, "router": router, "weights": weights, "parity": parity,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout", description=rollout.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one (may be repeated)")
    options = parser.parse_args()
    return report([bar for name in options.part or PARTS for bar in PARTS[name]()], options.json)


if __name__ == "__main__":
    sys.exit(main())
