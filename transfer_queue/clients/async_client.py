"""The client of the queue: what rollout workers, trainers and ranks call.

    put = place bytes in a granted segment, one copy, then one Commit; its reply brings the next segments
    get = one Lookup, then a gather from mapped memory, then a check that nothing was reused meanwhile

A client belongs to the event loop it was connected in. After a restart of the controller or a unit it goes on by
itself: unanswered requests are sent again, and bytes in a segment that is gone are copied again into a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeVar

from transfer_queue.clients.access import UnitAccess
from transfer_queue.clients.arguments import names_of
from transfer_queue.clients.dropped import close_when_dropped
from transfer_queue.clients.reading import read_columns
from transfer_queue.clients.row_verbs import CLEARED_AT_ONCE, RowVerbs
from transfer_queue.errors import NotFound, QueueError, SegmentGone
from transfer_queue.failpoints import failpoint
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.bounds import check_wait
from transfer_queue.net.messages import (
    Ack,
    Admit,
    Block,
    Changes,
    Clear,
    Commit,
    CommitStep,
    Committed,
    Drop,
    GiveBack,
    Granted,
    GroupSpec,
    Lease,
    Leased,
    Listing,
    ListKeys,
    Located,
    Lookup,
    Mutation,
    Nack,
    Ok,
    OpenPartition,
    OpenTrainer,
    Push,
    Query,
    QueueStats,
    ReleaseHolder,
    Renew,
    Replay,
    Reply,
    Restored,
    Seal,
    SegmentRequest,
    SessionClose,
    Stats,
    Tag,
    TaskSpec,
    Token,
    Watch,
    Welcome,
)  # fmt: skip
from transfer_queue.net.transport import GRACE, SocketTransport, Transport, read_key
from transfer_queue.storage.arena import Extent, WriteArena, fill
from transfer_queue.storage.columns import Column
from transfer_queue.storage.convert import packed as packed_columns
from transfer_queue.storage.gather import RowsOf, arrays_of
from transfer_queue.storage.segments import unit_of

log = logging.getLogger(__name__)

R = TypeVar("R")

Queue = Mapping[str, str] | str | PathLike[str] | None
"""What a queue is named by: see QueueClient.connect."""

SEGMENT_WAIT = 60.0
"""Seconds that a put waits for storage to write to, unless it says otherwise. Consumers that do not ack are the usual
reason."""

REFUSED_GRACE = 3.0
"""Seconds beyond its `wait` that a put goes on while the controller says that it serves nobody: a full disk may have
room again."""

ATTEMPTS = 20
"""How often bytes are copied (or read) again because their segment went with its unit or controller: about 8 s."""


class QueueClient(RowVerbs):
    """See the module; all verbs raise subclasses of QueueError."""

    def __init__(self, transport: Transport, access: UnitAccess) -> None:
        """Use `connect`, or LocalQueue.client."""
        self.name = transport.name
        self._transport = transport
        self._access = access
        self._arenas: dict[str, WriteArena] = defaultdict(lambda: WriteArena(access.open_for_write))
        self.bytes_read = 0
        """Bulk bytes that `get` copied into this process so far; `bytes_written`: that `put` and `admit` stored."""
        self.bytes_written = 0
        self._incarnations: dict[str, int] = {}  # by partition: which trainer this is, if it is one
        self._asking = asyncio.Lock()
        self._beside: set[asyncio.Task[None]] = set()  # what nobody waits for
        self._strays: list[int] = []  # segments granted to nobody any more, to be sealed with the next commit
        own = weakref.ref(self)  # the event loop holds the transport: it must not hold a client that nobody has
        transport.on_welcome = lambda *news: (client := own()) and client._on_welcome(*news)
        transport.on_push = lambda push: (client := own()) and client._on_push(push)
        transport.on_orphan = lambda *news: (client := own()) and client._on_orphan(*news)
        self._dropped: weakref.finalize | None = None

    @classmethod
    async def connect(
        cls, address: Queue = None, *, name: str | None = None, timeout: float = 30.0, force_remote: bool | None = None
    ) -> QueueClient:
        """A client of a queue, named by its address, by its directory, or (None) by TQ_ADDRESS or TQ_DIRECTORY of the
        environment. `name` is told in errors and is the holder of leases. Raises Disconnected (QueueClosed if it was
        closed by who had started it, as all verbs then do at once), DeadlineExceeded, Invalid (wrong key or run, or
        what names no queue)."""
        from transfer_queue.service.finding import address_of

        address, name = address_of(address), name or f"client-{os.getpid()}-{secrets.token_hex(3)}"
        access = UnitAccess(name, read_key(address["key_file"]), force_remote=force_remote)
        transport = await SocketTransport.connect(
            address, name=name, timeout=timeout, on_welcome=lambda welcome, _: access.learn(welcome.units),
            heeds_closing=True,
        )  # fmt: skip
        access.check_open = transport.check_open
        client = cls(transport, access)
        end = partial(_close_soon, asyncio.get_running_loop(), transport, access)
        client._dropped = close_when_dropped(client, name, end)
        return client

    @property
    def ended(self) -> bool:
        """Whether the queue was closed by who had started it, and is not there again."""
        return isinstance(self._transport, SocketTransport) and self._transport.ended

    async def open_partition(
        self, partition: str, *, tasks: Iterable[TaskSpec], max_groups: int = 0, max_bytes: int = 0,
        durability: Literal["", "memory", "spill", "journal"] = "",
    ) -> None:  # fmt: skip
        """Declare a partition, its tasks and its credit; again only changes the credit. `durability`: "spill" (the
        default) lets its rows go to disk when memory is full, "memory" makes writers wait instead; with "journal",
        whatever is done there from now on is on the disk before it is answered, and survives the machine's reboot
        (Invalid if the queue keeps no journal, or its units have no directory on disk)."""
        await self._ask(OpenPartition(partition, list(tasks), max_groups, max_bytes, durability), Ok)

    async def admit(
        self, partition: str, groups: Sequence[GroupSpec], columns: Mapping[str, Any], *, wait: float = 60.0
    ) -> None:
        """Take credit for prompt groups and store their columns (row i = group i). Raises QueueFull after `wait`."""
        wait = check_wait(wait)
        packed = await packed_columns(columns, len(groups))

        async def send(blocks: list[Block]) -> None:
            await self._ask(Admit(partition, list(groups), blocks, wait), Ok, wait)

        await self._store(partition, packed, send)

    async def put(
        self, partition: str, keys: Sequence[str], columns: Mapping[str, Any], *, tags: list[Tag] | None = None,
        token: Token | None = None, closes: Sequence[SessionClose] = (), rows: bytes = b"", wait: float | None = None,
    ) -> KVBatchMeta:  # fmt: skip
        """Upsert fields of rows; rows, tags and session ends become visible together. Raises Fenced, Conflict,
        QueueFull if there is no storage to write to after `wait` seconds (60), and
        StorageKeyNotFoundError if a key no longer names the row of its serial in `rows` (int64, packed).

        A column may be a Column, a numpy array (row i = array[i]), a list with one entry per row (1-D and higher
        arrays: ragged; anything else: objects) or a torch tensor, also jagged.
        """
        patience = None if wait is None else check_wait(wait) + REFUSED_GRACE
        keys, wait = names_of("keys", keys), SEGMENT_WAIT if wait is None else check_wait(wait)
        packed = await packed_columns(columns, len(keys))
        committed: list[Committed] = []
        arena = self._arenas[partition]

        async def send(blocks: list[Block]) -> None:
            sealed = [*arena.sealed(blocks), *self._strays]
            self._strays.clear()
            need = 2 * sum([block.nbytes for block in blocks])
            own = {block.segment for block in blocks} <= set(sealed)  # the next put wants one like that, not usual ones
            want = need if not own and arena.room() < need and not arena.wanting else 0
            arena.wanting |= want > 0
            body = Commit(
                partition, keys, blocks, None if tags is None else [*tags], token, list(closes), sealed, want, rows
            )
            try:
                reply = await self._ask(body, Committed, patience=patience)
            except (QueueError, asyncio.CancelledError):
                arena.seal_again(sealed)
                raise
            finally:
                arena.wanting &= want == 0
            failpoint("client.after_commit")
            await self._use(arena, reply.grants)
            committed.append(reply)

        await self._store(partition, packed, send, wait)
        reply = committed[-1]
        merged = reply.tags
        if merged is None:  # nothing was there to merge with; they are flat, else the controller had refused them
            merged = [dict(tag) for tag in tags] if tags else [{} for _ in keys]
        return KVBatchMeta.of_answer(keys, merged, partition, reply.fields, token)

    async def get(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None, *, copy: bool = True
    ) -> dict[str, Column]:
        """Fields of rows, in the order of the keys; `None` = all that every row has. Raises NotFound.

        Columns are numpy's, also of what was put as tensors: bfloat16 lies in uint16 arrays (its bits, which
        `Column.dtype` says: "bfloat16"), and a row of a column of scalars is a numpy scalar, `np.int64(5)`, not a
        tensor of no dimensions. `Column.values` gives all rows in one array; the kv verbs give tensors back.

        With `copy` false, a column whose rows lie one after another where they were put is a view: it costs nothing,
        is not checked against its digest, may be written to (nobody else sees it), and keeps its memory, outside the
        storage's budget, until it is freed. Other columns are copied.
        """

        keys = names_of("keys", keys)

        async def locate() -> Located:
            located = await self.lookup(partition, keys, fields)
            if len(located.keys) != len(keys):
                have = set(located.keys)
                missing = [key for key in keys if key not in have]
                raise NotFound(f"partition {partition!r} lacks {len(missing)} of {len(keys)} rows: {missing[:5]}")
            return located

        return (await self.read_again(locate, copy=copy))[1]

    async def read_again(
        self, locate: Callable[[], Awaitable[Located]], *, copy: bool = True, mixed: RowsOf = arrays_of
    ) -> tuple[Located, dict[str, Column]]:
        """Locate rows and read them; again if they moved in between. Raises SegmentGone if they do not stand still."""
        error = SegmentGone("nothing was read")
        for attempt in range(ATTEMPTS):
            located = await locate()
            try:
                return located, await self.read(located, copy=copy, mixed=mixed)
            except SegmentGone as gone:
                error = gone
                await asyncio.sleep(min(0.5, 0.05 * attempt))
        raise error

    async def read(self, located: Located, *, copy: bool = True, mixed: RowsOf = arrays_of) -> dict[str, Column]:
        """The rows of a Lookup's answer. Raises SegmentGone if they were moved or freed since: look them up again."""
        self._access.learn(located.units)
        columns, copied = await read_columns(self._access, located, copy=copy, mixed=mixed)
        self.bytes_read += copied
        return columns

    async def lookup(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> Located:
        """Where rows lie, and their tags. Missing keys are left out. Raises NotFound for a field that a row lacks."""
        wanted = None if fields is None else names_of("fields", fields)
        return await self._ask(Lookup(partition, names_of("keys", keys), wanted), Located)

    async def list(self, partition: str | None = None) -> dict[str, dict[str, Tag]]:
        """Keys with their tags, by partition."""
        return (await self._ask(ListKeys(partition), Listing)).partitions

    async def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Remove rows; unknown keys are ignored. Many go in parts, so that nobody else waits for all of them."""
        keys = names_of("keys", keys)
        for at in range(0, max(1, len(keys)), CLEARED_AT_ONCE):
            await self._ask(Clear(partition, keys[at : at + CLEARED_AT_ONCE]), Ok)

    async def lease(
        self, partition: str, task: str, *, groups: int = 0, uids: Sequence[str] = (), wait: float = 60.0,
        holder: str | None = None,
    ) -> Leased:  # fmt: skip
        """Up to `groups` groups, or exactly `uids`. Raises DeadlineExceeded if nothing came within `wait`, and Fenced
        for a trainer (who called `open_trainer` with this client) after a newer one has."""
        wait, incarnation = check_wait(wait), self._incarnations.get(partition, 0)
        body = Lease(partition, task, holder or self.name, groups, names_of("uids", uids), wait, incarnation)
        return await self._ask(body, Leased, wait)

    async def renew(self, partition: str, token: Token) -> None:
        """A clock lease gets its full time again. Raises Fenced if it has already ended."""
        failpoint("client.before_renew")
        await self._ask(Renew(partition, token), Ok)

    async def ack(self, partition: str, token: Token, uids: Sequence[str], *, step: int = 0) -> None:
        """The groups are done; as rows trained in `step`, final with commit_step. Raises Fenced."""
        await self._ask(Ack(partition, token, names_of("uids", uids), step), Ok)

    async def nack(
        self, partition: str, token: Token, uids: Sequence[str], *, reason: str = "", poison: bool = False
    ) -> None:
        """Give groups back. `poison` counts toward max_deliver. Raises Fenced."""
        await self._ask(Nack(partition, token, names_of("uids", uids), reason, poison), Ok)

    async def drop(self, partition: str, uids: Sequence[str], reason: str) -> None:
        """End groups as dropped, whatever state they are in."""
        await self._ask(Drop(partition, names_of("uids", uids), reason), Ok)

    async def replay(self, partition: str, uids: Sequence[str]) -> None:
        """Dead groups begin again with their prompts, all or none. Raises NotFound for one that is not dead."""
        await self._ask(Replay(partition, names_of("uids", uids)), Ok)

    async def watch(self, partition: str, since: int, *, wait: float = 60.0) -> Changes:
        """Groups changed after `since` (-1: all). No groups if nothing happened within `wait`."""
        wait = check_wait(wait)
        return await self._ask(Watch(partition, since, wait), Changes, wait)

    async def open_trainer(
        self, partition: str, step: int, *, repeats: bool = False, version: int | None = None,
        columns: Sequence[str] = (),
    ) -> Restored:  # fmt: skip
        """Begin a trainer's incarnation restored to `step`: fences the older one. The others: see OpenTrainer."""
        restored = await self._ask(
            OpenTrainer(partition, step, repeats, version, names_of("columns", columns)), Restored
        )
        self._incarnations[partition] = restored.incarnation
        return restored

    async def commit_step(self, partition: str, step: int) -> None:
        """The checkpoint of `step` is on disk: what was acked up to it may be forgotten."""
        await self._ask(CommitStep(partition, step), Ok)

    async def release_holder(self, holder: str, *, died: bool = True) -> None:
        """The leases of `holder` end now: it is dead (its groups are then suspected of that), or has stopped."""
        await self._ask(ReleaseHolder(holder, died), Ok)

    async def stats(self, *, orders: bool = False, details: bool = False) -> QueueStats:
        """Depths, bytes and ages by partition, and the units; with `orders` also which groups are outstanding, with
        `details` who has leased how many and how many rows have which field."""
        return await self._ask(Stats(orders, details), QueueStats)

    async def end_puts(self, partition: str) -> None:
        """This client puts nothing more to a partition: what room it holds for that is there for others."""
        arena = self._arenas.pop(partition, None)
        if arena is not None:
            arena.finish()
            if sealed := arena.sealed():
                await self._seal(partition, arena, sealed)

    async def close(self) -> None:
        """End this client: its leases are released, its segments sealed."""
        if self._dropped is not None:
            self._dropped.detach()
        for task in self._beside:
            task.cancel()
        await self._transport.close()
        self._access.close()
        self._arenas.clear()

    # --- storing ---------------------------------------------------------------------------------------------

    async def _store(self, partition: str, columns: dict[str, Column], send: Any, wait: float | None = None) -> None:
        """Copy columns into segments and `send` their blocks; again if the segments went meanwhile."""
        arena = self._arenas[partition]
        error = SegmentGone(f"partition {partition!r} has no segment to write to")
        sizes = [column.nbytes for column in columns.values()]
        for attempt in range(ATTEMPTS):
            extents = await self._place(partition, sizes, wait)
            try:
                blocks = [fill(e, field, column) for e, (field, column) in zip(extents, columns.items(), strict=True)]
                await self._access.upload(extents)
                failpoint("client.after_copy")
                await send(blocks)
                self.bytes_written += sum(sizes)
                return
            except SegmentGone as gone:
                log.info("client %r copies %d rows again: %s", self.name, len(columns), gone)
                error = gone
                arena.give_up({unit_of(extent.segment) for extent in extents})
                await asyncio.sleep(min(0.5, 0.05 * attempt))
            finally:
                arena.settle(extents)
                if arena.owes():
                    self._seal_soon(partition, arena)
        raise error

    async def _place(self, partition: str, sizes: list[int], wait: float | None) -> list[Extent]:
        """Room for all blocks, waiting for new segments if need be: one request at a time, its segment serves all."""
        arena, wait = self._arenas[partition], SEGMENT_WAIT if wait is None else wait
        while isinstance(extents := arena.place(sizes), int):
            async with self._asking:
                if not isinstance(extents := arena.place(sizes), int):
                    return extents
                sealed = arena.sealed()
                try:
                    request = SegmentRequest(extents, wait, sealed, partition)
                    reply = await self._ask(request, Granted, wait)
                except (QueueError, asyncio.CancelledError):
                    arena.seal_again(sealed)
                    raise
                await self._use(arena, reply.segments)
        return extents

    async def _use(self, arena: WriteArena, segments: Sequence[Any]) -> None:
        """Add grants, after asking where their unit is if it is new to us, or was started anew."""
        if any(not self._access.knows(segment.segment) for segment in segments):
            try:
                self._access.learn((await self._transport.greet()).units)
            except (QueueError, asyncio.CancelledError):
                self._strays += [segment.segment for segment in segments]
                raise
        arena.add(segments)

    def _seal_soon(self, partition: str, arena: WriteArena) -> None:
        """Others wait for what this client has finished with: tell so without a commit."""
        sealed = [*arena.sealed(), *self._strays]
        self._strays.clear()
        if sealed:
            self._begin(self._seal(partition, arena, sealed))

    async def _seal(self, partition: str, arena: WriteArena, sealed: list[int]) -> None:
        try:
            await self._ask(Seal(sealed, partition), Ok)
        except (QueueError, asyncio.CancelledError) as error:
            arena.seal_again(sealed)
            if isinstance(error, asyncio.CancelledError):
                raise
            log.warning("client %r could not give back %d segments: %s", self.name, len(sealed), error)

    # --- the wire --------------------------------------------------------------------------------------------

    async def _ask(self, body: Mutation | Query, kind: type[R], wait: float = 0.0, patience: float | None = None) -> R:
        """The reply of this kind; within `wait`, which the controller keeps, and a grace for its restart. `patience`:
        see Transport.request."""
        reply = await self._transport.request(body, timeout=wait + GRACE, patience=patience)
        if not isinstance(reply, kind):
            raise QueueError(f"{type(body).__name__} was answered by {type(reply).__name__}, expected {kind.__name__}")
        return reply

    def _on_welcome(self, welcome: Welcome, again: bool) -> None:
        """A new life of the controller does not know what it had granted."""
        self._access.learn(welcome.units)
        if again:
            for arena in self._arenas.values():
                arena.forget()

    def _on_push(self, push: Push) -> None:
        """Segments that this client has and others need; those that it is writing to follow when that is settled."""
        if isinstance(push, GiveBack):
            for partition, arena in self._arenas.items():
                arena.recall(push.segments)
                self._seal_soon(partition, arena)

    def _on_orphan(self, body: Any, reply: Reply) -> None:
        """An answer came whose caller had given up: what it grants is given back instead of held for nothing."""
        if isinstance(reply, Granted):
            self._strays += [segment.segment for segment in reply.segments]
        elif isinstance(reply, Committed):
            self._strays += [segment.segment for segment in reply.grants]
        if isinstance(body, Lease) and isinstance(reply, Leased):
            uids = [group.uid for group in reply.groups]
            self._begin(self._give_back(body.partition, reply.token, uids))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _give_back(self, partition: str, token: Token, uids: list[str]) -> None:
        try:
            await self.nack(partition, token, uids, reason="nobody waited for this lease any more")
        except QueueError as error:
            log.warning("client %r could not give back %s: %s", self.name, uids, error)


_closing: set[asyncio.Task[None]] = set()  # of dropped clients: a loop holds its tasks weakly


def _close_soon(loop: asyncio.AbstractEventLoop, transport: Transport, access: UnitAccess) -> None:
    """In the client's loop, unless that has ended, and its sockets with it."""

    async def close() -> None:
        await transport.close()
        access.close()

    def begin() -> None:
        task = loop.create_task(close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(begin)
