"""The whole queue inside one process and one event loop: for `runtime=local`, debuggers and tests.

The ledger, the storage formats and the client are the same as in a cluster; only the sockets are missing.

    queue = LocalQueue()                    # in a running loop
    client = queue.client("trainer")
    ...
    await queue.close()
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue.client import QueueClient
from transfer_queue.clients.access import UnitAccess
from transfer_queue.controller.core import ControllerCore
from transfer_queue.errors import Invalid
from transfer_queue.ledger import Ledger
from transfer_queue.net.codec import BadArgument, decode_request, decode_response, encode, encode_request
from transfer_queue.net.local_transport import LOCAL_RUN, LocalTransport
from transfer_queue.net.messages import Request, Response
from transfer_queue.storage.journal import NullJournal
from transfer_queue.storage.leftovers import LOCAL_PREFIX, PREFIX, remove_leftovers
from transfer_queue.storage.place import choose_storage
from transfer_queue.storage.private import private_directory, text_if_there
from transfer_queue.storage.segments import check_segment_bytes
from transfer_queue.storage.unit import Unit
from transfer_queue.storage.unit_files import UnitFiles, replace_file

SEGMENT_BYTES = 8 << 20

LOCAL_BUDGET = 1 << 30


class LocalQueue:
    """Controller and one storage unit in the caller's event loop.

    With `directory`, the controller's journal is kept there and a later LocalQueue on it goes on; else all is gone
    after `close`. The segments are in `storage_dir`, which `directory` remembers; without it, in `directory` too.
    `spill_dir` takes up to `spill_budget_bytes` of what memory has no room for (default: nothing goes to disk).
    `clock` defaults to the loop's own time, so that a loop with virtual time moves the leases too; with another clock,
    call `tick` whenever it was moved.
    """

    def __init__(
        self, *, directory: str | Path | None = None, storage_dir: str | Path | None = None,
        unit_budget_bytes: int = LOCAL_BUDGET, segment_bytes: int = SEGMENT_BYTES,
        spill_dir: str | Path | None = None, spill_budget_bytes: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        check_segment_bytes(segment_bytes)
        self._loop = asyncio.get_running_loop()
        self.clock = clock or self._loop.time
        self._clients: dict[str, LocalTransport] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None  # of the timer, until it fires
        self._closed = False
        self._keep = directory is not None
        self.core = self._make_core(directory, segment_bytes)
        if spill_budget_bytes and spill_dir is None:
            raise Invalid(f"spill_budget_bytes={spill_budget_bytes}: name the directory for them, spill_dir")
        self._spill = spill_dir, spill_budget_bytes
        self._start_unit(directory, storage_dir, unit_budget_bytes, segment_bytes)

    def client(self, name: str) -> QueueClient:
        """A client of this queue; close it, or close the queue."""
        transport = self._transport(name)
        access = UnitAccess(name, "", force_remote=False)
        client = QueueClient(transport, access)
        transport.say_hello()
        return client

    def tick(self) -> None:
        """Let the controller do what is due at `clock()`."""
        self._deadline = None
        self.core.tick(self.clock())
        self._arm()

    async def close(self) -> None:
        """End clients, unit and controller; without `directory`, remove the bytes too."""
        if self._closed:
            return
        for transport in list(self._clients.values()):
            await transport.close()
        self._closed = True
        self._work.cancel()
        await asyncio.gather(self._work, self._registered, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self.core.close()
        self._unit.files.close(remove=not self._keep)

    async def __aenter__(self) -> LocalQueue:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _make_core(self, directory: str | Path | None, segment_bytes: int) -> ControllerCore:
        if directory is None:
            journal = NullJournal()
            return ControllerCore(Ledger(), send=self._send, journal=journal, segment_bytes=segment_bytes)
        private_directory(directory)
        journal_path = Path(directory) / "journal"
        return ControllerCore.recover(
            journal_path, send=self._send, now=self.clock(), run=LOCAL_RUN, segment_bytes=segment_bytes
        )

    def _start_unit(
        self, directory: str | Path | None, storage_dir: str | Path | None, budget: int, segment_bytes: int
    ) -> None:
        if directory is not None:
            home = _kept_home(Path(directory).absolute(), storage_dir)
        else:
            parent, _ = choose_storage(storage_dir, 1, None)
            remove_leftovers(parent)
            home = parent / f"{LOCAL_PREFIX}{secrets.token_hex(6)}"
        spill_dir, spill_budget = self._spill
        files = UnitFiles(home, 0, budget=budget, spill=spill_dir)
        self._unit = Unit(files, "ipc://nowhere", segment_bytes, spill_budget)
        transport = self._transport("unit-0")
        transport.on_push = self._unit.push
        transport.say_hello()
        self._registered = asyncio.ensure_future(self._unit.register(transport))
        self._work = asyncio.ensure_future(self._unit.work(transport, _at_once))

    def _transport(self, name: str) -> LocalTransport:
        transport = LocalTransport(name, self._submit, self._left)
        self._clients[transport.client] = transport
        return transport

    def _submit(self, client: str, request: Request) -> None:
        try:
            decoded = decode_request(encode_request(request.id, request.body))
        except BadArgument as error:
            raise error.refusal from None
        self.core.handle(client, decoded, self.clock())
        self._arm()

    def _left(self, client: str) -> None:
        self._clients.pop(client, None)
        self.core.client_gone(client, self.clock(), died=False)
        self._arm()

    def _send(self, client: str, response: Response) -> None:
        """Deliver at once: askers and the unit only take note and act later, so the controller is not re-entered."""
        self.core.sync()
        transport = self._clients.get(client)
        if transport is not None:
            transport.deliver(decode_response(encode(response)))

    def _arm(self) -> None:
        deadline = None if self._closed else self.core.next_deadline()
        if deadline == self._deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._deadline, self._timer = deadline, None
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self.clock()), self.tick)


def _kept_home(directory: Path, storage_dir: str | Path | None) -> Path:
    """Where the segments of the queue in `directory` are: where they were, else in `storage_dir`, else beside the
    journal. Raises Invalid."""
    memory, beside = directory / "storage", directory / "unit-0"
    known = text_if_there(memory)
    if known is not None and not (os.path.isabs(known) and Path(known).name.startswith(PREFIX)):
        raise Invalid(f"{memory} holds {known[:40]!r}, not a storage directory; remove it (rows there are lost)")
    if known is not None and Path(known).is_dir():
        return Path(known)
    if known is None and (storage_dir is None or beside.is_dir()):
        return beside
    parent, _ = choose_storage(storage_dir if known is None else storage_dir or Path(known).parent, 1, None)
    remove_leftovers(parent)
    home = parent / f"{PREFIX}{secrets.token_hex(6)}"
    private_directory(home)
    replace_file(home / "owner", str(directory))
    replace_file(memory, str(home))
    return home


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Instead of a thread, whose time a virtual clock would not see."""
    return function(*arguments)
