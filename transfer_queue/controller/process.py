"""The controller's process: listeners around the sans-IO core, and a watch on its clients' processes.

    consumes     request frames; ends of client processes (pidfd) and of connections; time
    produces     response frames and pushes to units
    waits for    its sockets, a client's death, or the core's next deadline, and nothing else
    woken by     exactly these; it never polls

One turn: requests are read and applied, then their answers go out together, but for those that follow a change of a
partition of durability "journal": they wait until the journal is on the disk (group_commit.py). A client is known by
its own random name for itself; the core answers nobody who has not said Hello with the run's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transfer_queue.controller.absences import UNIT_LOST_AFTER
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.fetching import Fetching
from transfer_queue.controller.group_commit import GroupCommit
from transfer_queue.controller.no_room import until_room
from transfer_queue.errors import Invalid, QueueClosed, QueueError
from transfer_queue.failpoints import failpoint
from transfer_queue.net.codec import MAX_FRAME, BadArgument, decode_request, encode, failed_of
from transfer_queue.net.curve import check_network_endpoint, is_network
from transfer_queue.net.ending import why_ended
from transfer_queue.net.links import JointListener, Listener, ZmqListener
from transfer_queue.net.messages import Bye, Failed, Hello, Response, Welcome
from transfer_queue.net.nuisance import Nuisance
from transfer_queue.net.sockets import check_endpoint
from transfer_queue.net.stream_listener import StreamListener
from transfer_queue.net.transport import host_id, read_key
from transfer_queue.sampler import load_sampler
from transfer_queue.service.lifetime import exited
from transfer_queue.storage.journal import JournalFailed
from transfer_queue.storage.unit_files import lock_file

log = logging.getLogger(__name__)

MAX_PID = 2**31 - 1
"""What a Hello names beyond this, or below 1, is no process: its client is served, its death goes unnoticed."""

FORGET_AFTER = 60.0
"""Seconds without a connection after which a client is gone, although its process may live."""

PARTING = 0.5
"""Seconds that clients of other nodes get to hear that the queue was closed."""


class ControllerServer:
    """Invariant: nothing that a peer sends ends the server; what is not understood is counted and ignored."""

    def __init__(
        self, endpoints: Sequence[str], key: str, make_core: Callable[[Callable[[str, Response], None]], ControllerCore]
    ) -> None:
        """Listens at unix://PATH, ipc://PATH or curve://IP:PORT, the last with `key`. Raises Invalid."""
        self._loop = asyncio.get_running_loop()
        self._host = host_id()
        self._greeting: tuple[str, Hello, int] | None = None  # the client, its Hello, its process by the kernel's word
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._welcomed: set[str] = set()
        self._parting: set[str] | None = None  # who has not said yet that it knows of the end
        self._parted = asyncio.Event()
        self._away: dict[str, asyncio.TimerHandle] = {}
        self._answers: list[tuple[str, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._paging: asyncio.Handle | None = None
        self._nuisance = Nuisance(log, "a malformed message was ignored")
        listen = _listening(endpoints, key)
        self._core = make_core(self._send)
        self._core.hold = self._hold
        self._commit = GroupCommit(self._core, self._release)
        self._listener = listen(
            on_frame=self._on_frame, on_turn=self._turn_ends, on_end=self._on_end, refuse=self._refuse
        )
        self._turn_ends()

    async def part(self, why: str) -> None:
        """Tell all clients that the queue has ended for good: those of other nodes do not see its directory. Returns
        once all have heard, which they say by Hello (ZeroMQ drops what was not read when a connection ends), or after
        PARTING seconds. Nobody else is heard any more."""
        told = encode(Response(0, Failed(QueueClosed.code, why)))
        self._parting = {client for client in self._welcomed if self._listener.send(client, told)}
        self._listener.flush()
        if self._parting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._parted.wait(), PARTING)

    def close(self) -> None:
        for handle in (*self._away.values(), *self._watched.values(), self._timer, self._paging):
            if handle is not None:
                handle.cancel()
        self._listener.close()
        self._commit.close()
        self._core.close()

    def _on_frame(self, client: str, frame: bytes | memoryview, pid: int) -> None:
        try:
            request = decode_request(frame)
        except ValueError as error:  # Malformed
            self._refuse(str(error))
            if isinstance(error, BadArgument) and self._core.knows(client):
                self._send(client, Response(error.request, failed_of(error.refusal)))
            return
        if self._parting is not None:
            if isinstance(request.body, Hello):
                self._parting.discard(client)
                if not self._parting:
                    self._parted.set()
            return
        if isinstance(request.body, Hello):
            self._greeting = client, request.body, pid
        began = time.monotonic()
        with self._telling():
            self._core.handle(client, request, began)
        self._core.account.served(type(request.body).__name__, time.monotonic() - began)
        self._greeting = None
        if isinstance(request.body, Bye):
            self._unwatch(client)
            self._welcomed.discard(client)

    def _turn_ends(self) -> None:
        """Let the answers of this turn go, and set the timer."""
        while self._answers:
            failpoint("controller.before_flush")
            answers, self._answers = self._answers, []
            for client, frame in answers:
                if not self._listener.send(client, frame):
                    log.debug("client %s is not connected; its answer was dropped", _short(client))
            self._listener.flush()
        self._commit.turn_ends()
        if self._core.pages and self._paging is None:
            self._paging = self._loop.call_soon(self._page)
        self._arm()

    def _page(self) -> None:
        """One part of a long answer, then whoever has asked meanwhile."""
        self._paging = None
        if self._core.pages:
            self._core.pages.step()
        self._turn_ends()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Before this process ends, whose change is not in the journal hears of it: no later life will know it."""
        try:
            yield
        except JournalFailed as error:
            if error.client:
                refusal = QueueError(f"nothing was done, the controller cannot write its journal: {error}; make room")
                self._listener.send(error.client, encode(Response(error.request, failed_of(refusal))))
                self._listener.flush()
            raise

    def _refuse(self, why: str) -> None:
        self._nuisance.note(why)

    @property
    def malformed(self) -> int:
        """Messages ignored so far."""
        return self._nuisance.count

    def _hold(self, record: int, client: str, response: Response) -> None:
        """What the core has to say once a record is on the disk."""
        self._commit.hold(record, client, _frame(response))

    def _release(self, answers: list[tuple[str, bytes]]) -> None:
        self._answers += answers
        self._turn_ends()

    def _send(self, client: str, response: Response) -> None:
        """What the core has to say; it goes out at the end of the turn."""
        self._answers.append((client, _frame(response)))
        if isinstance(response.body, Welcome) and self._greeting is not None and self._greeting[0] == client:
            self._listener.trust(client)
            self._welcomed.add(client)
            self._watch(*self._greeting)

    def _watch(self, client: str, hello: Hello, pid: int) -> None:
        """Hear at once of the death of a client on this host."""
        away = self._away.pop(client, None)
        if away is not None:
            away.cancel()
        if client in self._watched or not 0 < (pid or hello.pid) <= MAX_PID:
            return
        if not pid and hello.host != self._host:
            log.info(
                "client %s is not of this pid namespace: only the end of its connection is noticed", _short(client)
            )
            return
        pid = pid or hello.pid
        try:
            watch = exited(pid)
        except OSError as error:  # not a process, or no descriptor is left
            log.warning("client %s, process %d: its death goes unnoticed: %s", _short(client), pid, error)
            return
        self._watched[client] = watch
        watch.add_done_callback(functools.partial(self._exited, client))

    def _exited(self, client: str, watch: asyncio.Future[None]) -> None:
        if not watch.cancelled() and self._watched.pop(client, None) is not None:
            log.info("the process of client %s has ended", _short(client))
            self._gone(client)

    def _on_end(self, client: str) -> None:
        """Its connection ended. If its process lives, it may connect again."""
        if client in self._away:
            self._away[client].cancel()
        self._away[client] = self._loop.call_later(FORGET_AFTER, self._stayed_away, client)

    def _stayed_away(self, client: str) -> None:
        log.info("client %s has had no connection for %.0f s", _short(client), FORGET_AFTER)
        self._unwatch(client)
        self._gone(client)

    def _gone(self, client: str) -> None:
        away = self._away.pop(client, None)
        if away is not None:
            away.cancel()
        self._welcomed.discard(client)
        with self._telling():
            self._core.client_gone(client, time.monotonic())
        self._turn_ends()

    def _unwatch(self, client: str) -> None:
        watch = self._watched.pop(client, None)
        if watch is not None:
            watch.cancel()

    def _arm(self) -> None:
        """Set the timer for the core's next deadline, if that has changed."""
        deadline = self._core.next_deadline()
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        """Requests that came in time but lie in the socket count before the deadline does."""
        self._timer = None
        self._listener.drain()
        with self._telling():
            self._core.tick(time.monotonic())
        self._turn_ends()


async def serve_controller(
    directory: Path, endpoint: str, *, run: str, key_file: str, stop: asyncio.Event, segment_bytes: int,
    ready: Callable[[], None], fsync: bool = False, network: str | None = None,
    sampler: str = "", polling: bool = False, unit_lost_after: float = UNIT_LOST_AFTER,
) -> None:  # fmt: skip
    """Run the controller of `directory` until `stop`; it goes on where the journal there ends. Raises Corrupt.

    `sampler` (JSON, see sampler_spec) chooses the rows of fetches; with `polling` those that find too few get none.

    `network` (curve://IP:PORT) is where clients of other nodes find it. `unit_lost_after`: seconds that a storage unit
    may be away before its rows are given up.
    """
    lock = lock_file(directory / "controller.lock", "the controller", wait=5.0)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(functools.partial(_fail, failed))

    key = read_key(key_file)
    fetching = Fetching(load_sampler(json.loads(sampler)) if sampler else None, polling=polling)

    def make_core(send: Callable[[str, Response], None]) -> ControllerCore:
        core = ControllerCore.recover(
            directory / "journal", send=send, now=time.monotonic(), run=run, key=key,
            segment_bytes=segment_bytes, fsync=fsync, fork=True, fetching=fetching, paged=True,
        )  # fmt: skip
        core.absences.after = unit_lost_after
        return core

    endpoints = [endpoint, *([network] if network else [])]
    try:
        with contextlib.closing(ControllerServer(endpoints, key, make_core)) as server:
            gc.collect()
            gc.freeze()  # what was recovered is not looked through again
            ready()
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if failed.done():
                failed.result()
            elif network and (why := why_ended({"run": run, "key_file": key_file})):
                await server.part(why)
    except JournalFailed as error:
        await until_room(_listening(endpoints, key), key, directory / "journal", error, stop)
        if not stop.is_set():
            raise  # a new process goes on from what is in the journal
    finally:
        os.close(lock)


def _listening(endpoints: Sequence[str], key: str) -> Callable[..., Listener]:
    """Makes the listener at all of them, given its callbacks. Raises Invalid."""
    make = [_listener_at(endpoint, key) for endpoint in endpoints]
    return make[0] if len(make) == 1 else functools.partial(JointListener, make)


def _listener_at(endpoint: str, key: str) -> Callable[..., Listener]:
    if is_network(endpoint):
        scheme, _ = check_network_endpoint(endpoint)
        if scheme != "curve":
            raise Invalid(f"{endpoint}: requests by TCP are only served with CURVE; use curve://IP:PORT")
        return functools.partial(ZmqListener, endpoint, key=key)
    path = check_endpoint(endpoint, ("unix", "ipc"))
    return functools.partial(*((StreamListener, path) if endpoint.startswith("unix:") else (ZmqListener, endpoint)))


def _frame(response: Response) -> bytes:
    frame = encode(response)
    if len(frame) <= MAX_FRAME:
        return frame
    error = Invalid(f"the answer takes {len(frame)} bytes, the limit is {MAX_FRAME}: ask for less at once")
    return encode(Response(response.id, failed_of(error)))


def _fail(failed: asyncio.Future[None], loop: asyncio.AbstractEventLoop, context: dict) -> None:
    """An exception out of the core (a bug, a full disk) ends the process: memory may be ahead of the journal."""
    loop.default_exception_handler(context)
    if not failed.done():
        failed.set_exception(context.get("exception") or RuntimeError(context["message"]))


def _short(client: str) -> str:
    """A client without the part of its identity that is secret."""
    return client.rpartition(".")[0] or "?"
