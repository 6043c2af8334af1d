"""Everything that crosses a socket of the control plane or stands in the journal.

Each struct is tagged, versioned by `VERSION`, and refuses unknown fields. A `Mutation` changes the ledger: the journal
is the sequence of accepted mutations, so replaying it gives the ledger again. Bulk bytes never travel here:
they lie in segments, and a message names them by `Block`.
"""

# pyright: reportGeneralTypeIssues=false
# (pyright asks each subclass to repeat `frozen=True`, which msgspec inherits.)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

VERSION = 1

Tag = dict[str, Any]
"""Small per-row metadata of plain scalars and strings (`status`, `score`, `response_len`, ...)."""

if TYPE_CHECKING:
    PackedTag = Tag | msgspec.Raw
else:
    PackedTag = msgspec.Raw
"""A tag that is decoded by nobody but who needs to look into it: the controller keeps the bytes."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all structs here. None can be part of a cycle, so the garbage collector need not look at them."""


# --- values ---------------------------------------------------------------------------------------------------


class Token(Message, array_like=True):
    """A fencing token: strictly increasing within one ledger, `epoch` being the life of the controller."""

    epoch: int
    counter: int


class Block(Message, array_like=True):
    """One column of one put: `rows` values that lie packed in one segment.

    Layout at `offset`, 64-byte aligned: for kinds "ragged" and "object" first int64 offsets[rows + 1] counted in
    elements of the values that follow (64-byte aligned again); then the values. For "dense" only the values.
    `shape` is the shape of a row (dense) or of one element of a row's first dimension (ragged, may be empty).
    An "object" column is ragged uint8: each row is one msgpack value (storage/objects.py).
    `digest` is xxh3-64 over all `nbytes`.
    """

    field: str
    segment: int
    offset: int
    nbytes: int
    rows: int
    kind: Literal["dense", "ragged", "object"]
    dtype: str  # numpy's array-protocol string: "<i8", "<f4", "|u1", ...; bfloat16 is "bfloat16"
    shape: tuple[int, ...]
    digest: int


class UnitInfo(Message):
    """Where a storage unit keeps its segments and answers remote reads. Segment file: f"{segment:016x}.seg"."""

    unit: int
    directory: str
    endpoint: str
    nonce: str  # a client that can read `directory/nonce` with this content is on the same node
    spill: str = ""  # the directory of the segments that are on disk; "" if there is none
    incarnation: int = 0  # of the unit; its segments have it in their ids


class Segment(Message, array_like=True):
    """A segment granted to one writer, which bump-allocates in it."""

    segment: int
    unit: int
    nbytes: int


class GroupSpec(Message):
    """A prompt group at admission: n sessions wanted, ready once at least `min_sessions` of them succeeded."""

    uid: str
    n: int
    order: int  # dispatch order; oldest first wherever a choice is made
    min_sessions: int = 0  # 0 means n
    tag: Tag = {}


class SessionClose(Message):
    """The end of one session: its rows (committed in the same message or before), or why it failed."""

    uid: str
    session: int
    rows: list[str]
    failed: str = ""


class TaskSpec(Message):
    """A consumer of groups.

    stage "prompt": leases admitted groups whose sessions are not all closed (the generators).
    stage "rows": leases groups that are ready and whose rows all have `fields`; its ack ends the group.
    bind "clock": the lease expires `ttl` seconds after grant or renewal, by the controller's monotonic clock.
    bind "incarnation": the lease lasts until the trainer's next incarnation (OpenTrainer).
    """

    name: str
    stage: Literal["prompt", "rows"]
    bind: Literal["clock", "incarnation"] = "clock"
    ttl: float = 15.0
    fields: list[str] = []
    max_deliver: int = 3


GroupState = Literal["pending", "generating", "ready", "training", "trained", "dropped", "dead"]


class Row(Message):
    key: str
    tag: Tag


class Group(Message):
    """A group as readers see it. `rows` are listed from state "ready" on; `sessions` are the closed ones."""

    uid: str
    state: GroupState
    n: int
    order: int
    tag: Tag
    attempt: int = 0
    rows: list[Row] = []
    sessions: list[int] = []
    reason: str = ""


# --- mutations ------------------------------------------------------------------------------------------------


class OpenPartition(Message, tag=True):
    """Declare a partition, its tasks and its credit; again with the same tasks only changes the credit.

    durability "spill": its rows go to disk when memory is full. "memory": they never do, and writers wait instead.
    "journal": bytes and record of whatever is done there from now on are on the disk before the answer.
    """

    partition: str
    tasks: list[TaskSpec] = []
    max_groups: int = 0  # outstanding (not terminal) groups; 0 = no bound
    max_bytes: int = 0  # live bytes; 0 = no bound
    durability: Literal["", "memory", "spill", "journal"] = ""  # "": as it is, at first "spill"


class Admit(Message, tag=True):
    """Take credit for prompt groups and store their prompt columns (row i = group i, key = uid).

    Idempotent by uid. Waits for credit until `wait` seconds have passed, then Failed(queue_full).
    """

    partition: str
    groups: list[GroupSpec]
    blocks: list[Block] = []
    wait: float = 0.0


class Commit(Message, tag=True):
    """Rows, tags and session ends appear together or not at all. Upsert per (key, field); tags merge."""

    partition: str
    keys: list[str]
    blocks: list[Block] = []
    tags: list[PackedTag] | None = None
    token: Token | None = None  # checked when given: Fenced if the lease is no longer held
    closes: list[SessionClose] = []
    sealed: list[int] = []  # segments that this writer has finished with
    want: int = 0  # bytes of further segments wanted in the reply
    rows: bytes = b""  # int64 serials the keys must have: RowsGone if a key now names another row, or none


class Clear(Message, tag=True):
    """Remove plain rows, by key and (`rows`: int64 serials) by serial; those that are gone are no error."""

    partition: str
    keys: list[str]
    rows: bytes = b""


class ClearPartition(Message, tag=True):
    """Remove all plain rows of a partition and what its tasks consumed; without groups and tasks, itself too."""

    partition: str


class AdoptPartitions(Message, tag=True):
    """The end of a load: partitions that were filled under other names get their own, all at once; those that had them
    go. `names`: by the name they were filled under. `consumed`: by that name and task, serials of rows. `rows`: by that
    name, how many were put there; Conflict if there are others now."""

    names: dict[str, str]
    consumed: dict[str, dict[str, bytes]] = {}
    rows: dict[str, int] = {}


class Consume(Message, tag=True):
    """Written by the controller when it serves a Fetch: `rows` (int64 serials, in order) are the answer, `taken` are
    consumed by the task, `remember` are answers to fetches still to come, by the sampler's key. So a replay depends on
    no sampler. Refused from clients."""

    partition: str
    task: str
    fields: list[str]
    rows: bytes
    taken: bytes
    remember: dict[str, bytes] = {}


class ResetConsumption(Message, tag=True):
    """The task (None: every task) has consumed nothing in this partition."""

    partition: str
    task: str | None = None


class Lease(Message, tag=True):
    """Up to `groups` whole groups, oldest order first (fewer where their tags are large), or exactly `uids` (all or
    NotFound; Invalid if one answer cannot tell them). Waits for at least one, and for the partition to be opened.
    `incarnation`: of the trainer that asks (Restored); Fenced if a newer one has come, also while this waits. 0: not
    checked."""

    partition: str
    task: str
    holder: str
    groups: int = 0
    uids: list[str] = []
    wait: float = 0.0
    incarnation: int = 0


class Renew(Message, tag=True):
    partition: str
    token: Token


class Ack(Message, tag=True):
    """The groups are done. For a "rows" task they are trained in `step`, and become final with CommitStep(>= step)."""

    partition: str
    token: Token
    uids: list[str]
    step: int = 0


class Nack(Message, tag=True):
    """Give groups back. `poison` counts toward max_deliver and then the dead letters; lost infrastructure does not."""

    partition: str
    token: Token
    uids: list[str]
    reason: str = ""
    poison: bool = False


class Drop(Message, tag=True):
    """End groups as dropped (stale | filtered | failed ...), whatever state they are in; leases on them are fenced."""

    partition: str
    uids: list[str]
    reason: str


class Replay(Message, tag=True):
    """Dead groups begin again, all or none: pending under a new attempt, with the prompts they were admitted with and
    without the deaths that were counted. They hold credit again, also beyond max_groups."""

    partition: str
    uids: list[str]


class ReleaseHolder(Message, tag=True):
    """The leases of `holder` end, its groups go back under a new attempt. If it `died`, they are suspected: a death
    while it held one group alone counts toward max_deliver, others make groups be leased alone next time."""

    holder: str
    died: bool = True


class Expire(Message, tag=True):
    """Written by the controller's own timer. Refused from clients, as are LoseSegments, Move and Life."""


class LoseSegments(Message, tag=True):
    """Written by the controller: the unit that made these segments no longer has them.

    Rows that lie in them are gone; their groups are issued again. A group whose prompt is gone stays pending with
    reason "prompt lost" until the same uid is admitted again.
    """

    segments: list[int]


class Moved(Message, array_like=True):
    """Rows (int64 serials) that lay in these puts of the ledger, at these rows in them (both int32), and lie in
    `blocks` now, in this order."""

    rows: bytes
    puts: bytes
    index: bytes
    blocks: list[Block]


class Move(Message, tag=True):
    """Written by the controller: survivors of `segments` were copied elsewhere. Refused from clients."""

    partition: str
    segments: list[int]
    moved: list[Moved]


class Life(Message, tag=True):
    """Written by the controller when it starts: the first record of a journal, and of each later life in it.

    Tokens granted from here on carry `epoch`; clock leases get a full ttl from here.
    """

    format: int
    run: str
    epoch: int


class OpenTrainer(Message, tag=True):
    """A new incarnation of the trainer, restored to `step` (0: from scratch): fences the older one.

    Groups leased by "incarnation" tasks or acked after `step` are ready again; groups with a row whose
    tag `max_global_steps` exceeds `version` (that of the weights after `step`; None: as many as steps) lose their rows
    and are issued again; clock leases are released. What stays loses the fields `columns`: what the older one's ranks
    computed.

    `repeats`: training from `step` on will do again what it did before (deterministic mode). Groups that are whole are
    ready, whatever their rows' tags say, and all others are forgotten: as if they had never been admitted.
    """

    partition: str
    step: int
    repeats: bool = False
    version: int | None = None
    columns: list[str] = []


class CommitStep(Message, tag=True):
    """The checkpoint of `step` is on disk: what was acked up to it is final and its bytes may go."""

    partition: str
    step: int


Mutation = (
    OpenPartition
    | Admit
    | Commit
    | Clear
    | ClearPartition
    | AdoptPartitions
    | Consume
    | ResetConsumption
    | Lease
    | Renew
    | Ack
    | Nack
    | Drop
    | Replay
    | ReleaseHolder
    | Expire
    | OpenTrainer
    | CommitStep
    | LoseSegments
    | Move
    | Life
)


# --- the rest of the requests ----------------------------------------------------------------------------------


class Hello(Message, tag=True):
    """First message of a client. `pid` lets a controller on the same host notice its death at once."""

    version: int
    run: str
    key: str
    name: str
    pid: int = 0
    host: str = ""


class Bye(Message, tag=True):
    pass


class Lookup(Message, tag=True):
    """Where the rows lie. fields None = all fields that every row has. Missing keys are left out of the answer."""

    partition: str
    keys: list[str]
    fields: list[str] | None = None


class Find(Message, tag=True):
    """Rows of a partition with their serials: those of `keys` (missing ones are left out), those of `rows` (serials;
    RowsGone if one is gone), or up to `count` after serial `after` (0: all; fewer where tags are large, see Rows.more).
    `fields` None = all the partition has; `task`: tell what it consumed; `located`: tell where the fields lie.
    Answer: Rows."""

    partition: str
    keys: list[str] | None = None
    rows: bytes | None = None
    fields: list[str] | None = None
    task: str = ""
    after: int = -1
    count: int = 0
    located: bool = False


class Fetch(Message, tag=True):
    """`count` rows that have all `fields` and that `task` has not consumed, chosen by the controller's sampler (which
    gets `sampling`); they are consumed at once. Waits for them; with `drained` the answer is no rows once the task has
    consumed all there are, with `poll` at once if the controller is set to polling. Answer: Rows."""

    partition: str
    task: str
    fields: list[str]
    count: int
    sampling: dict[str, Any] = {}
    wait: float = 0.0
    drained: bool = False
    poll: bool = False


class ListKeys(Message, tag=True):
    partition: str | None = None


class Watch(Message, tag=True):
    """Changes of groups after sequence number `since`; waits for at least one. since -1 = a snapshot at once."""

    partition: str
    since: int
    wait: float = 0.0


class Stats(Message, tag=True):
    orders: bool = False  # also which groups are outstanding; that takes time proportional to their number
    details: bool = False  # also who holds leases, and how many rows have which field; proportional to leases and rows


class SegmentRequest(Message, tag=True):
    """A segment with at least `nbytes` to write to, which may have to be waited for: one for rows of `partition`."""

    nbytes: int
    wait: float = 0.0
    sealed: list[int] = []  # segments that this writer has finished with
    partition: str = ""


class Seal(Message, tag=True):
    """This writer has finished with segments, and has nothing to commit with which it could say so: they held rows of
    `partition`."""

    segments: list[int]
    partition: str = ""


class RegisterUnit(Message, tag=True):
    """A unit starts, or the controller came back: what it holds. Answer: Keep."""

    info: UnitInfo
    segment_bytes: int
    budget: int
    inventory: list[tuple[int, int]]  # (segment, nbytes)
    spilled: list[tuple[int, int]] = []  # the same, of those on disk
    spill_budget: int = 0  # 0: nothing goes to disk


class SegmentsMade(Message, tag=True):
    """Answer of a unit to MakeSegments."""

    unit: int
    segments: list[Segment]
    error: str = ""


class Compacted(Message, tag=True):
    """Answer of a unit to Compact: the one segment made, and the blocks of each batch."""

    unit: int
    segment: Segment | None
    blocks: list[list[Block]]
    error: str = ""


class Spilled(Message, tag=True):
    """Answer of a unit to SpillSegments: those that are on disk now. An error is why others are not."""

    unit: int
    segments: list[int]
    error: str = ""


Query = (
    Hello
    | Bye
    | Lookup
    | Find
    | Fetch
    | ListKeys
    | Watch
    | Stats
    | SegmentRequest
    | Seal
    | RegisterUnit
    | SegmentsMade
    | Compacted
    | Spilled
)


# --- replies ----------------------------------------------------------------------------------------------------


class Ok(Message, tag=True):
    pass


class Failed(Message, tag=True):
    code: str
    message: str
    retry_after: float = 0.0


class Welcome(Message, tag=True):
    epoch: int
    units: list[UnitInfo]


class Committed(Message, tag=True):
    fields: list[str]  # all fields the rows have in common, sorted
    tags: list[Tag] | None = None  # merged, in the order of the keys; None: just those that were sent
    grants: list[Segment] = []


class FieldPlace(Message, array_like=True):
    """Where one field of the rows asked lies: int32 little-endian arrays, one entry a row."""

    field: str
    block: bytes  # index into Located.blocks
    index: bytes  # row within the block


class Located(Message, tag=True):
    keys: list[str]
    tags: list[Tag]
    blocks: list[Block]
    places: list[FieldPlace]
    units: list[UnitInfo] = []


class FieldSchema(Message, array_like=True):
    """What the first row that has it says of a field; see Block."""

    field: str
    kind: Literal["dense", "ragged", "object"]
    dtype: str
    shape: tuple[int, ...]


class Rows(Message, tag=True):
    """Rows in the order asked, else in that of their serials. `have`: per field of `schema`, one byte a row."""

    rows: bytes = b""  # int64 little-endian: serials, unique over all partitions and lives, never used again
    keys: list[str] = []
    tags: list[Tag] = []
    schema: list[FieldSchema] = []
    have: list[bytes] = []
    consumed: bytes = b""  # one byte a row
    more: bool = False  # of a page: whether there may be rows after it
    located: Located | None = None  # of the rows and fields above; block -1 where a row has no such field


class Leased(Message, tag=True):
    """`token` covers all groups of this grant. Prompt-stage groups tell by `sessions` what is already closed."""

    token: Token
    groups: list[Group]
    ttl: float = 0.0  # 0: bound to the incarnation


class Listing(Message, tag=True):
    partitions: dict[str, dict[str, Tag]]


class Changes(Message, tag=True):
    """`seq` is the number to ask with next. `snapshot` means the groups are all live ones, not changes (a gap)."""

    seq: int
    groups: list[Group]
    depth: dict[str, int]
    snapshot: bool = False


class Part(Message, tag=True):
    """Part number `index` of a long answer; without a body, it is the end. A new number 0 begins the answer anew."""

    index: int
    body: Listing | Changes | QueueStats | None = None


class HolderStats(Message):
    """What one holder has leased for one task: groups, and how long the oldest of these leases has been held."""

    task: str
    holder: str
    groups: int
    oldest: float


class PartitionStats(Message):
    depth: dict[str, int]  # groups by state; terminal states count since the start
    rows: int
    nbytes: int  # live bytes
    next_order: int  # one more than the highest order ever admitted
    dropped: dict[str, int]  # by reason
    redelivered: int
    dead: dict[str, str]  # uid -> reason
    oldest_age: dict[str, float]  # by state, seconds
    max_groups: int = 0
    outstanding: list[int] = []  # orders of the groups that are not terminal, if asked for
    consumers: list[str] = []  # tasks that consumed rows (Fetch)
    leases: list[HolderStats] = []  # with details
    fields: dict[str, int] = {}  # rows that have it, with details


class UnitStats(Message):
    unit: int
    alive: bool
    used: int
    budget: int
    segments: int
    spilled: int = 0  # bytes on disk, and how many there may be
    spill_budget: int = 0


class RequestStats(Message):
    """Requests of one kind since this life of the controller began (controller/account.py)."""

    counts: list[int] = []  # by class of service time
    seconds: float = 0.0  # for which they kept the controller busy, together
    refused: dict[str, int] = {}  # by code of the error


class QueueStats(Message, tag=True):
    """`epoch` counts the lives of the controller on its directory, from 1. `requests`: by the name of their message.
    `no_room`: writers that wait for room to write to, and what the first of them would be told if it waited no longer.
    """

    epoch: int
    partitions: dict[str, PartitionStats]
    units: list[UnitStats]
    clients: int
    requests: dict[str, RequestStats] = {}
    no_room: int = 0
    first_without_room: str = ""


class Granted(Message, tag=True):
    segments: list[Segment]


class Restored(Message, tag=True):
    """Answer to OpenTrainer."""

    incarnation: int
    reissued: list[str]
    ready: list[str]
    next_order: int


class Keep(Message, tag=True):
    """Answer to RegisterUnit: segments with live rows; the unit unlinks the rest of its inventory. Orders up to `after`
    are void: they were pushed before, on what the unit held then."""

    segments: list[int]
    after: int = 0


Reply = (
    Ok
    | Failed
    | Welcome
    | Committed
    | Located
    | Rows
    | Leased
    | Listing
    | Changes
    | Part
    | QueueStats
    | Granted
    | Restored
    | Keep
)


# --- pushed from the controller to a unit, or (GiveBack) to a writer ---------------------------------------------


class MakeSegments(Message, tag=True):
    """Answer: SegmentsMade. `order` counts the pushes of one life of the controller, in this and those below."""

    count: int
    nbytes: int
    order: int = 0
    durable: bool = False  # on disk (storage/spill.py)


class FreeSegments(Message, tag=True):
    segments: list[int]
    order: int = 0


class Survivors(Message, array_like=True):
    """Rows that are to be one put: from each source its blocks, and the rows (int32) in them. The blocks of all sources
    are of the same fields, kinds, dtypes and shapes."""

    sources: list[tuple[list[Block], bytes]]


class Compact(Message, tag=True):
    """Copy survivors of sealed segments to one new segment, in memory or on disk. Answer: Compacted."""

    batches: list[Survivors]
    spilled: bool = False
    order: int = 0


class SpillSegments(Message, tag=True):
    """Copy sealed segments to disk, up to the byte given, and free their memory. Answer: Spilled."""

    segments: list[tuple[int, int]]
    order: int = 0


class GiveBack(Message, tag=True):
    """Others wait for memory: finish with these segments, and say so with Seal or what is sent next, each as soon as
    nothing is being written to it. Those that the client does not know are ignored."""

    segments: list[int]
    order: int = 0


Push = MakeSegments | FreeSegments | Compact | SpillSegments | GiveBack


class Request(Message, array_like=True):
    """One request frame. `id` is unique per client and increasing, and the same on a retry."""

    id: int
    body: Mutation | Query


class Response(Message, array_like=True):
    """One frame from the controller. `id` 0 is a Push, or Failed("closed") as the queue ends."""

    id: int
    body: Reply | Push


class Record(Message, array_like=True):
    """One journal entry: the mutation, when it was applied (controller's monotonic clock) and for which request."""

    seq: int
    now: float
    client: str
    request: int
    mutation: Mutation
