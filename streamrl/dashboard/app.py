"""The routes: the pages, history as JSON, and one stream of what changes.

| route | answer |
|---|---|
| `GET /api/stream` | server-sent events: a `snapshot`, then deltas, each with an id; `Last-Event-ID` goes on after it |
| `GET /api/snapshot` | the same snapshot, with the id to go on from |
| `GET /api/steps?names=a,b&points=n` | columns of metrics.jsonl |
| `GET /api/timeline?from=&to=&width=` | lanes between two times, no finer than `width` pixels show |
| `GET /api/sessions?worker=&from=&to=` | the sessions of an agent worker |
| `GET /api/names` | the metrics of this run, with what they are |
| `POST /api/replay` | `{"partition", "uids"}`: dead groups begin again |
| `POST /api/login`, `/api/logout`, `GET /api/whoami` | the cookie for a key |
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrl import __version__
from streamrl.dashboard.access import HEADERS, Access
from streamrl.dashboard.hub import Hub
from streamrl.monitor.registry import step_metric
from transfer_queue.errors import QueueError

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

PING_SECONDS = 10.0
"""A stream on which nothing happens says so, so that a browser notices a server that is gone."""

STREAMS = 32
"""Open streams at most."""

MAX_BODY = 1 << 16
MAX_WIDTH = 4000
MAX_NAMES = 64

JSON = "application/json"


class Guarded:
    """ASGI middleware: `access` before anything else, its headers on every answer, no body beyond MAX_BODY."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if scope["path"].startswith("/assets/"):
                    headers["Cache-Control"] = "public, max-age=31536000, immutable"  # their names hold their digest
                else:
                    headers["Cache-Control"] = "no-store" if scope["path"].startswith("/api/") else "no-cache"
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._access.refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            answer = JSONResponse({"error": refusal.why}, refusal.status)
            if refusal.status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


def build_app(hub: Hub, access: Access, static: Path = STATIC, failed: Callable[[], None] | None = None) -> Starlette:
    """The application. Its lifespan runs the hub; `failed` is called if that ends by an error."""
    routes = _Routes(hub, access)

    def ended(running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            log.critical("the dashboard stops: its state cannot be kept up", exc_info=error)
            if failed is not None:
                failed()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(hub.run(), name="hub")
        running.add_done_callback(ended)
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])

    return Starlette(
        routes=[
            Route("/api/stream", routes.stream),
            Route("/api/snapshot", routes.snapshot),
            Route("/api/steps", routes.steps),
            Route("/api/timeline", routes.timeline),
            Route("/api/sessions", routes.sessions),
            Route("/api/names", routes.names),
            Route("/api/replay", routes.replay, methods=["POST"]),
            Route("/api/login", routes.login, methods=["POST"]),
            Route("/api/logout", routes.logout, methods=["POST"]),
            Route("/api/whoami", routes.whoami),
            Mount("/", StaticFiles(directory=static, html=True, check_dir=False)),
        ],
        middleware=[Middleware(Guarded, access=access), Middleware(GZipMiddleware, minimum_size=2048, compresslevel=4)],
        exception_handlers={HTTPException: _told, ValueError: _wrong},
        lifespan=lifespan,
    )


async def _told(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _wrong(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


class _Routes:
    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access
        self._streams = 0

    # --- what changes -------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        if self._streams >= STREAMS:
            raise HTTPException(503, f"{STREAMS} browsers look already; close one")
        identity = request.headers.get("last-event-id") or request.query_params.get("after", "")
        known = self._hub.frames.number_of(identity)
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(known), media_type="text/event-stream", headers=headers)

    async def _events(self, known: int | None) -> AsyncIterator[bytes]:
        """Frames after `known`, for ever. Who reads slowly holds up this generator alone, and gets a snapshot."""
        hub, frames = self._hub, self._hub.frames
        self._streams += 1
        try:
            await hub.ready.wait()
            yield b"retry: 1000\n\n"
            while True:
                batch = frames.after(known)
                if batch is None:
                    snapshot = hub.snapshot()
                    known = frames.last
                    yield _event(b"snapshot", frames.id_of(known), snapshot)
                else:
                    for number, data in batch:
                        known = number
                        yield _event(b"delta", frames.id_of(number), data)
                if not await hub.news(known if known is not None else -1, PING_SECONDS):
                    yield b": nothing new\n\n"
        finally:
            self._streams -= 1

    async def snapshot(self, request: Request) -> Response:
        await self._hub.ready.wait()
        data = self._hub.snapshot()
        return Response(data, media_type=JSON, headers={"X-Event-ID": self._hub.frames.id_of(self._hub.frames.last)})

    # --- history ------------------------------------------------------------------------------------------------

    async def steps(self, request: Request) -> Response:
        await self._hub.ready.wait()
        names = [name for name in request.query_params.get("names", "").split(",") if name]
        if len(names) > MAX_NAMES:
            raise ValueError(f"names: at most {MAX_NAMES} metrics at once, not {len(names)}")
        points = _number(request, "points", 1000, 16, 2 * MAX_WIDTH)
        return _json(self._hub.state.steps.shown(names, int(points)))

    async def timeline(self, request: Request) -> Response:
        await self._hub.ready.wait()
        now = self._hub.now()
        end = _number(request, "to", self._hub.state.timeline.last)
        start = _number(request, "from", end - 60.0)
        width = int(_number(request, "width", 1000, 16, MAX_WIDTH))
        return _json(self._hub.state.timeline.window(start, end, width, now))

    async def sessions(self, request: Request) -> Response:
        await self._hub.ready.wait()
        worker, end = request.query_params.get("worker", ""), _number(request, "to", self._hub.now())
        start = _number(request, "from", end - 60.0)
        return _json(self._hub.state.timeline.sittings(worker, start, end))

    async def names(self, request: Request) -> Response:
        await self._hub.ready.wait()
        found = {name: step_metric(name) for name in self._hub.state.steps.names}
        told = {name: {"unit": m.unit, "help": m.help} if m is not None else {} for name, m in found.items()}
        return _json(told)

    # --- changing something -------------------------------------------------------------------------------------

    async def replay(self, request: Request) -> Response:
        body = await _body(request)
        partition, uids = body.get("partition"), body.get("uids")
        if not isinstance(partition, str) or not isinstance(uids, list) or not all(isinstance(u, str) for u in uids):
            raise ValueError('replay takes {"partition": "name", "uids": ["uid", ...]}')
        try:
            await self._hub.queue.replay(partition, uids)
        except (QueueError, RuntimeError, TimeoutError) as error:
            raise HTTPException(409, str(error) or type(error).__name__) from error
        return _json({"replayed": len(uids)})

    async def login(self, request: Request) -> Response:
        if not self._access.is_key((await _body(request)).get("key")):
            raise HTTPException(401, "this is not the key")
        answer = _json({"key": True})
        secure = request.url.scheme == "https"
        answer.set_cookie(self._access.cookie, self._access.session, httponly=True, samesite="strict", secure=secure)
        return answer

    async def logout(self, request: Request) -> Response:
        answer = _json({"key": False})
        answer.delete_cookie(self._access.cookie, httponly=True, samesite="strict")
        return answer

    async def whoami(self, request: Request) -> Response:
        knows = self._access.knows({name.lower(): value for name, value in request.headers.items()})
        return _json({"key": knows, "reads": knows or self._access.open_reading, "version": __version__})


def _event(name: bytes, identity: str, data: bytes) -> bytes:
    """JSON has no line breaks, so one data line holds it."""
    return b"event: " + name + b"\nid: " + identity.encode() + b"\ndata: " + data + b"\n\n"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _number(request: Request, name: str, default: float, low: float = -1e12, high: float = 1e12) -> float:
    """Raises ValueError naming what was asked for."""
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{name} is a number, not {text!r}"[:200]) from None
    if not low <= value <= high:  # NaN too
        raise ValueError(f"{name} lies between {low:g} and {high:g}, not {value:g}")
    return value


async def _body(request: Request) -> dict[str, Any]:
    """Raises ValueError for one that is no JSON object, or longer than MAX_BODY."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"a body of at most {MAX_BODY} bytes is read")
    try:
        body = json.loads(bytes(data))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ValueError("the body is a JSON object")
    return body
