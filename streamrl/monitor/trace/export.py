"""`streamrl trace export`: a run, or some of its steps, as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import gzip
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from streamrl.errors import UserError, one_line
from streamrl.monitor.events import read_events
from streamrl.monitor.overlap import OverlapCollector
from streamrl.monitor.trace.flows import TrainedGroups
from streamrl.monitor.trace.slices import ALWAYS, Slices, Stretch

EXAMPLES = """\
examples:
  streamrl trace export runs/latest                                  writes runs/latest/trace.json
  streamrl trace export runs/latest --out trace.json.gz --from-step 40 --to-step 45

Open the file at https://ui.perfetto.dev, or in chrome://tracing, which needs no network.
"""


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="streamrl trace")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = commands.add_parser(
        "export", help="write a run as a trace for Perfetto", description="Write a run as a trace for Perfetto.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("run", metavar="RUN_DIR", help="of a run that lives, has ended, or was killed")
    command.add_argument("--out", metavar="FILE", help="default: RUN_DIR/trace.json; compressed if it ends in .gz")
    command.add_argument(
        "--from-step", type=int, metavar="A", help="only what happened from the start of this step ..."
    )
    command.add_argument("--to-step", type=int, metavar="B", help="... to the end of this one")
    command.add_argument("--force", action="store_true", help="replace FILE")
    options = parser.parse_args(argv)
    run = Path(options.run).expanduser()
    out = Path(options.out).expanduser() if options.out else run / "trace.json"
    try:
        written = export(run, out, from_step=options.from_step, to_step=options.to_step, force=options.force)
    except UserError as error:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
        return 2
    sys.stdout.write(f"{out}: {written.events:,} events, {written.steps:,} steps, {written.flows:,} flows\n")
    if written.left_out:
        sys.stderr.write(f"note: {written.left_out:,} events with impossible times are left out\n")
    return 0


Output = BinaryIO | gzip.GzipFile


@dataclass(slots=True)
class Written:
    """How much there is in a trace."""

    events: int = 0
    steps: int = 0
    flows: int = 0
    left_out: int = 0


def export(
    run: Path, out: Path, *, from_step: int | None = None, to_step: int | None = None, force: bool = False
) -> Written:
    """Write the trace to `out`, which appears whole. Raises UserError."""
    if not any((run / "events").glob("*.jsonl")):
        raise UserError(f"{run} has no event log (events/*.jsonl); name the directory of a run")
    if out.exists() and not out.is_file():
        raise UserError(f"--out {out} is not a file")
    if out.exists() and not force:
        raise UserError(f"{out} exists; --force replaces it, --out names another file")
    stretch = ALWAYS if from_step is None and to_step is None else stretch_of(run, from_step, to_step)
    written = Written()
    try:
        with _appearing(out) as file:
            _write(run, file, stretch, written)
    except OSError as error:
        if str(error.filename).startswith(str(run / "events")):
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return written


def stretch_of(run: Path, from_step: int | None, to_step: int | None) -> Stretch:
    """When these steps were, from the start of the first to the end of the last. Raises UserError."""
    first, last = 1 if from_step is None else from_step, math.inf if to_step is None else to_step
    if first < 1 or last < first:
        raise UserError(f"--from-step {first} --to-step {to_step}: steps count from 1, and the first comes first")
    collector = OverlapCollector()
    began, ended, known = math.inf, -math.inf, (math.inf, 0)
    for event in read_events(run):
        account = collector.feed(event)
        if event.name != "step" or event.process != "trainer" or event.kind not in ("begin", "span"):
            continue
        step = int(event.fields.get("step", 0))
        known = min(known[0], step), max(known[1], step)
        if first <= step <= last:
            start = collector.last.start if account is not None and collector.last is not None else event.start
            began = min(began, start)
            ended = max(ended, event.end) if event.kind == "span" else ended
    if began == math.inf:
        there = f"steps {known[0]} to {known[1]}" if known[1] else "no steps"
        raise UserError(f"{run} has none of the steps {first} to {to_step or 'the last'}; its event log knows {there}")
    unfinished = to_step is None or known[1] <= to_step
    return began, math.inf if unfinished else ended


@contextmanager
def _appearing(out: Path) -> Iterator[Output]:
    """A file beside `out` that takes its place once it is whole."""
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with open(handle, "wb") as file:
            if out.suffix == ".gz":
                with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed:
                    yield packed
            else:
                yield file
        os.replace(name, out)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write(run: Path, file: Output, stretch: Stretch, written: Written) -> None:
    encode = msgspec.json.Encoder().encode

    def write(event: dict[str, Any]) -> None:
        file.write(b",\n" if written.events else b"\n")
        file.write(encode(event))
        written.events += 1

    about = {"run": run.resolve().name, "clock": "microseconds since 1970, UTC"}
    file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[')
    slices = Slices(write, TrainedGroups(run / "batches.jsonl"), stretch)
    for event in read_events(run):
        slices.feed(event)
    slices.finish()
    file.write(b"\n]}\n")
    written.steps, written.flows, written.left_out = slices.steps, slices.flows, slices.left_out
