"""The controller without its sockets: every request goes in by `handle`, every answer and push goes out by `send`.

    client ──Request──► handle ──► ledger.apply ──► journal.append ──► send(Response)
                          │                │
                          ▼ not yet        ▼ something changed
                        parked ◄─────── wake what this change satisfies, in order of arrival

    consumes     requests (handle), deaths (client_gone), time (tick)
    produces     responses and, with id 0, pushes to units (MakeSegments, FreeSegments, ...) and to writers (GiveBack),
                 all through `send`
    waits for    nothing itself. A shell must call `tick` when `next_deadline` has come, after it has handled all
                 requests that lie in its sockets: else renewals that merely queued up would come too late
    woken by     never a poll: a parked request is looked at again only when its partition or the segments changed

What a shell around it has to know:

- `client` is the identity of one client object, the same over its reconnects and never used by another one; request
  ids count per identity. A request is answered once; the same (client, id) again gets the same answer again.
- The first request of an identity is Hello, after a restart of the controller too: until then the answer to anything
  is Failed("disconnected", "say Hello first"), whereupon a client says Hello and sends its requests again, same ids.
- A unit says Hello like any client, then RegisterUnit. Each push MakeSegments is answered by one SegmentsMade, in
  order, with segments of exactly `nbytes` and ids that were never used before; it is a request and answered by Ok.
- Everything is called from one thread. An exception out of these methods is a bug or a full disk: end the process.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.controller import wording
from transfer_queue.controller.absences import Absences
from transfer_queue.controller.account import RequestAccount
from transfer_queue.controller.compaction import Compaction
from transfer_queue.controller.fetching import Fetching
from transfer_queue.controller.grants import SegmentGrants
from transfer_queue.controller.loads import Loads
from transfer_queue.controller.pages import GROUPS, PARTITIONS, ROWS, Pages
from transfer_queue.controller.parking import Parked, Parking, Replies, Waiting
from transfer_queue.controller.recalling import Recalling
from transfer_queue.controller.recovery import recover, sections
from transfer_queue.controller.unsynced import Unsynced
from transfer_queue.errors import DeadlineExceeded, Disconnected, Invalid, QueueError, QueueFull
from transfer_queue.failpoints import failpoint
from transfer_queue.keys import LOADING
from transfer_queue.ledger import Ledger, again, kept
from transfer_queue.net.bounds import MAX_WAIT, check_names
from transfer_queue.net.messages import (
    VERSION,
    Admit,
    AdoptPartitions,
    Bye,
    Changes,
    ClearPartition,
    Commit,
    Committed,
    Compacted,
    Consume,
    Expire,
    Failed,
    Fetch,
    Find,
    Granted,
    Hello,
    Keep,
    Lease,
    Life,
    Listing,
    ListKeys,
    Located,
    Lookup,
    LoseSegments,
    Move,
    Mutation,
    Ok,
    OpenPartition,
    PartitionStats,
    Push,
    Query,
    QueueStats,
    Record,
    RegisterUnit,
    ReleaseHolder,
    Reply,
    Request,
    ResetConsumption,
    Response,
    Seal,
    SegmentRequest,
    SegmentsMade,
    Spilled,
    Stats,
    Watch,
    Welcome,
)
from transfer_queue.storage.history import History
from transfer_queue.storage.journal import FORMAT, JournalLike
from transfer_queue.storage.segments import unit_of

Send = Callable[[str, Response], None]

UNIT_GRACE = 10.0
"""How long a Lookup waits for a unit to register again after a restart of the controller."""

RETRY_AFTER = 1.0
"""Seconds; the hint to who got no credit in the time that it would wait."""

ADMITS, LEASES, WATCHES, FETCHES = "admits", "leases", "watches", "fetches"
"""What can be waited for in each partition."""

LOOKUPS, SEGMENTS, DISK_SEGMENTS = "lookups", "segments", "segments on disk"
"""What can be waited for besides."""

_WAITS = {Admit: ADMITS, Lease: LEASES, Watch: WATCHES, Fetch: FETCHES}

REPEATABLE = (ListKeys, Lookup, Find, Watch, Stats, Seal, Bye)
"""Requests that may be done again when they are sent again: their answers are not kept."""


class ControllerCore:
    """See the module. Invariants:

    - A mutation is applied, then journaled, then answered; one that is refused changes nothing and is not journaled.
    - No answer about a partition, and no push, leaves before the mutations of durability "journal" that it follows are
      on the disk.
    - Among requests that wait for the same thing, the one that came first is served first.
    - Every parked request is answered: when it can be served, or at its deadline, or never if its client is gone.
    - A segment has at most one writer; no commit is accepted whose bytes lie in a segment its client does not hold.
    - Segments of a unit, those being made included, never exceed its budget.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        send: Send,
        journal: JournalLike,
        segment_bytes: int = 8 << 20,
        spare_segments: int = 2,
        run: str = "",
        key: str = "",
        fetching: Fetching | None = None,
        paged: bool = False,
    ) -> None:
        """With an empty `run` or `key`, Hello is not checked against it."""
        self.ledger = ledger
        self._send = send
        self.hold: Callable[[int, str, Response], None] = lambda _, *sent: send(*sent)
        """Takes what may leave only once the record of that number is on the disk; by default `send`, see `sync`."""
        self._journal = journal
        self._run, self._key = run, key
        self._clients: dict[str, str] = {}  # identity -> Hello name
        self.account = RequestAccount()  # a shell, which has a clock, says how long each took
        self._seq = 0
        self._orders = 0  # pushed to units so far
        self._unsynced = Unsynced()
        self._parking = Parking()
        self._told: dict[str, int | None] = {}  # partition -> number of the last change that its watchers were told
        self.pages = Pages(lambda *sent: self._tell(self._unsynced.needed(), *sent)) if paged else None
        self._fetching = fetching if fetching is not None else Fetching()
        self._replies = Replies()
        self.absences = Absences()  # of storage units; set `after` to change when one is given up
        self._loads = Loads()
        self._grants = SegmentGrants(
            self._push, use=ledger.segments.use, segment_bytes=segment_bytes, spare_segments=spare_segments
        )
        self._compaction = Compaction(ledger, self._grants, self._push)
        self._recalling = Recalling(self._grants, ledger.segments.use, self._push)

    @classmethod
    def recover(
        cls,
        journal_path: str | Path,
        *,
        send: Send,
        now: float,
        run: str,
        key: str = "",
        segment_bytes: int = 8 << 20,
        spare_segments: int = 2,
        fsync: bool = False,
        fork: bool = False,
        fetching: Fetching | None = None,
        paged: bool = False,
    ) -> ControllerCore:
        """A core that goes on where the journal at `journal_path`, with the snapshots beside it, ends, in a new life;
        makes the file if need be. `fork`: see History.

        Raises Corrupt. Clients and units must say Hello and register again.
        """
        state = recover(journal_path, run=run)
        ledger, seq = state.ledger, state.record
        journal = History(Path(journal_path), run, seq, tail=state.tail, fsync=fsync, fork=fork)
        core = cls(
            ledger,
            send=send,
            journal=journal,
            segment_bytes=segment_bytes,
            spare_segments=spare_segments,
            run=run,
            key=key,
            fetching=fetching,
            paged=paged,
        )
        core._seq, core._replies = seq, state.replies
        failpoint("recovery.before_life")
        core._accept(Life(format=FORMAT, run=run, epoch=ledger.epoch + (seq > 0)), now)
        failpoint("recovery.after_life")
        for unit in {unit_of(segment) for segment in ledger.segments.use}:
            core.absences.left(unit, now)
        core._loads.found(ledger.partitions, now)
        return core

    # --- what a shell calls -----------------------------------------------------------------------------------

    def handle(self, client: str, request: Request, now: float) -> None:
        """Take one request; it is answered through `send`, now or when it can be."""
        body = request.body
        if isinstance(body, Hello):
            return self._send(client, Response(request.id, self._hello(client, body)))
        if client not in self._clients:
            return self._send(client, Response(request.id, Failed(Disconnected.code, "say Hello first")))
        known = self._known(client, request)
        if known is not None:
            return self._respond(client, request.id, body, known)
        if (client, request.id) in self._parking:
            return  # sent again while it waits
        try:
            reply = self._serve(client, request, now)
        except QueueError as error:
            reply = _failed(error)
        if reply is not None:
            self._answer(client, request.id, body, reply)
        if isinstance(body, Bye):
            self.client_gone(client, now, died=False)
        if not isinstance(body, Stats | ListKeys):  # they change nothing, whatever the number of partitions
            self._wake(getattr(body, "partition", None), now)
        self._journal.settle(self._sections)

    def knows(self, client: str) -> bool:
        """Whether it has said Hello, so that it gets answers."""
        return client in self._clients

    def client_gone(self, client: str, now: float, *, died: bool = True) -> None:
        """This client is dead, not just slow, or has said Bye: its segments are sealed, its waits forgotten, and the
        clock leases whose holder is its Hello name end (unless another client of that name is there), and what it
        was loading goes. For a unit: no new grants from it until it registers again; its files still serve reads."""
        name = self._clients.pop(client, None)
        if name is None:
            return
        self._parking.forget_client(client)
        if self.pages is not None:
            self.pages.forget_client(client)
        for unit in [number for number, unit in self._grants.units.items() if unit.client == client]:
            self.absences.left(unit, now)
        self._grants.client_gone(client)
        if name not in self._clients.values() and self.ledger.holds_clock_leases(name):
            self._accept(ReleaseHolder(holder=name, died=died), now)
        self._clear_loads(self._loads.left(client), now)
        self._wake(None, now)
        self._journal.settle(self._sections)

    def tick(self, now: float) -> None:
        """Do what is due: expire leases (journaled only if there are such), end waits that ran out, ask units again."""
        expiry = self.ledger.next_expiry()
        if expiry is not None and expiry <= now:
            self._accept(Expire(), now)
        for unit in self.absences.due(now):
            self._give_up(unit, now)
        self._clear_loads(self._loads.due(now), now)
        for due in (self._grants.next_retry(), self._compaction.next_due(), self._recalling.next_due()):
            if due is not None and due <= now:
                self._grants.changed = True
        self._wake(None, now)
        for parked in self._parking.due(now):
            self._answer(parked.client, parked.id, parked.body, self._ran_out(parked, now))
        self._journal.settle(self._sections)

    def next_deadline(self) -> float | None:
        """When `tick` should be called next; None: not before the next request."""
        times = (
            self.ledger.next_expiry(), self._parking.next_deadline(), self._grants.next_retry(),
            self.absences.next_due(), self._compaction.next_due(), self._recalling.next_due(), self._loads.next_due(),
        )  # fmt: skip
        return min((time for time in times if time is not None), default=None)

    def sync(self) -> None:
        """For shells without `hold`: to be called before anything that went to `send` leaves, once for as much as
        possible. What must not be lost with the machine is on the disk then."""
        if self._unsynced.needed():
            self._journal.sync()
            self._unsynced.covered(self._seq)

    def begin_sync(self) -> tuple[int, Executor | None, Callable[[], None]]:
        """Work for a thread of that executor (None: of any), after which all records up to this one are on the disk;
        `synced` is to be told. One at a time."""
        return self._seq, *self._journal.begin_sync()

    def synced(self, record: int) -> None:
        """The sync that was begun after `record` has ended well."""
        self._unsynced.covered(record)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    # --- requests ---------------------------------------------------------------------------------------------

    def _hello(self, client: str, hello: Hello) -> Reply:
        if hello.version != VERSION:
            return Failed(Invalid.code, f"this controller speaks version {VERSION}, {hello.name!r} {hello.version}")
        if self._run and hello.run != self._run:
            return Failed(Invalid.code, f"this controller serves run {self._run!r}, not {hello.run!r}: wrong address")
        if self._key and not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            return Failed(Invalid.code, "wrong key; give the key file of this run")
        self._clients[client] = hello.name
        return Welcome(epoch=self.ledger.epoch, units=[unit.info for unit in self._grants.units.values()])

    def _serve(self, client: str, request: Request, now: float) -> Reply | None:
        """The answer, or None if the request was parked, or is answered in parts. Raises QueueError."""
        check_names(request.body)
        parts = self._parts(request.body, now)
        if parts is not None and self.pages is not None:
            self.pages.begin(client, request.id, parts)
            return None
        match request.body:
            case Admit() | Lease() | Watch() | Lookup() | Find() | Fetch() | SegmentRequest() as body:
                reply = self._attempt(body, client, request.id, now)
                return reply if reply is not None else self._park(request.id, body, client, now)
            case Commit() as body:
                return self._commit(body, client, request.id, now)
            case Expire() | LoseSegments() | Life() | Consume() | Move() as body:
                raise Invalid(f"{type(body).__name__} is the controller's own")
            case Seal() as body:
                self._grants.seal(client, body.segments)
                return Ok()
            case RegisterUnit() | SegmentsMade() | Compacted() | Spilled() as body:
                return self._unit(body, client, now)
            case ListKeys() as body:
                return self.ledger.listing(body.partition)
            case Stats() as body:
                return self._stats(self.ledger.stats(now, orders=body.orders, details=body.details), now)
            case Hello() | Bye():
                return Ok()
            case OpenPartition(durability="journal") as body:
                self._check_durable(body.partition)
                return self._accept(body, now, client, request.id)
            case body:
                reply = self._accept(body, now, client, request.id)
                if isinstance(body, ClearPartition | ResetConsumption):
                    self._fetching.forget(body.partition)
                if isinstance(body, ClearPartition):
                    self._loads.ended([body.partition])
                if isinstance(body, AdoptPartitions):
                    self._loads.ended(body.names)
                    for name in body.names.values():
                        self._fetching.forget(name)
                return reply

    def _parts(self, body: Mutation | Query, now: float) -> Iterator[Listing | Changes | QueueStats] | None:
        """The answer in parts, if it is long enough for that."""
        match body:
            case ListKeys() if self.pages is not None:
                return self.ledger.listing_parts(body.partition, ROWS)
            case Stats() if self.pages is not None and len(self.ledger.partitions) > PARTITIONS:
                head = self._stats({}, now)
                pieces = self.ledger.stats_parts(now, PARTITIONS, orders=body.orders)
                return (msgspec.structs.replace(head, partitions=piece) for piece in pieces)
            case Watch() if self.pages is not None:
                return self.ledger.snapshot_parts(body.partition, body.since, GROUPS)
            case _:
                return None

    def _check_durable(self, partition: str) -> None:
        """Raises Invalid if this queue cannot hold a partition of durability "journal"."""
        units = self._grants.units.values()
        if self._journal.lasting and (not units or any(unit.spill_budget for unit in units)):
            return
        why = "its storage units have no directory on disk" if self._journal.lasting else "this queue keeps no journal"
        raise Invalid(
            f"partition {partition!r} cannot have durability='journal': {why}; start the queue with a directory, and "
            "with spill_dir on a local disk and a spill_budget_bytes above 0"
        )

    def _accept(self, mutation: Mutation, now: float, client: str = "", request: int = 0) -> Reply:
        """Apply a mutation and journal it. Raises QueueError, with nothing changed."""
        partition = getattr(mutation, "partition", None)
        durable = self.ledger.is_durable(partition)
        reply = self.ledger.apply(mutation, now, client, request)
        self._seq += 1
        if durable or self.ledger.is_durable(partition):
            self._unsynced.note(self._seq, partition)
        failpoint("controller.before_append")
        self._journal.append(Record(seq=self._seq, now=now, client=client, request=request, mutation=mutation))
        failpoint("controller.after_append")
        self._grants.free(self.ledger.segments.take_emptied())
        return reply

    def _attempt(self, body: Waiting, client: str, request: int, now: float, *, first: bool = False) -> Reply | None:
        """The answer, or None if it must wait. `first`: nobody who waits for the same came before."""
        match body:
            case Admit():
                return self._admit(body, client, request, now, first)
            case Lease():
                possible = self.ledger.is_open(body.partition) and self.ledger.can_lease(body)
                return self._accept(body, now, client, request) if possible else None
            case Watch():
                changed = self.ledger.sequence(body.partition) != body.since
                return self.ledger.changes(body.partition, body.since) if changed else None
            case Fetch():
                chosen = self._fetching.answer(self.ledger, body)
                return self._accept(chosen, now, client, request) if isinstance(chosen, Consume) else chosen
            case Lookup():
                return self._lookup(body)
            case Find():
                return self._find(body)
            case SegmentRequest():
                return self._segment(body, client, first)

    def _admit(self, m: Admit, client: str, request: int, now: float, first: bool) -> Reply | None:
        """Credit goes to who came first; what needs none is not held up."""
        self._grants.check(client, m.blocks, durable=self.ledger.is_durable(m.partition))
        possible = self.ledger.can_admit(m, checked=first)
        free = first or not self._parking.queue((ADMITS, m.partition)) or not self.ledger.needs_credit(m)
        return self._accept(m, now, client, request) if possible and free else None

    def _lookup(self, m: Lookup) -> Reply | None:
        """Right after a restart of the controller, units that have not registered yet are waited for."""
        return self._with_units(self.ledger.lookup(m.partition, m.keys, m.fields))

    def _find(self, m: Find) -> Reply | None:
        """With places, as `_lookup`."""
        rows = self.ledger.find(m)
        if rows.located is None:
            return rows
        located = self._with_units(rows.located)
        return msgspec.structs.replace(rows, located=located) if located is not None else None

    def _with_units(self, located: Located) -> Located | None:
        numbers = sorted({unit_of(block.segment) for block in located.blocks})
        if not all(number in self._grants.units for number in numbers):
            return None
        return msgspec.structs.replace(located, units=[self._grants.units[number].info for number in numbers])

    def _segment(self, m: SegmentRequest, client: str, first: bool) -> Reply | None:
        if m.nbytes < 1:
            raise Invalid(f"a segment of {m.nbytes} bytes")
        durable = self.ledger.is_durable(m.partition)
        if durable:
            self._check_durable(m.partition)
        most = self._grants.largest_budget(durable=durable)
        if self._grants.units and m.nbytes > most:
            raise Invalid(
                f"{m.nbytes} bytes at once exceed the budget{' on disk' * durable} of every storage unit (at most "
                f"{most}); put fewer rows at a time or raise the units' budget"
            )
        self._grants.seal(client, m.sealed)
        if not first and self._parking.anybody(self._waits_in(m)):
            return None
        segment = self._grants.grant(client, m.nbytes, durable=durable)
        return Granted(segments=[segment]) if segment is not None else None

    def _commit(self, m: Commit, client: str, request: int, now: float) -> Reply:
        """Segments are sealed even if the commit is refused: the writer has said that it has finished with them."""
        durable = self.ledger.is_durable(m.partition)
        try:
            self._grants.check(client, m.blocks, durable=durable)
            reply = self._accept(m, now, client, request)
            if m.partition.startswith(LOADING):
                self._loads.filled(m.partition, client)
        finally:
            self._grants.seal(client, m.sealed)
        assert isinstance(reply, Committed)
        if m.want <= 0 or durable or self._parking.anybody(SEGMENTS):
            return reply
        return msgspec.structs.replace(reply, grants=self._grants.hint(client, m.want))

    def _unit(self, m: RegisterUnit | SegmentsMade | Compacted | Spilled, client: str, now: float) -> Reply:
        if isinstance(m, SegmentsMade):
            self._grants.made(client, m, now)
            return Ok()
        if isinstance(m, Compacted):
            return self._moved(m, client, now)
        if isinstance(m, Spilled):
            self._grants.spilled(client, m, now)
            return Ok()
        failpoint("controller.before_register")
        self._grants.check_unit(client, m)
        lost = self._grants.missing(m)
        if lost:
            self._accept(LoseSegments(segments=lost), now)
        self.absences.back(m.info.unit)
        keep = self._grants.register(client, m)
        failpoint("controller.after_register")
        return Keep(segments=keep, after=self._orders)

    def _give_up(self, unit: int, now: float) -> None:
        """The unit has been away for too long: its rows are lost, and nobody writes to its segments any more."""
        self._grants.lose(unit)
        segments = [segment for segment in self.ledger.segments.use if unit_of(segment) == unit]
        if segments:
            self._accept(LoseSegments(segments=segments), now)

    def _clear_loads(self, partitions: list[str], now: float) -> None:
        """Nobody fills these any more."""
        for name in partitions:
            if name in self.ledger.partitions:
                with contextlib.suppress(QueueError):  # nobody admits groups there
                    self._accept(ClearPartition(name), now)

    def _moved(self, m: Compacted, client: str, now: float) -> Reply:
        """Survivors were copied: the rows lie there now, but those that were changed meanwhile."""
        move = self._compaction.done(client, m, now)
        try:
            if move is not None:
                self._accept(move, now)
        finally:
            if m.segment is not None:
                self._grants.free([m.segment.segment])
        return Ok()

    def _stats(self, partitions: dict[str, PartitionStats], now: float) -> QueueStats:
        writers = [parked for where in (SEGMENTS, DISK_SEGMENTS) for parked in self._parking.queue(where)]
        units = {unit.client for unit in self._grants.units.values()}
        return QueueStats(
            epoch=self.ledger.epoch,
            partitions=partitions,
            units=self._grants.stats(),
            clients=sum(client not in units for client in self._clients),
            requests=self.account.stats(),
            no_room=len(writers),
            first_without_room=self._ran_out_of_room(writers[0], now) if writers else "",
        )

    def _ran_out_of_room(self, parked: Parked, now: float) -> str:
        assert isinstance(parked.body, SegmentRequest)
        who = self._clients.get(parked.client, parked.client)
        return wording.segment(self._grants, parked.body, who, now - parked.since)

    # --- waiting ----------------------------------------------------------------------------------------------

    def _park(self, request: int, body: Waiting, client: str, now: float) -> Reply | None:
        """Let a request wait; the answer if it does not want to."""
        wait = UNIT_GRACE if isinstance(body, Lookup | Find) else body.wait
        deadline = now + min(max(0.0, wait), MAX_WAIT)
        parked = Parked(client, request, body, self._waits_in(body), now, deadline)
        if deadline <= now:
            return self._ran_out(parked, now)
        self._parking.park(parked)
        if isinstance(body, SegmentRequest):
            self._plan(now)
        return None

    def _wake(self, partition: str | None, now: float) -> None:
        """Serve those whose wait a change may have ended: in one partition, or (None) in all."""
        for name in list(self.ledger.partitions) if partition is None else [partition]:
            self._retry((ADMITS, name), now, in_order=True)
            self._retry((FETCHES, name), now)
            self._wake_leases(name, now)
            self._tell_watchers(name, now)
        if self.ledger.leases.idled:
            self.ledger.leases.idled = False
            for name in list(self.ledger.partitions):
                self._wake_leases(name, now)
                self._tell_watchers(name, now)
        touched = self.ledger.segments.take_thinned() | self._grants.take_sealed()
        if touched:
            self._compaction.consider(touched, now)
            self._grants.changed |= self._pressed()
        if self._grants.changed:
            self._retry(LOOKUPS, now)
            self._wake_writers(now)
            self._compaction.plan(now, pressed=self._pressed())
            self._plan(now)

    def _tell_watchers(self, partition: str, now: float) -> None:
        """Those who wait have been told everything up to the last time."""
        if not self._parking.anybody((WATCHES, partition)):
            self._told.pop(partition, None)
            return
        seq = self.ledger.sequence(partition) if partition in self.ledger.partitions else None
        if seq is None or self._told.get(partition) != seq:
            self._told[partition] = seq
            self._retry((WATCHES, partition), now)

    def _wake_writers(self, now: float) -> None:
        """In order of arrival per size; where one found nothing, the others of its size would not either."""
        usual = self._grants.smallest()
        for where in (SEGMENTS, DISK_SEGMENTS):
            dry: set[int] = set()
            for parked in self._parking.queue(where):
                assert isinstance(parked.body, SegmentRequest)
                size = max(parked.body.nbytes, usual)
                if size not in dry and not self._try(parked, now):
                    dry.add(size)

    def _plan(self, now: float) -> None:
        """Let units make what the segment requests that wait ask for, and writers give back what is missing."""
        missing = self._grants.plan(self._demands(SEGMENTS), now, durable=self._demands(DISK_SEGMENTS))
        self._recalling.plan(*missing, now)

    def _pressed(self) -> bool:
        """Whether a writer waits for a segment."""
        return self._parking.anybody(SEGMENTS) or self._parking.anybody(DISK_SEGMENTS)

    def _demands(self, where: Hashable) -> list[int]:
        """Bytes of the segment requests that wait there."""
        bodies = (parked.body for parked in self._parking.queue(where))
        return [body.nbytes for body in bodies if isinstance(body, SegmentRequest)]

    def _wake_leases(self, partition: str, now: float) -> None:
        """In order of arrival per task; one that names its groups holds up nobody."""
        dry: set[str] = set()
        for parked in self._parking.queue((LEASES, partition)):
            body = parked.body
            if not isinstance(body, Lease) or body.task in dry or self._try(parked, now) or body.uids:
                continue
            if not self.ledger.is_open(partition) or not self.ledger.offers(body):
                dry.add(body.task)

    def _retry(self, where: Hashable, now: float, *, in_order: bool = False) -> None:
        for parked in self._parking.queue(where):
            if not self._try(parked, now) and in_order:
                return

    def _try(self, parked: Parked, now: float) -> bool:
        """Whether a parked request could be answered; it then has been, and left."""
        try:
            parts = self._parts(parked.body, now) if isinstance(parked.body, Watch) else None
            if parts is not None and self.pages is not None:  # so much changed at once that a snapshot has to tell it
                self._parking.leave(parked)
                self.pages.begin(parked.client, parked.id, parts)
                return True
            reply = self._attempt(parked.body, parked.client, parked.id, now, first=True)
        except QueueError as error:
            reply = _failed(error)
        if reply is None:
            return False
        self._parking.leave(parked)
        self._answer(parked.client, parked.id, parked.body, reply)
        return True

    def _ran_out(self, parked: Parked, now: float) -> Reply:
        """The answer at the deadline. To a watcher, that nothing changed is an answer; to all others it is an error."""
        who, waited = self._clients.get(parked.client, parked.client), now - parked.since
        match parked.body:
            case Watch() as body:
                return self.ledger.changes(body.partition, body.since)
            case Lease() as body:
                return Failed(DeadlineExceeded.code, wording.lease(self.ledger, body, waited, now))
            case Admit() as body:
                return Failed(QueueFull.code, wording.admit(self.ledger, body, who, waited, now), RETRY_AFTER)
            case SegmentRequest():
                return Failed(QueueFull.code, self._ran_out_of_room(parked, now), RETRY_AFTER)
            case Fetch() as body:
                return Failed(DeadlineExceeded.code, self._fetching.wording(self.ledger, body, waited))
            case Lookup() | Find() as body:
                return Failed(Disconnected.code, wording.lookup(self._grants.stats(), body, who, waited))

    def _waits_in(self, body: Waiting) -> Hashable:
        """The queue in which a request waits."""
        match body:
            case Lookup() | Find():
                return LOOKUPS
            case SegmentRequest():
                return DISK_SEGMENTS if self.ledger.is_durable(body.partition) else SEGMENTS
            case _:
                return _WAITS[type(body)], body.partition

    def _sections(self) -> Iterator[list[Any]]:
        """The state, for a snapshot."""
        return sections(self.ledger, self._replies)

    # --- answers ----------------------------------------------------------------------------------------------

    def _known(self, client: str, request: Request) -> Reply | None:
        """The answer to a request that was answered before."""
        reply = self._replies.get(client, request.id)
        if reply is None:
            return None
        try:
            reply = again(self.ledger, request.body, reply)
        except QueueError as error:
            return _failed(error)
        if reply is None:
            self._replies.forget(client, request.id)
        return reply

    def _answer(self, client: str, request: int, body: Mutation | Query, reply: Reply) -> None:
        """Respond; what must not be done twice is remembered."""
        if not isinstance(body, REPEATABLE):
            self._replies.put(client, request, kept(reply))
        failpoint("controller.before_reply")
        self._respond(client, request, body, reply)

    def _respond(self, client: str, request: int, body: Mutation | Query, reply: Reply) -> None:
        if isinstance(reply, Failed):
            self.account.refused(type(body).__name__, reply.code)
        needed = self._unsynced.needed(getattr(body, "partition", None))
        self._tell(needed, client, Response(id=request, body=reply))

    def _tell(self, record: int, client: str, response: Response) -> None:
        """Once that record is on the disk; 0: now."""
        if record:
            self.hold(record, client, response)
        else:
            self._send(client, response)

    def _push(self, client: str, push: Push) -> None:
        self._orders += 1
        push = msgspec.structs.replace(push, order=self._orders)
        self._tell(self._unsynced.needed(), client, Response(id=0, body=push))


def _failed(error: QueueError) -> Failed:
    return Failed(error.code, str(error), error.retry_after if isinstance(error, QueueFull) else 0.0)
