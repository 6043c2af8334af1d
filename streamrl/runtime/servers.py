"""`streamrl servers RUN_DIR list|add|drain|undrain|remove`: the LLM servers of a run that runs on this machine."""

from __future__ import annotations

import argparse
import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from streamrl.errors import UserError, one_line

KEY_FILE, ENDPOINT_FILE = "servers.key", "servers.endpoint"
"""Of a run directory, while it runs: what streamrl.rollout.fleet_api asks for, and where it listens."""
PATIENCE = 600.0
"""For one answer, beside the deadline of a drain."""
START_PATIENCE = 86_400.0
"""For a server to start: the run knows how long that may take (rollout.start_timeout), and answers then."""
DRAIN_SECONDS = 60.0


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 refused or failed, 2 a mistake in what was asked for."""
    options = _parser().parse_args(argv)
    try:
        answer = ask(options.run_dir, options)
    except UserError as error:
        _say(f"error: {one_line(str(error))}", error=True)
        return 2
    if "error" in answer:
        _say(f"error: {one_line(answer['error'])}", error=True)
        return 1
    if options.command == "list":
        _show(answer["servers"])
    else:
        _say(" ".join(f"{verb} {name}" for verb, name in answer.items()))
    return 0


def _say(line: str, *, error: bool = False) -> None:
    Console(stderr=error).print(line, markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streamrl servers", description="The LLM servers of a running job.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="for example runs/latest")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("list", help="who serves, at which version, with how many requests")
    add = commands.add_parser("add", help="start one more; it gets the weights before its first request")
    add.add_argument("name", nargs="?", help="default: the next server-N")
    for verb, what in (("drain", "no new requests"), ("remove", "drain it, then end it")):
        command = commands.add_parser(verb, help=what)
        command.add_argument("name")
        command.add_argument(
            "--deadline", type=float, default=DRAIN_SECONDS, metavar="SECONDS",
            help="then requests that have not ended go on elsewhere, with their tokens (default: %(default)g)",
        )  # fmt: skip
    commands.add_parser("undrain", help="a drained one gets requests again").add_argument("name")
    return parser


def ask(run_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The API's answer. Raises UserError for a run that cannot be asked."""
    match options.command:
        case "list":
            return _request(run_dir, "GET", "/servers")
        case "add":
            return _request(run_dir, "POST", "/servers", {"name": options.name}, START_PATIENCE)
        case "drain":
            place, seconds = f"/servers/{quote(options.name, safe='')}/drain", options.deadline
            return _request(run_dir, "POST", place, {"deadline": seconds}, seconds)
        case "undrain":
            return _request(run_dir, "POST", f"/servers/{quote(options.name, safe='')}/undrain", {})
        case _:
            place = f"/servers/{quote(options.name, safe='')}?deadline={options.deadline}"
            return _request(run_dir, "DELETE", place, None, options.deadline)


def _request(
    run_dir: Path, method: str, place: str, body: dict[str, Any] | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    try:
        endpoint = (run_dir / ENDPOINT_FILE).read_text().strip()
        key = (run_dir / KEY_FILE).read_text().strip()
    except OSError as error:
        raise UserError(
            f"{run_dir} has no servers that can be asked ({error.strerror}: {error.filename}); it must be the "
            "directory of a run that runs now, under Ray, on this machine"
        ) from None
    connection = http.client.HTTPConnection(endpoint, timeout=PATIENCE + seconds)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request(method, place, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    except OSError as error:
        raise UserError(f"nobody answers at {endpoint}: {error}; is the run still running?") from None
    finally:
        connection.close()
    try:
        return json.loads(text)
    except ValueError:  # refused before any place was looked at
        return {"error": f"{endpoint} said {answer.status} {answer.reason}"}


def _show(servers: list[dict[str, Any]]) -> None:
    table = Table("server", "status", "version", "requests", "limit", "slots", "reason")
    for row in servers:
        cells = [row[name] for name in ("name", "status", "version", "requests", "limit", "slots", "reason")]
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    Console().print(table)
