"""`python -m transfer_queue serve|stat|peek|tail|dead|replay|doctor|failpoints`: a queue at the command line.

    serve DIRECTORY           run a queue on this machine, without Ray, until Ctrl-C; prints how to connect
    stat                      partitions by state, storage units, clients
    peek KEY                  the tags and fields of one row
    tail                      the groups, then what becomes of them
    dead                      groups that ended dead, and why
    replay UID...             give dead groups back to the generators
    doctor                    listeners, room, versions, leftovers of dead runs, and what to do about them
    failpoints                where a process can be made to die, for tests of what that does

-q DIRECTORY says which queue; else it is the one that TQ_ADDRESS or TQ_DIRECTORY names. Exit status: 0; 2 for an error,
which is one line; `doctor` 1 if there is something to do (with -q: for that queue; what others left is a note).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import Invalid, QueueError

if TYPE_CHECKING:
    from transfer_queue.service.queue_service import QueueService


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    _warn_of_the_peer()
    try:
        return args.run(args)
    except (QueueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transfer_queue", description="A queue at the command line.")
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="run a queue on this machine, without Ray")
    serve.add_argument(
        "directory", type=Path, help="keeps its journal, key and logs; a stopped queue goes on from there"
    )
    serve.add_argument("--units", type=int, default=2, help="storage units")
    serve.add_argument("--storage-dir", type=Path, help="where rows are stored (default: /dev/shm if it has the room)")
    serve.add_argument("--unit-budget", type=_bytes, help="bytes a unit may hold: 500M, 4G, ...")
    serve.add_argument("--spill-dir", type=Path, help="where rows go when memory is full (default: DIRECTORY/spill)")
    serve.add_argument("--spill-budget", type=_bytes, help="bytes a unit may move there; 0: none")
    serve.add_argument("--bind", metavar="IP", help="this node's IP, to serve other nodes too (encrypted)")
    serve.add_argument("--encrypt-bulk", action="store_true", help="with --bind: encrypt row data too")
    serve.add_argument("--fsync", action="store_true", help="an acknowledged change is on the disk")
    serve.add_argument("--sampler", type=_sampler, help='which rows a fetch gets: NAME, module:Class, or {"name": ...}')
    serve.add_argument("--polling", action="store_true", help="a fetch that finds too few rows gets none, at once")
    serve.add_argument("--metrics", action="store_true", help="serve Prometheus metrics on loopback, with a key")
    serve.add_argument("--metrics-port", type=_port, help="the same, at this port (0: any free one)")
    serve.add_argument("--clean", action="store_true", help="remove the stored rows at the end")
    serve.set_defaults(run=_serve)

    stat = commands.add_parser("stat", help="partitions by state, storage units, clients")
    stat.add_argument("--json", action="store_true", help="all numbers, for programs")
    _add(stat, "stat")

    peek = commands.add_parser("peek", help="the tags and fields of one row")
    peek.add_argument("key")
    peek.add_argument("-p", "--partition", help="where to look (default: everywhere)")
    peek.add_argument("-w", "--width", type=int, default=100, help="characters of a value")
    _add(peek, "peek")

    tail = commands.add_parser("tail", help="follow what becomes of groups")
    tail.add_argument("-p", "--partition", help="which one, if there are several")
    tail.add_argument("-n", "--number", type=int, default=0, help="end after so many changes")
    _add(tail, "tail")

    dead = commands.add_parser("dead", help="groups that ended dead, and why")
    dead.add_argument("-p", "--partition", help="only of this one")
    _add(dead, "dead")

    replay = commands.add_parser("replay", help="give dead groups back to the generators, with their prompts")
    replay.add_argument("uids", nargs="+", metavar="UID")
    replay.add_argument("-p", "--partition", help="which one, if there are several")
    _add(replay, "replay")

    doctor = commands.add_parser("doctor", help="what is there, and what is wrong with it")
    doctor.add_argument("-q", "--queue", metavar="DIRECTORY", type=Path, help="of a queue service, running or not")
    doctor.add_argument("--storage-dir", type=Path, help="a further place to look for leftovers")
    doctor.add_argument(
        "--clean", nargs="*", metavar="RUN", help="remove what dead runs left; or these runs, dead or stopped"
    )
    doctor.add_argument("--stopped", action="store_true", help="with --clean: stopped runs that could go on, too")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)

    failpoints = commands.add_parser("failpoints", help="where a process can be made to die, for tests")
    failpoints.set_defaults(run=_failpoints)
    return parser


def _add(command: argparse.ArgumentParser, verb: str) -> None:
    command.add_argument("-q", "--queue", metavar="DIRECTORY", type=Path, help="of the queue service")
    command.set_defaults(run=_ask(verb))


def _ask(verb: str) -> Callable[[argparse.Namespace], int]:
    """Run one of `inspecting`'s verbs on a client."""

    def run(args: argparse.Namespace) -> int:
        from transfer_queue.operations import inspecting

        work: Callable[..., Coroutine[None, None, int]] = getattr(inspecting, verb)
        return asyncio.run(inspecting.with_client(args.queue, lambda client: work(client, args, sys.stdout.write)))

    return run


def _serve(args: argparse.Namespace) -> int:
    from transfer_queue.service.queue_service import QueueService

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    service = QueueService(
        args.directory, storage_dir=args.storage_dir, units=args.units, unit_budget_bytes=args.unit_budget,
        spill_dir=args.spill_dir, spill_budget_bytes=args.spill_budget,
        fsync=args.fsync, bind=args.bind, encrypt_bulk=args.encrypt_bulk, sampler=args.sampler, polling=args.polling,
    )  # fmt: skip
    port = args.metrics_port if args.metrics_port is not None else 0 if args.metrics else None
    return asyncio.run(_serve_until_stopped(service, clean=args.clean, metrics_port=port))


async def _serve_until_stopped(service: QueueService, *, clean: bool, metrics_port: int | None) -> int:
    from transfer_queue.operations.inspecting import how_to_connect
    from transfer_queue.service.lifetime import stop_event

    stop = stop_event()
    await service.astart()
    try:
        with contextlib.ExitStack() as serving:
            sys.stdout.write(how_to_connect(service.directory, service.address))
            if metrics_port is not None:
                sys.stdout.write(await asyncio.to_thread(_serve_metrics, service, metrics_port, serving))
            sys.stdout.flush()
            await stop.wait()
    finally:
        await service.astop(clean=clean)
    return 0


def _serve_metrics(service: QueueService, port: int, serving: contextlib.ExitStack) -> str:
    """Until the end of `serving`. How to scrape."""
    from transfer_queue.client import SyncQueueClient
    from transfer_queue.operations.metrics import serve_metrics

    client = serving.enter_context(SyncQueueClient(service.address, "metrics"))
    served = serving.enter_context(contextlib.closing(serve_metrics(client, port, service.directory, service.restarts)))
    return f"  metrics  http://{served.endpoint}/metrics, with the bearer key in {served.key_file}\n"


def _doctor(args: argparse.Namespace) -> int:
    from transfer_queue.operations.doctor import as_json, doctor, leftover_line
    from transfer_queue.storage.leftovers import remove_leftover

    report = doctor(args.queue or os.environ.get("TQ_DIRECTORY") or None, storage_dir=args.storage_dir)
    if args.clean is None:
        sys.stdout.write((as_json(report) if args.json else report.text()) + "\n")
        return int(bool(report.findings))
    wanted = [one for one in report.leftovers if not args.clean or one.run in args.clean]
    if unknown := sorted(set(args.clean) - {one.run for one in wanted}):
        there = ", ".join(one.run for one in report.leftovers) or "none"
        raise Invalid(f"no dead or stopped run {', '.join(unknown)}; there are: {there}; nothing was removed")
    for leftover in wanted:
        removed = remove_leftover(leftover, stopped=args.stopped or bool(args.clean))
        sys.stdout.write(f"{'removed' if removed else 'kept'}: {leftover_line(leftover)}\n")
    if not report.leftovers:
        sys.stdout.write("no dead run has left anything\n")
    return 0


def _failpoints(args: argparse.Namespace) -> int:
    from transfer_queue.failpoints import listing

    sys.stdout.write(listing())
    return 0


def _warn_of_the_peer() -> None:
    from transfer_queue.operations.doctor import peer_in_the_way

    found = peer_in_the_way()
    if found is not None:
        sys.stderr.write(f"{found.what}; {found.remedy}\n")


def _sampler(text: str) -> dict[str, Any]:
    from transfer_queue.sampler import sampler_spec

    try:
        return sampler_spec(json.loads(text) if text.startswith("{") else text)
    except ValueError as error:  # Invalid, too
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 0 to 65535")
    return int(text)


def _bytes(text: str) -> int:
    """ "500M", "4G", "1048576"."""
    scale = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:].upper(), 0)
    digits = text[:-1] if scale else text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; expected 4G, 500M or 1048576")
    return int(digits) << scale


if __name__ == "__main__":
    sys.exit(main())
