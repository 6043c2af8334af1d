"""The two ends of a ZeroMQ connection between clients and the controller, and what any kind of connection offers.

A link is the client's end, a listener the controller's. They carry frames and know nothing of what is in them;
`net/stream.py` and `net/stream_listener.py` have the ones of a single node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from transfer_queue.net.codec import MAX_FRAME
from transfer_queue.net.credentials import credentials
from transfer_queue.net.curve import SEALED, NetworkListener, connect_to, is_network
from transfer_queue.net.sockets import EventSocket, bind_private

log = logging.getLogger(__name__)

RECONNECT_MS = 20
"""A restarted controller is found again within this time."""

PROBE_EVERY = 5.0
"""Seconds between two looks whether clients are still connected."""

PEER_BACKLOG = 10_000
"""Responses kept for a client that does not read them; more are dropped, and it asks again after it reconnects."""


class Link(Protocol):
    """Connects by itself, again whenever the connection is lost: `on_up()` then says that there is one, `on_down()`
    that there is none any more, and `on_frame(frame)` gives each frame that arrives, to be read before it returns."""

    def send(self, frame: bytes, *, now: bool = False) -> bool:
        """Send without blocking; `now`: no others are to be expected in this turn of the loop that could go with it.
        Whether there is a connection; what was on its way when one is lost is lost."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """Serves any number of clients, each known by the identity that it gave itself.

    `on_frame(client, frame, pid)` gives each frame, to be read before it returns, and the client's process if the
    kernel says which it is (else 0). `on_turn()` follows soon after. `on_end(client)` says that a client has no
    connection any more, where that is known. `refuse(why)` is told of what breaks the rules.
    """

    def send(self, client: str, frame: bytes) -> bool:
        """Queue a frame for `flush`; False if the client has no connection."""
        ...

    def flush(self) -> None: ...

    def trust(self, client: str) -> None:
        """This client has shown the run's key."""
        ...

    def drain(self) -> None:
        """Handle what has already arrived, now."""
        ...

    def close(self) -> None: ...


class ZmqLink:
    """A DEALER to a ROUTER; by network (curve://IP:PORT) it proves the run's key before its first frame leaves."""

    def __init__(
        self, endpoint: str, identity: bytes, *, key: str = "", on_up: Callable[[], None], on_down: Callable[[], None],
        on_frame: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        self._on_up, self._on_down, self._on_frame = on_up, on_down, on_frame
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        for option, value in (
            (zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL, RECONNECT_MS), (zmq.RECONNECT_IVL_MAX, 500), (zmq.LINGER, 0),
            (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_FRAME + SEALED),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = EventSocket(monitor, self._on_event)
        self._socket = EventSocket(socket, self._on_frames)
        if is_network(endpoint):
            connect_to(socket, endpoint, credentials(key))
        else:
            socket.connect(endpoint)

    def send(self, frame: bytes, *, now: bool = False) -> bool:
        try:
            self._socket.send([frame])
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._monitor.close()
        if not self._socket.socket.closed:
            self._socket.socket.disable_monitor()
        self._socket.close(linger_ms=0)

    def _on_event(self, frames: list[bytes]) -> None:
        event = int.from_bytes(frames[0][:2], "little")
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_up()
        else:
            self._on_down()

    def _on_frames(self, frames: list[bytes]) -> None:
        if frames[-1]:  # else: a probe
            self._on_frame(frames[-1])


class ZmqListener:
    """A ROUTER. It does not say when a connection ends, so every client it knows is probed (by an empty frame): a node
    that vanishes is noticed within twice PROBE_EVERY, since ZeroMQ's heartbeats end its connection."""

    def __init__(
        self, endpoint: str, *, key: str = "", on_frame: Callable[[str, bytes, int], None], on_turn: Callable[[], None],
        on_end: Callable[[str], None], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Binds ipc://PATH in a private directory, or curve://IP:PORT with the run's `key`. Raises Invalid."""
        self._on_frame, self._on_turn, self._on_end, self._refuse = on_frame, on_turn, on_end, refuse
        options = [
            (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.MAXMSGSIZE, MAX_FRAME + SEALED), (zmq.LINGER, 0),
            (zmq.SNDHWM, PEER_BACKLOG), (zmq.RCVHWM, 0), (zmq.BACKLOG, 4096),
        ]  # fmt: skip
        self._socket: EventSocket | NetworkListener
        if is_network(endpoint):
            self._socket = NetworkListener(endpoint, credentials(key), self._on_frames, options)
        else:
            socket = zmq.Context.instance().socket(zmq.ROUTER)
            for option, value in options:
                socket.setsockopt(option, value)
            bind_private(socket, endpoint)
            self._socket = EventSocket(socket, self._on_frames)
        self._known: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._probing = self._loop.call_later(PROBE_EVERY, self._probe)

    def send(self, client: str, frame: bytes) -> bool:
        try:
            self._socket.send([client.encode("latin-1"), frame])
        except zmq.Again:
            self._refuse("a client does not read its answers; one was dropped")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def flush(self) -> None:
        """Nothing: they have gone out."""

    def trust(self, client: str) -> None:
        """Nothing: ZeroMQ has one limit for all."""

    def drain(self) -> None:
        self._socket.drain()

    def close(self) -> None:
        self._probing.cancel()
        self._socket.close(linger_ms=200)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._refuse(f"a message of {len(frames) - 1} frames")
            return
        client = frames[0].decode("latin-1")
        self._known.add(client)
        self._on_frame(client, frames[1], 0)
        self._on_turn()

    def _probe(self) -> None:
        for client in [client for client in self._known if not self.send(client, b"")]:
            self._known.discard(client)
            self._on_end(client)
        self._probing = self._loop.call_later(PROBE_EVERY, self._probe)


class JointListener:
    """Several listeners as one: each client is answered where it spoke last."""

    def __init__(
        self, make: Sequence[Callable[..., Listener]], *, on_frame: Callable[[str, bytes, int], None],
        on_turn: Callable[[], None], on_end: Callable[[str], None], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`make` are called with the same four callbacks."""
        self._on_frame, self._on_end = on_frame, on_end
        self._where: dict[str, int] = {}
        self._listeners = [
            one(
                on_frame=lambda client, frame, pid, at=at: self._heard(at, client, frame, pid),
                on_turn=on_turn, on_end=lambda client, at=at: self._ended(at, client), refuse=refuse,
            )
            for at, one in enumerate(make)
        ]  # fmt: skip

    def send(self, client: str, frame: bytes) -> bool:
        at = self._where.get(client)
        return at is not None and self._listeners[at].send(client, frame)

    def trust(self, client: str) -> None:
        self._listeners[self._where[client]].trust(client)

    def flush(self) -> None:
        for listener in self._listeners:
            listener.flush()

    def drain(self) -> None:
        for listener in self._listeners:
            listener.drain()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _heard(self, at: int, client: str, frame: bytes, pid: int) -> None:
        self._where[client] = at
        self._on_frame(client, frame, pid)

    def _ended(self, at: int, client: str) -> None:
        if self._where.get(client) == at:
            del self._where[client]
            self._on_end(client)
