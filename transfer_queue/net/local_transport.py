"""The transport to a controller that is an object in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transfer_queue.errors import Disconnected
from transfer_queue.net.messages import (
    VERSION,
    Hello,
    Mutation,
    Push,
    Query,
    Reply,
    Request,
    Response,
    Welcome,
)  # fmt: skip
from transfer_queue.net.transport import GRACE, host_id, ignore, new_identity
from transfer_queue.net.waiters import Waiters

LOCAL_RUN = "local"
"""The run id of every queue that lives inside one process."""


class LocalTransport:
    """The controller is an object in this process and event loop. Messages still pass through the codec, so that
    neither side shares mutable values with the other and nothing works here that would not over a socket."""

    def __init__(self, name: str, submit: Callable[[str, Request], None], left: Callable[[str], None]) -> None:
        self.name = name
        self.client = new_identity(name).decode()
        self.on_push: Callable[[Push], None] = ignore
        self.on_welcome: Callable[[Welcome, bool], None] = ignore
        self.on_orphan: Callable[[Any, Reply], None] = ignore
        self._waiters = Waiters(name, "the local queue", lambda: "its clock stands still; call LocalQueue.tick()")
        self._submit = submit
        self._left = left
        self._closed = False

    async def request(self, body: Mutation | Query, *, timeout: float = GRACE, patience: float | None = None) -> Reply:
        if self._closed:
            raise Disconnected(f"client {self.name!r} was closed")
        request, waiting = self._waiters.add(body, timeout, patience)
        try:
            self._submit(self.client, Request(request, body))
        except BaseException:
            self._waiters.waiting.pop(request, None)
            raise
        return await self._waiters.result(request, waiting, self.on_orphan)

    def say_hello(self) -> None:
        """Become known to the controller; `on_welcome` has run when this returns."""
        request, _ = self._waiters.add(self._hello_body(), GRACE)
        self._submit(self.client, Request(request, self._hello_body()))
        self._waiters.waiting.pop(request, None)

    async def greet(self) -> Welcome:
        reply = await self.request(self._hello_body())
        assert isinstance(reply, Welcome), reply
        return reply

    def _hello_body(self) -> Hello:
        return Hello(VERSION, LOCAL_RUN, "", self.name, os.getpid(), host_id())

    def deliver(self, response: Response) -> None:
        body = response.body
        if isinstance(body, Push):
            self.on_push(body)
            return
        if isinstance(body, Welcome):
            self.on_welcome(body, False)
        orphan = self._waiters.answer(response.id, body)
        if orphan is not None:
            self.on_orphan(orphan, body)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._left(self.client)
            self._waiters.fail(Disconnected(f"client {self.name!r} was closed"))
