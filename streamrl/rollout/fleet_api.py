"""The fleet over HTTP, on loopback, with a key: what `streamrl servers RUN_DIR` talks to.

    GET    /servers                    {"servers": [{"name": "server-0", "status": "serving", ...}]}
    POST   /servers                    {"name": null}         one more server of the run's kind
    POST   /servers/NAME/drain         {"deadline": 60}       no new requests; answers when none is left
    POST   /servers/NAME/undrain       {}                     it gets requests again
    DELETE /servers/NAME?deadline=60                          drained, then ended

The key lies in the run directory (`servers.key`, mode 0600), the address beside it (`servers.endpoint`); both go with
the run. What a request must bring: transfer_queue/net/keyed_http.py. Answers are JSON; an error is {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from agent_loop.llm.protocol import ServerDied
from streamrl.rollout.fleet import DRAIN_SECONDS, MOVE_SECONDS, Fleet, FleetError
from streamrl.rollout.manager import UPDATE_SECONDS
from transfer_queue.net.keyed_http import KeyedHandler, KeyedServer, ensure_key

logger = logging.getLogger(__name__)
T = TypeVar("T")

HOST = "127.0.0.1"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MARGIN_SECONDS = 30.0
"""For an answer, beyond what the work itself may take."""
MAX_DRAIN_SECONDS = 3600.0

Deadline = Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_SECONDS)]


class AddServer(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None


class DrainServer(msgspec.Struct, forbid_unknown_fields=True):
    deadline: Deadline = DRAIN_SECONDS


class UndrainServer(msgspec.Struct, forbid_unknown_fields=True):
    pass


class FleetApi:
    """Serves from threads of its own; what it is asked runs in the event loop that made it."""

    def __init__(
        self, fleet: Fleet, key_file: Path, endpoint_file: Path, *, port: int = 0, start_seconds: float = 180.0,
        update_seconds: float = UPDATE_SECONDS,
    ) -> None:  # fmt: skip
        """Writes the key, and IP:PORT. `start_seconds`, `update_seconds`: for a server that joins to start, and to load
        the weights. Raises OSError for a port that cannot be had."""
        self._files = key_file, endpoint_file
        key_file.unlink(missing_ok=True)  # a killed run's may have been sent to whoever has its port now
        self._server = _Server((HOST, port), ensure_key(self._files[0]), fleet, asyncio.get_running_loop())
        self._server.add_seconds = start_seconds + update_seconds + MARGIN_SECONDS
        self.endpoint = f"{HOST}:{self._server.server_port}"
        self._files[1].write_text(self.endpoint + "\n")
        self._thread = threading.Thread(target=self._server.serve_forever, name="servers-api", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Requests that are still being worked on get no answer."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        for file in self._files:
            file.unlink(missing_ok=True)


class _Server(KeyedServer):
    block_on_close = False
    add_seconds = 0.0

    def __init__(self, address: tuple[str, int], key: bytes, fleet: Fleet, loop: asyncio.AbstractEventLoop) -> None:
        self.fleet, self._loop = fleet, loop
        super().__init__(address, key, _Handler)

    def wait_for(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Its result, in the event loop of the fleet. Raises TimeoutError."""

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(seconds + 5.0)


class _Handler(KeyedHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    methods = ("GET", "POST", "DELETE")

    def knows(self, path: str) -> bool:
        return self._place(path) is not None

    def do_GET(self) -> None:
        name, verb = self._place(self.path) or ("", "")
        if name or verb:
            return self.refuse(HTTPStatus.NOT_FOUND, "there is GET /servers")
        return self._do(self._list(), 10.0)

    def do_POST(self) -> None:
        name, verb = self._place(self.path) or ("", "")
        try:
            body = self.body() or b"{}"
            if not name:
                given = msgspec.json.decode(body, type=AddServer)
                if given.name is not None and not NAME.fullmatch(given.name):
                    raise ValueError(f"name {given.name!r}: letters, digits, '.', '_' and '-', at most 64")
                return self._do(self._add(given.name), self.server.add_seconds)
            if verb == "drain":
                deadline = msgspec.json.decode(body, type=DrainServer).deadline
                return self._do(self._drain(name, deadline), deadline + 2 * MOVE_SECONDS)
            if verb == "undrain":
                msgspec.json.decode(body, type=UndrainServer)
                return self._do(self._undrain(name), MOVE_SECONDS)
        except (ValueError, OSError) as error:  # msgspec's errors are ValueErrors
            return self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        return self.refuse(HTTPStatus.NOT_FOUND, "there are POST /servers, and /servers/NAME/drain or undrain")

    def do_DELETE(self) -> None:
        name, verb = self._place(self.path) or ("", "")
        if not name or verb:
            return self.refuse(HTTPStatus.NOT_FOUND, "there is DELETE /servers/NAME")
        asked = parse_qs(urlsplit(self.path).query)
        try:
            deadline = msgspec.convert(asked.get("deadline", [DRAIN_SECONDS])[0], Deadline, strict=False)
        except msgspec.ValidationError as error:
            return self.refuse(HTTPStatus.BAD_REQUEST, f"deadline: {error}")
        return self._do(self._remove(name, deadline), deadline + 2 * MOVE_SECONDS)

    async def _list(self) -> dict[str, Any]:
        return {"servers": [asdict(row) for row in self.server.fleet.rows()]}

    async def _add(self, name: str | None) -> dict[str, Any]:
        return {"added": await self.server.fleet.add(name)}

    async def _drain(self, name: str, deadline: float) -> dict[str, Any]:
        await self.server.fleet.drain(name, deadline=deadline)
        return {"drained": name}

    async def _undrain(self, name: str) -> dict[str, Any]:
        await self.server.fleet.undrain(name)
        return {"undrained": name}

    async def _remove(self, name: str, deadline: float) -> dict[str, Any]:
        await self.server.fleet.remove(name, deadline=deadline)
        return {"removed": name}

    def _place(self, path: str) -> tuple[str, str] | None:
        """(server or "", verb or ""); None for no place of ours."""
        parts = urlsplit(path).path.strip("/").split("/")
        if parts[0] != "servers" or len(parts) > 3 or not all(NAME.fullmatch(part) for part in parts[1:]):
            return None
        return parts[1] if len(parts) > 1 else "", parts[2] if len(parts) > 2 else ""

    def _do(self, work: Coroutine[Any, Any, dict[str, Any]], seconds: float) -> None:
        try:
            answer = self.server.wait_for(work, seconds)
        except FleetError as error:
            return self.refuse(HTTPStatus.CONFLICT, str(error))
        except (TimeoutError, ServerDied, ValueError, OSError) as error:
            return self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error) or f"not done within {seconds:g} s")
        except Exception as error:  # the root of the request: the log has all of it
            logger.exception("%s %s failed", self.command, self.path)
            return self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        return self.answer(HTTPStatus.OK, msgspec.json.encode(answer) + b"\n", "application/json")

    def refuse(self, status: HTTPStatus, why: str) -> None:
        self.answer(status, msgspec.json.encode({"error": why}) + b"\n", "application/json")
