"""`python -m transfer_queue.service.child controller|unit ...`: one process of a queue, started by a Supervisor."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from transfer_queue.controller.absences import UNIT_LOST_AFTER
from transfer_queue.errors import QueueError
from transfer_queue.service.lifetime import (
    ReadyPipe,
    allow_many_files,
    be_served_first,
    collect_only_young_garbage,
    die_with_parent,
    give_back_large_tables,
    stop_event,
)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.parent:
        die_with_parent(args.parent)
    be_served_first()
    allow_many_files()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve_controller(args) if args.role == "controller" else _serve_unit(args))
    except (QueueError, OSError) as error:
        logging.getLogger("transfer_queue").error("%s ends: %s", args.role, error)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transfer_queue.service.child")
    roles = parser.add_subparsers(dest="role", required=True)
    controller, unit = roles.add_parser("controller"), roles.add_parser("unit")
    for process in (controller, unit):
        process.add_argument("--run", required=True)
        process.add_argument("--key-file", required=True)
        process.add_argument(
            "--socket", required=True, help="endpoint of the controller, unix://PATH or curve://IP:PORT"
        )
        process.add_argument("--directory", type=Path, required=True)
        process.add_argument("--segment-bytes", type=int, default=8 << 20)
        process.add_argument("--parent", type=int, default=0, help="end when this process does")
        process.add_argument("--ready-fd", type=int, default=None)
    controller.add_argument("--fsync", action="store_true")
    controller.add_argument("--sampler", default="", help="JSON: name of the sampler of fetches, and its parameters")
    controller.add_argument("--polling", action="store_true", help="a fetch that finds too few rows gets none")
    controller.add_argument("--network", help="where clients of other nodes find it, curve://IP:PORT")
    controller.add_argument("--unit-lost-after", type=float, default=UNIT_LOST_AFTER, help="seconds")
    unit.add_argument("--unit", type=int, required=True)
    unit.add_argument("--endpoint", required=True, help="where this unit serves bulk bytes, ipc://PATH or tcp://IP:*")
    unit.add_argument("--budget", type=int, required=True, help="bytes of segments at most")
    unit.add_argument("--spill", type=Path, help="directory on disk for segments that memory has no room for")
    unit.add_argument("--spill-budget", type=int, default=0, help="bytes there at most")
    return parser


async def _serve_controller(args: argparse.Namespace) -> None:
    from transfer_queue.controller.process import serve_controller

    give_back_large_tables()
    pipe = ReadyPipe(args.ready_fd)

    def ready() -> None:
        collect_only_young_garbage()
        pipe.say()

    await serve_controller(
        args.directory, args.socket, run=args.run, key_file=args.key_file, stop=stop_event(),
        segment_bytes=args.segment_bytes, fsync=args.fsync, network=args.network,
        unit_lost_after=args.unit_lost_after,
        sampler=args.sampler, polling=args.polling, ready=ready,
    )  # fmt: skip


async def _serve_unit(args: argparse.Namespace) -> None:
    from transfer_queue.storage.unit import serve_unit

    address = {"run": args.run, "socket": args.socket, "key_file": args.key_file}
    await serve_unit(
        address, unit=args.unit, directory=args.directory, endpoint=args.endpoint, budget=args.budget,
        spill=args.spill, spill_budget=args.spill_budget,
        segment_bytes=args.segment_bytes, stop=stop_event(), ready=ReadyPipe(args.ready_fd).say,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
