"""`streamrl dash RUN_DIR`: the dashboard of one run, live or ended, on loopback unless told otherwise."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from streamrl.dashboard.access import Access, is_loopback, names_of
from streamrl.dashboard.app import STATIC, build_app
from streamrl.dashboard.beside import NICE
from streamrl.dashboard.hub import Hub
from transfer_queue.net.keyed_http import ensure_key

PORT = 8090
"""Tried first; another free one is taken where somebody has it."""

KEY_FILE = "dashboard.key"

CONNECTIONS = 128
HEADER_SECONDS = 10

EPILOG = """\
On another machine's loopback: ssh -L 8090:localhost:8090 HOST, then open the link here.
--host ADDRESS listens there, and then nobody reads without the key that the link carries.
"""


class CannotServe(Exception):
    """The message says what is wrong, and what to do."""


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 ended by Ctrl-C, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(
        prog="streamrl dash", description="The dashboard of a run, live or ended, in a browser.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run_dir", nargs="?", default="runs/latest", metavar="RUN_DIR", help="(runs/latest)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=None, help=f"({PORT}, or a free one)")
    parser.add_argument("--key", action="store_true", help="nobody reads without the key, also on loopback")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a further name of this host")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # of a run: ends with standard input
    options = parser.parse_args(argv)
    if options.beside:
        os.nice(NICE)
    try:
        run_dir = _run_dir(options.run_dir)
        names = tuple(options.allow_host)
        serve(run_dir, options.host, options.port, guarded=options.key, names=names, beside=options.beside)
    except CannotServe as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def serve(
    run_dir: Path, host: str, port: int | None, *, guarded: bool = False, names: tuple[str, ...] = (),
    beside: bool = False,
) -> None:  # fmt: skip
    """Serve until interrupted; with `beside` also no longer than standard input is open. Raises CannotServe."""
    if not (STATIC / "index.html").is_file():
        raise CannotServe("the pages are not there: `make dashboard` builds them")
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    key = _key(run_dir)
    access = Access(key, names_of(host, names), open_reading=is_loopback(host) and not guarded, port=bound)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    print(f"dashboard of {run_dir}: http://{shown}:{bound}/#key={key}", flush=True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    app = build_app(Hub(run_dir), access, failed=lambda: setattr(server, "should_exit", True))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="on",
        http="h11", ws="none", timeout_keep_alive=HEADER_SECONDS, limit_concurrency=CONNECTIONS,
        h11_max_incomplete_event_size=16384, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    if beside:
        threading.Thread(target=_stop_at_end_of_input, args=(server,), daemon=True).start()
    server.run(sockets=[listener])


def _stop_at_end_of_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


def _run_dir(text: str) -> Path:
    """Raises CannotServe for a directory that is no run's."""
    path = Path(text)
    if not path.is_dir():
        raise CannotServe(f"there is no directory {text}; `streamrl runs` lists the runs")
    if not any((path / name).exists() for name in ("events", "config.yaml", "metrics.jsonl")):
        raise CannotServe(
            f"{text} is no run directory: it has neither events/ nor config.yaml; `streamrl runs` lists them"
        )
    return path.resolve()


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((host, attempt), family=family, backlog=128)
        except OSError as error:
            why = error
    raise CannotServe(f"cannot listen at {host}, port {port or PORT}: {why.strerror}; give another --port or --host")


def _key(run_dir: Path) -> str:
    """Of the run's directory; one for this time where nothing can be written there."""
    try:
        return ensure_key(run_dir / KEY_FILE).decode()
    except OSError:
        return secrets.token_urlsafe(32)
