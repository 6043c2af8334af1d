"""A small HTTP/1.1 server for fakes of remote services: real sockets, real streams, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import h11

from streamrl.rollout.loop_thread import LoopThread


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Answer:
    """`body`: bytes as they are, anything else as JSON. `stream`: lines of server-sent events, sent as they come, in
    its place."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    stream: AsyncIterator[str] | None = None


Handler = Callable[[Asked], Awaitable[Answer]]


class HttpApp:
    """`url` after construction; `close` cuts every connection, and twice is fine. The handler runs on `thread`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.thread = LoopThread("fake-http")
        self._connections: set[asyncio.StreamWriter] = set()
        self._server = self.thread.run(self._listen())
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            for writer in list(self._connections):
                writer.transport.abort()

        if not self.thread.loop.is_closed():
            self.thread.run(close())
            self.thread.end()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        connection = h11.Connection(h11.SERVER)
        try:
            while (asked := await _read(connection, reader)) is not None:
                await self._answer(connection, writer, await self._handler(asked))
                if connection.our_state is not h11.DONE:
                    return
                connection.start_next_cycle()
        except (OSError, h11.RemoteProtocolError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, connection: h11.Connection, writer: asyncio.StreamWriter, answer: Answer) -> None:
        async def send(event: h11.Event) -> None:
            writer.write(connection.send(event) or b"")
            await writer.drain()

        body = b"" if answer.body is None else answer.body
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "text/event-stream" if answer.stream else "application/json"
        headers = {"content-type": kind, **answer.headers}
        if answer.stream is None:
            headers["content-length"] = str(len(body))
        await send(h11.Response(status_code=answer.status, headers=list(headers.items())))
        if answer.stream is not None:
            async with contextlib.aclosing(answer.stream) as stream:  # pyright: ignore[reportArgumentType]
                async for line in stream:
                    await send(h11.Data(data=f"data: {line}\n\n".encode()))
        elif body:
            await send(h11.Data(data=body))
        await send(h11.EndOfMessage())


async def _read(connection: h11.Connection, reader: asyncio.StreamReader) -> Asked | None:
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            headers = {name.decode(): value.decode() for name, value in request.headers}
            content = json.loads(body) if body else None
            return Asked(request.method.decode(), request.target.decode().partition("?")[0], headers, content)
        else:
            return None
