"""How a client's requests reach the controller: over a socket, or by a call in the same process.

Both give the same promise: a request is answered once, whatever happens to the connection or the controller in
between, or fails by its deadline with an error that names who waited for what, how long, and what to do.

    SocketTransport: link is up -> Hello -> Welcome -> ready: send pending, and what is asked from now on
                     link is down -> not ready; up again -> Hello again -> unanswered requests again, with the same
                     ids, so that a controller that has already applied one only repeats its reply

Which link: a Unix stream on one node (net/stream.py, unix://PATH), else ZeroMQ with CURVE (net/links.py, curve://IP:PORT).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from transfer_queue.errors import DeadlineExceeded, Disconnected, Invalid, QueueClosed, QueueError
from transfer_queue.failpoints import failpoint
from transfer_queue.net.addresses import endpoint_of
from transfer_queue.net.codec import MAX_FRAME, SAY_HELLO, Malformed, decode_response, encode, encode_request, error_of
from transfer_queue.net.curve import check_network_endpoint
from transfer_queue.net.ending import sees, why_ended
from transfer_queue.net.links import Link, ZmqLink
from transfer_queue.net.messages import (
    VERSION,
    Bye,
    Failed,
    Hello,
    Mutation,
    Push,
    Query,
    Reply,
    Request,
    Welcome,
)  # fmt: skip
from transfer_queue.net.sockets import check_endpoint
from transfer_queue.net.stream import RECONNECT, StreamLink
from transfer_queue.net.waiters import Waiters
from transfer_queue.storage.private import read_regular

log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds that a request may take beyond the wait it asks for: time for a controller to come back."""

GREET_AGAIN = 1.0
"""Seconds without a Welcome after which Hello is said again on the same connection."""

MIN_KEY = 32
"""Characters of a key at least (16 bytes in hex): an empty or cut file must not switch authentication off."""


class Transport(Protocol):
    """What QueueClient and the units need. `on_welcome(welcome, again)` runs at each Welcome, `again` from the second
    on (the controller restarted). `on_orphan(body, reply)` gets replies whose asker has given up."""

    name: str
    on_push: Callable[[Push], None]
    on_welcome: Callable[[Welcome, bool], None]
    on_orphan: Callable[[Any, Reply], None]

    async def request(self, body: Mutation | Query, *, timeout: float = GRACE, patience: float | None = None) -> Reply:
        """The reply to `body`, within `timeout`, or `patience` while the controller says that it serves nobody. Raises
        the QueueError that a Failed stands for, DeadlineExceeded, Disconnected."""
        ...

    async def greet(self) -> Welcome:
        """Say Hello once more, to hear of units that have come since."""
        ...

    async def close(self) -> None: ...


def ignore(*_: Any) -> None:
    """Callback of those who do not care."""


class SocketTransport:
    """Talks to a controller in another process. Belongs to the loop, and to the process, that it was connected in."""

    def __init__(self, address: dict[str, str], name: str) -> None:
        self.name = name
        self.on_push: Callable[[Push], None] = ignore
        self.on_welcome: Callable[[Welcome, bool], None] = ignore
        self.on_orphan: Callable[[Any, Reply], None] = ignore
        self.on_lost: Callable[[], None] = ignore
        self.heeds_closing = False
        """Whether requests fail as soon as the queue was closed, instead of waiting for it to be started again."""
        self._address = address
        self._endpoint = endpoint_of(address)
        if self._endpoint.startswith("curve://"):
            check_network_endpoint(self._endpoint)
        else:
            check_endpoint(self._endpoint, ("unix", "ipc"))
        self._waiters = Waiters(name, f"the controller of run {address['run']!r} at {self._endpoint}", self._state)
        self._key = read_key(address["key_file"])
        self._process = os.getpid()
        self._ready = False
        self._hello = 0  # id of the Hello under way
        self._greeting: asyncio.TimerHandle | None = None
        self._epoch: int | None = None
        self._broken: QueueError | None = None
        self._refusal = ""  # why the controller serves nobody for now
        self._told = ""  # that the queue was closed, by the controller
        self._lost_at = asyncio.get_running_loop().time()
        self._link = self._open()

    @classmethod
    async def connect(
        cls, address: dict[str, str], *, name: str, timeout: float = 30.0,
        on_welcome: Callable[[Welcome, bool], None] = ignore, on_push: Callable[[Push], None] = ignore,
        on_lost: Callable[[], None] = ignore, heeds_closing: bool = False,
    ) -> SocketTransport:  # fmt: skip
        """A transport that has been welcomed. Raises DeadlineExceeded, QueueClosed, or Invalid for a wrong key or
        run."""
        transport = cls(address, name)
        transport.heeds_closing = heeds_closing
        transport.on_push, transport.on_lost = on_push, on_lost
        welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def first(welcome: Welcome, again: bool) -> None:
            on_welcome(welcome, again)
            if not welcomed.done():
                welcomed.set_result(None)

        transport.on_welcome = first
        transport._first = welcomed
        try:
            transport._check_ended()
            async with asyncio.timeout(timeout):
                await welcomed
        except TimeoutError:
            await transport.close()
            raise DeadlineExceeded(
                f"client {name!r} waited {timeout:.1f} s for {transport._waiters.whom} to greet it: "
                f"{transport._state()}"
            ) from None
        except QueueError:
            await transport.close()
            raise
        transport.on_welcome = on_welcome
        return transport

    _first: asyncio.Future[None] | None = None

    async def request(self, body: Mutation | Query, *, timeout: float = GRACE, patience: float | None = None) -> Reply:
        if self._broken is not None:
            raise self._broken
        if os.getpid() != self._process:
            raise Disconnected(
                f"client {self.name!r} was made in process {self._process}, which forked this one: connect anew here"
            )
        self.check_open()
        request, waiting = self._waiters.add(body, timeout, patience)
        try:
            frame = encode_request(request, body)
            if len(frame) > MAX_FRAME:
                raise Invalid(
                    f"{type(body).__name__} takes {len(frame)} bytes, the limit is {MAX_FRAME}: send less at once"
                )
        except BaseException:
            del self._waiters.waiting[request]
            raise
        if self._ready:
            self._ready = self._link.send(frame, now=len(self._waiters.waiting) == 1)
        failpoint("client.after_send")
        return await self._waiters.result(request, waiting, self.on_orphan)

    async def greet(self) -> Welcome:
        reply = await self.request(self._hello_body())
        assert isinstance(reply, Welcome), reply
        return reply

    async def close(self) -> None:
        """Say Bye, so that leases and segments are free at once, and disconnect."""
        if self._broken is None and self._ready and os.getpid() == self._process:
            try:
                await self.request(Bye(), timeout=2.0)
            except QueueError as error:
                log.warning("client %r could not say Bye: %s", self.name, error)
        self._break(Disconnected(f"client {self.name!r} was closed"))
        self._link.close()

    def _open(self) -> Link:
        identity, (scheme, _, path) = new_identity(self.name), self._endpoint.partition("://")
        events = {"on_up": self._greet, "on_down": self._down, "on_frame": self._on_frame}
        if scheme == "unix":
            return StreamLink(path, identity, **events)
        return ZmqLink(self._endpoint, identity, key=self._key, **events)

    def _down(self) -> None:
        if self._ready:
            self._ready = False
            self._lost_at = asyncio.get_running_loop().time()
            self.on_lost()
            log.info("client %r lost its connection to %s", self.name, self._endpoint)
            try:
                self._check_ended()
            except QueueClosed as closed:
                self._waiters.fail(closed)
        self._stop_greeting()

    def _greet(self) -> None:
        """Say Hello on this connection, and again until it is answered."""
        self._stop_greeting()
        if self._broken is not None:
            return
        body = self._hello_body()
        self._hello, _ = self._waiters.add(body, GRACE)
        del self._waiters.waiting[self._hello]  # not sent again like the others: each connection has its own
        sent = self._link.send(encode(Request(self._hello, body)))
        pause = GREET_AGAIN if sent else RECONNECT
        self._greeting = asyncio.get_running_loop().call_later(pause, self._greet)

    def _stop_greeting(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
            self._greeting = None

    @property
    def ended(self) -> bool:
        """Whether the queue was closed by its owner, and has not come back."""
        return not self._ready and self._why_ended() is not None

    def check_open(self) -> None:
        """Raises QueueClosed if the queue has ended."""
        if not self._ready:
            self._check_ended()

    def _why_ended(self) -> str | None:
        """By the queue's directory; where that cannot be seen, by what the controller has said last."""
        if not self.heeds_closing:
            return None
        return why_ended(self._address) or (self._told if self._told and not sees(self._address) else None)

    def _check_ended(self) -> None:
        """Raises QueueClosed. A queue that is started again is found again."""
        why = self._why_ended()
        if why is not None:
            raise QueueClosed(f"client {self.name!r}: {why}")

    def _closed(self, why: str) -> None:
        self._told = why
        self._down()
        self._greet()  # which says that it was heard
        if self.heeds_closing:
            self._waiters.fail(QueueClosed(f"client {self.name!r}: {why}"))

    def _hello_body(self) -> Hello:
        return Hello(VERSION, self._address["run"], self._key, self.name, os.getpid(), host_id())

    def _on_frame(self, frame: bytes | memoryview) -> None:
        try:
            response = decode_response(frame)
        except Malformed as error:
            log.error("client %r ignores a malformed frame from the controller: %s", self.name, error)
            return
        body = response.body
        if response.id == 0:
            if isinstance(body, Push):
                self.on_push(body)
            elif isinstance(body, Failed) and body.code == QueueClosed.code:
                self._closed(body.message)
        elif response.id == self._hello:
            self._welcome(body)
        elif isinstance(body, Failed) and body.message == SAY_HELLO:
            self._ready = False  # a controller that has restarted does not know us yet
            self._greet()
        elif not isinstance(body, Push):
            orphan = self._waiters.answer(response.id, body)
            if orphan is not None:
                self.on_orphan(orphan, body)

    def _welcome(self, reply: Any) -> None:
        self._refusal = reply.message if isinstance(reply, Failed) and reply.retry_after else ""
        self._waiters.refused(bool(self._refusal))
        if self._refusal:
            return  # for now: Hello is said again soon
        if not isinstance(reply, Welcome):
            error = error_of(reply) if isinstance(reply, Failed) else Invalid(f"no Welcome but {reply!r}")
            self._break(error)
            return
        again = self._epoch is not None and self._epoch != reply.epoch
        self._epoch = reply.epoch
        self._ready, self._told = True, ""
        self._stop_greeting()
        self.on_welcome(reply, again)
        for request in list(self._waiters.waiting):
            self._ready &= self._link.send(encode(Request(request, self._waiters.remaining(request))))

    def _break(self, error: QueueError) -> None:
        """No further request will be answered."""
        self._broken = self._broken or error
        self._ready = False
        self._stop_greeting()
        self._waiters.fail(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _state(self) -> str:
        if self._ready:
            return "it is connected and did not answer; look at its log, or give the request more time"
        if self._refusal:
            return self._refusal
        away = asyncio.get_running_loop().time() - self._lost_at
        return f"it has not been reachable for {away:.1f} s; start the queue service on its directory again"


def read_key(path: str) -> str:
    """The run's key. Raises Disconnected naming the file if it is not there, Invalid if it holds no key, or if others
    may read it or have put it there."""
    try:
        key = read_regular(path, secret=True).decode().strip()
    except FileNotFoundError:
        raise Disconnected(f"no key file {path}: the queue of this address is gone, or was never started") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"key file {path} cannot be read: {error}") from None
    if len(key) < MIN_KEY:
        raise Invalid(
            f"key file {path} holds {len(key)} characters, a key has at least {MIN_KEY}; "
            "stop the queue, remove the file, and start the queue again: it makes a new one"
        )
    return key


def host_id() -> str:
    """Equal for processes that see each other's process ids: boot and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def new_identity(name: str) -> bytes:
    """Unguessable, so that nobody without the key can speak for a client that has been welcomed."""
    return f"{name[:64]}.{secrets.token_hex(12)}".encode()[:255]
