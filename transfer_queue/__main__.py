"""`python -m transfer_queue serve controller|unit ...` (started by QueueService) and `... stat DIRECTORY`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from transfer_queue.errors import QueueError
from transfer_queue.processes import ReadyPipe, allow_many_files, be_served_first, die_with_parent, stop_event


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.command == "stat":
        return _stat(args)
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
    parser = argparse.ArgumentParser(prog="python -m transfer_queue")
    commands = parser.add_subparsers(dest="command", required=True)
    stat = commands.add_parser("stat", help="show partitions, groups by state and storage of a running queue")
    stat.add_argument("directory", type=Path, help="directory of the queue service")
    serve = commands.add_parser("serve", help="run one process of a queue").add_subparsers(dest="role", required=True)
    for role in ("controller", "unit"):
        process = serve.add_parser(role)
        process.add_argument("--run", required=True)
        process.add_argument("--key-file", required=True)
        process.add_argument("--socket", required=True, help="endpoint of the controller, unix://PATH")
        process.add_argument("--directory", type=Path, required=True)
        process.add_argument("--segment-bytes", type=int, default=8 << 20)
        process.add_argument("--parent", type=int, default=0, help="end when this process does")
        process.add_argument("--ready-fd", type=int, default=None)
        if role == "controller":
            process.add_argument("--fsync", action="store_true")
            process.add_argument("--sampler", default="", help="JSON: name of the sampler of fetches, and parameters")
            process.add_argument("--polling", action="store_true", help="a fetch that finds too few rows gets none")
        else:
            process.add_argument("--unit", type=int, required=True)
            process.add_argument("--endpoint", required=True, help="where this unit serves bulk reads, ipc://PATH")
            process.add_argument("--budget", type=int, required=True, help="bytes of segments at most")
    return parser


async def _serve_controller(args: argparse.Namespace) -> None:
    from transfer_queue.controller import serve_controller

    await serve_controller(
        args.directory, args.socket, run=args.run, key_file=args.key_file, stop=stop_event(),
        segment_bytes=args.segment_bytes, fsync=args.fsync, ready=ReadyPipe(args.ready_fd).say,
        sampler=args.sampler, polling=args.polling,
    )  # fmt: skip


async def _serve_unit(args: argparse.Namespace) -> None:
    from transfer_queue.unit import serve_unit

    address = {"run": args.run, "socket": args.socket, "key_file": args.key_file}
    await serve_unit(
        address, unit=args.unit, directory=args.directory, endpoint=args.endpoint, budget=args.budget,
        segment_bytes=args.segment_bytes, stop=stop_event(), ready=ReadyPipe(args.ready_fd).say,
    )  # fmt: skip


def _stat(args: argparse.Namespace) -> int:
    """Print the queue's statistics as JSON."""
    import msgspec

    from transfer_queue.client import QueueClient
    from transfer_queue.service import read_address

    async def ask() -> bytes:
        client = await QueueClient.connect(read_address(args.directory), name=f"stat-{os.getpid()}", timeout=5.0)
        try:
            return msgspec.json.encode(await client.stats())
        finally:
            await client.close()

    try:
        stats = asyncio.run(ask())
    except QueueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(json.loads(stats), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
