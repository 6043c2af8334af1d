"""Damaged, hostile and lucky bytes at every decoder: its own errors and nothing else, no memory for claims, no end of a
server.

Seeded: a failure prints its seed, and `FUZZ_FIRST=<seed>` begins there. `make chaos` runs many more.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.parking import Replies
from transfer_queue.controller.recovery import restore, sections
from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.ledger import Ledger, dump
from transfer_queue.net import messages as m
from transfer_queue.net.bulk import BulkClient, BulkDone, BulkOpen, BulkOpened, BulkRead, BulkServer, BulkWrite
from transfer_queue.net.codec import Malformed, decode_request, decode_response, encode
from transfer_queue.net.stream import Stream
from transfer_queue.storage.columns import Column, read_block
from transfer_queue.storage.gather import gather
from transfer_queue.storage.journal import Journal, MemoryJournal, read_journals
from transfer_queue.storage.objects import decode_object, decode_objects, encode_object
from transfer_queue.storage.segments import segment_id
from transfer_queue.storage.snapshot import read_snapshot, write_snapshot
from transfer_queue.storage.unit_files import UnitFiles

FIRST = int(os.environ.get("FUZZ_FIRST", "0"))

LARGE = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]

ODD = [None, True, 0.5, -1.5, float("nan"), float("inf"), "", "\0", "a" * 300, "é", b"", b"\xff" * 9, [], {}, [[]]]

SMALL, MANY = 2000, 100_000


def runs(test: Callable[[random.Random], Any], count: int) -> None:
    """Call a test with one generator per seed."""
    for seed in range(FIRST, FIRST + count):
        try:
            test(random.Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: FUZZ_FIRST={seed} begins there")
            raise


def spoilt(rng: random.Random, data: bytes) -> bytes:
    """Other bytes: bits flipped, lengths that lie, pieces gone, doubled or inserted."""
    out = bytearray(data)
    for _ in range(1 + int(rng.expovariate(0.7))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice([0, 0x7F, 0x80, 0xC1, 0xC6, 0xC9, 0xDB, 0xDD, 0xDF, 0xFF])
            case 2:
                out[at : at + 4] = rng.choice(LARGE[:6]).to_bytes(8, "big", signed=True)[-4:]
            case 3:
                del out[at : at + rng.randrange(1, 20)]
            case 4:
                out[at:at] = out[at : at + rng.randrange(1, 20)]
            case 5:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                out[at:at] = rng.choice([b"\x91", b"\x81\xa0"]) * rng.randrange(1, 2000)
    return bytes(out)


def bent(rng: random.Random, value: Any, *, large: bool = True) -> Any:
    """A message of the right form with a wrong value in it, somewhere; `large`: also one that stands for gigabytes."""
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        changed = [*value[:at], bent(rng, value[at], large=large), *value[at + 1 :]]
        return changed if rng.random() < 0.9 else [*changed, *changed[at : at + 1]]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return value | {key: bent(rng, value[key], large=large)}
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        return rng.choice([*(LARGE if large else ()), value + 1, value - 1])
    if isinstance(value, bytes) and rng.random() < 0.7:
        return spoilt(rng, value)[:200] if large else value[: rng.randrange(len(value) + 1)]
    return rng.choice([*ODD, *LARGE] if large else ODD)


# --- messages -------------------------------------------------------------------------------------------------------

SEGMENT = segment_id(0, 1, 1)
BLOCK = m.Block("x", SEGMENT, 0, 8, 1, "dense", "<i8", (), 0)
ROW = m.Block("x", SEGMENT, 64, 72, 1, "ragged", "<i8", (), 0)
TASKS = [m.TaskSpec("generate", "prompt", ttl=15.0), m.TaskSpec("train", "rows", "incarnation", fields=["x"])]
INFO = m.UnitInfo(0, "/u0", "ipc:///u0", "n")
TOKEN = m.Token(1, 1)
CLOSES = [m.SessionClose("u0", 0, ["u0_0_0"])]

BODIES = [
    m.OpenPartition("p", TASKS, 4, 1000), m.Admit("p", [m.GroupSpec("u0", 2, 0, 1, {"a": 1})], [BLOCK], 0.5),
    m.Commit("p", ["u0_0_0"], [ROW], [msgspec.Raw(b"\x81\xa1a\x01")], TOKEN, CLOSES, [SEGMENT], 8),
    m.Commit("p", ["k"], [], [msgspec.Raw(b"\x80")], rows=bytes(8)), m.Commit("p", ["k", "l"], [BLOCK]),
    m.Clear("p", ["k"], (1).to_bytes(8, "little")), m.ClearPartition("q"), m.ResetConsumption("p", "t"),
    m.AdoptPartitions({"\0load.0123abcd.0": "q"}, {"\0load.0123abcd.0": {"t": bytes(8)}}),
    m.Lease("p", "generate", "w", 2, [], 0.2), m.Lease("p", "train", "w", 0, ["u0"], 0.2, 1),
    m.Renew("p", TOKEN), m.Ack("p", TOKEN, ["u0"], 1), m.Nack("p", TOKEN, ["u0"], "no", True),
    m.Drop("p", ["u0"], "old"), m.Replay("p", ["u0"]), m.ReleaseHolder("w"), m.OpenTrainer("p", 0),
    m.CommitStep("p", 1), m.LoseSegments([SEGMENT]),
    m.Consume("p", "t", ["x"], bytes(8), bytes(8)), m.Lookup("p", ["k"], ["x"]), m.Find("p", rows=bytes(8)),
    m.Find("p", ["k"], None, ["x"], "t", -1, 3, True), m.Fetch("p", "t", ["x"], 2, {"a": 1}, 0.1, True),
    m.ListKeys("p"), m.ListKeys(), m.Watch("p", -1, 0.1), m.Stats(), m.SegmentRequest(100, 0.5, [SEGMENT]),
    m.RegisterUnit(INFO, 1 << 16, 1 << 20, [(SEGMENT, 1 << 16)]),
    m.SegmentsMade(0, [m.Segment(SEGMENT + 1, 0, 1 << 16)]), m.Compacted(0, None, [], "why"), m.Life(1, "r", 1),
    m.Expire(), m.Seal([SEGMENT], "p"),
]  # fmt: skip

REPLIES = [
    m.Ok(), m.Failed("invalid", "why", 1.0), m.Welcome(1, [INFO]),
    m.Committed(["x"], [{"a": 1}], [m.Segment(1, 0, 64)]),
    m.Located(["k"], [{}], [BLOCK], [m.FieldPlace("x", bytes(4), bytes(4))], [INFO]), m.Listing({"p": {"k": {"a": 1}}}),
    m.Leased(TOKEN, [m.Group("u", "ready", 1, 0, {}, 0, [m.Row("u_0_0", {})], [0])], 3.0),
    m.Changes(1, [], {"ready": 1}),
    m.Part(0, m.Listing({})), m.Granted([]), m.Restored(1, [], [], 0), m.Keep([1], 3), m.MakeSegments(1, 64, 1),
    m.FreeSegments([1]), m.Compact([m.Survivors([([BLOCK], bytes(4))])]), m.GiveBack([1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("decode", "corpus"),
    [
        (decode_request, [encode(m.Request(7, body)) for body in BODIES]),
        (decode_response, [encode(m.Response(7, body)) for body in REPLIES]),
    ],
    ids=["requests", "responses"],
)
def test_a_frame_is_a_message_or_malformed(decode: Callable[[bytes], Any], corpus: list[bytes]) -> None:
    for data in corpus:
        decode(data)

    def once(rng: random.Random) -> None:
        data = rng.choice(corpus)
        data = spoilt(rng, data) if rng.random() < 0.7 else packed(bent(rng, msgspec.msgpack.decode(data)))
        try:
            decode(data)
        except Malformed:
            return

    runs(once, SMALL)


def packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError):
        return b""


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"], ids=["list", "dict", "bytes", "str"])
def test_a_claimed_length_takes_no_memory(kind: bytes) -> None:
    head = kind + b"\xff" * 4
    frames = [
        b"\x92\x07" + head,
        b"\x92\x07\x82\xa4type\xa6Commit\xa4keys" + head,
        head,
        b"\x92\x07\x81\xa4keys" + head,
    ]
    for decode, errors in ((decode_request, Malformed), (decode_response, Malformed), (decode_object, Corrupt)):
        for frame in frames:
            with limited(1 << 20), pytest.raises(errors):
                decode(frame)


class limited:
    """Fails if more than `nbytes` of Python's memory are taken at once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *_: object) -> None:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < self.nbytes, f"{peak} bytes were taken"


# --- a controller ---------------------------------------------------------------------------------------------------


class Served:
    """A core with a unit that makes segments, and some groups and rows."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, m.Response]] = []
        self.now = 0.0
        self.ids = 0
        self.journal = MemoryJournal()
        self.core = ControllerCore(Ledger(), send=self.send, journal=self.journal, segment_bytes=1 << 16)
        for name in ("unit", "w", "x"):
            self.ask(name, m.Hello(m.VERSION, "", "", name))
        self.ask("unit", m.RegisterUnit(INFO, 1 << 16, 64 << 16, []))
        self.ask("unit", m.SegmentsMade(0, [m.Segment(SEGMENT + i, 0, 1 << 16) for i in range(2)]))
        self.ask("w", m.SegmentRequest(100))
        self.ask("w", m.OpenPartition("p", TASKS))
        self.ask("w", m.Admit("p", [m.GroupSpec(f"u{i}", 1, i) for i in range(4)]))
        self.ask("w", m.Commit("p", ["k", "l"]))
        self.ask("w", m.Lease("p", "generate", "w", 1))

    def send(self, client: str, response: m.Response) -> None:
        self.answers.append((client, response))

    def ask(self, client: str, body: Any) -> None:
        self.ids += 1
        self.now += 0.01
        self.core.handle(client, m.Request(self.ids, body), self.now)


def requests(rng: random.Random, count: int) -> Iterator[Any]:
    """Right ones and bent ones, as a client that has the key could send them."""
    while count:
        frame = encode(m.Request(1, rng.choice(BODIES)))
        for _ in range(rng.choice([0, 1, 1, 2])):
            frame = packed(bent(rng, msgspec.msgpack.decode(frame)))
        try:
            yield decode_request(frame).body
        except Malformed:
            continue
        count -= 1


def serve_bent_requests(rng: random.Random) -> None:
    served = Served()
    for body in requests(rng, 40):
        served.ask(rng.choice(["w", "w", "x", "unit"]), body)
        if rng.random() < 0.2:
            served.now += rng.choice([0.1, 20.0])
            served.core.tick(served.now)
        if isinstance(body, m.Bye):
            break
    for client, response in served.answers:
        decode_response(encode(response))
        assert not isinstance(response.body, m.Failed) or response.body.message, client
    again = Ledger()
    for record in served.journal.records:
        line = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=m.Record)
        again.apply(line.mutation, line.now, line.client, line.request)
    assert again.fingerprint() == served.core.ledger.fingerprint(), "the journal gives another ledger"
    copy = restore(sections(served.core.ledger, served.core._replies))
    assert copy.ledger.fingerprint() == again.fingerprint(), "a snapshot gives another ledger"


def test_nothing_that_a_client_asks_ends_the_controller_or_cannot_be_replayed() -> None:
    runs(serve_bent_requests, 60)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Served().core.ledger


def test_a_damaged_journal_is_corrupt_or_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for seq, record in enumerate([m.Record(1, 0.0, "", 0, m.Life(1, "r", 1)), *Served().journal.records], 1):
        journal.append(msgspec.structs.replace(record, seq=seq))
    journal.close()
    whole = path.read_bytes()
    count = len(list(read_journals(path)))

    def once(rng: random.Random) -> None:
        path.write_bytes(spoilt(rng, whole))
        try:
            assert len(list(read_journals(path, run="r"))) <= count
        except Corrupt as error:
            assert str(path) in str(error)  # noqa: PT017

    runs(once, SMALL // 2)


def test_a_damaged_snapshot_is_corrupt(tmp_path: Path, ledger: Ledger) -> None:
    path = write_snapshot(tmp_path / "journal", "r", 5, dump(ledger))
    whole = path.read_bytes()

    def once(rng: random.Random) -> None:
        data = spoilt(rng, whole)
        path.write_bytes(data)
        try:
            list(read_snapshot(path, 5, "r"))
            assert data == whole
        except Corrupt as error:
            assert str(path) in str(error)  # noqa: PT017

    runs(once, SMALL // 2)


def test_a_snapshot_with_right_digests_and_wrong_values_is_refused_by_known_errors(ledger: Ledger) -> None:
    """Those that recovery takes for damage, and then goes on from an older one."""
    good = msgspec.msgpack.decode(msgspec.msgpack.encode(list(sections(ledger, Replies()))))

    def once(rng: random.Random) -> None:
        try:
            restore(bent(rng, good, large=False))
        except (Corrupt, ValueError, TypeError, KeyError, IndexError):
            return

    runs(once, SMALL)


# --- stored values --------------------------------------------------------------------------------------------------

OBJECTS = [
    {"a": [1, 2.5, None, True, "x" * 40, b"y" * 40]}, (1, ("a", -(2**80))), np.arange(12, dtype="<i4").reshape(3, 4),
    np.float32(2.5), np.array("2026-01-01", "M8[D]"), np.array(["ab", "c"]), torch.arange(6).reshape(2, 3),
    torch.zeros(0, 5), [{"t": torch.ones(2, dtype=torch.bfloat16)}],
]  # fmt: skip


def test_damaged_objects_are_corrupt_or_another_object_of_no_more_memory() -> None:
    corpus = [encode_object(value) for value in OBJECTS]

    def once(rng: random.Random) -> None:
        data = spoilt(rng, rng.choice(corpus))
        try:
            decode_object(data)
        except Corrupt:
            return

    with limited(16 << 20):
        runs(once, SMALL * 2)

    def several(rng: random.Random) -> None:
        column = Column.objects([rng.choice(OBJECTS) for _ in range(5)])
        data = spoilt(rng, column.values.tobytes())[: len(column.values)].ljust(len(column.values), b"\0")
        assert column.offsets is not None
        try:
            decode_objects(np.frombuffer(data, np.uint8), column.offsets)
        except Corrupt:
            return

    runs(several, SMALL // 4)


class _Head(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@pytest.mark.parametrize("dtype", ["float32", "<f4", "|S1000000000", "<U99999999", "|V8", "O", "nothing", "<M8[D]"])
@pytest.mark.parametrize("shape", [(2**40,), (2**62, 4), (-1,), (0, 2**62), (1,) * 100, (2**31, 2**31, 0)])
def test_an_array_that_claims_more_than_its_bytes_is_corrupt_and_takes_no_memory(dtype: str, shape: tuple) -> None:
    for code in (3, 4, 5):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(_Head(dtype, shape, b""))))
        with limited(1 << 20):
            try:
                value = decode_object(data)
            except Corrupt:
                continue
        assert 0 in value.shape


def test_a_block_that_lies_is_corrupt_and_takes_no_memory() -> None:
    columns = [
        Column.dense(np.arange(12, dtype=np.float32).reshape(3, 4)), Column.ragged([np.arange(3), np.arange(2)]),
        Column.objects(["a", {"b": 1}]), Column.ragged([np.ones((2, 3), np.float16)] * 3),
    ]  # fmt: skip
    corpus = []
    for column in columns:
        memory = np.zeros(column.nbytes, np.uint8)
        column.write_to(memory)
        block = m.Block("f", 1, 0, column.nbytes, column.rows, column.kind, column.dtype, column.shape, 0)
        corpus.append((msgspec.msgpack.decode(msgspec.msgpack.encode(block)), memory.tobytes()))

    def once(rng: random.Random) -> None:
        values, memory = rng.choice(corpus)
        if rng.random() < 0.7:
            values = bent(rng, values)
        if rng.random() < 0.7:
            memory = spoilt(rng, memory)[: len(memory)].ljust(len(memory), b"\0")
        try:
            block = msgspec.msgpack.decode(packed(values), type=m.Block)
        except (msgspec.MsgspecError, RecursionError):
            return
        try:
            column = read_block(block, np.frombuffer(memory, np.uint8))
            column.rows_list()
            column.take(np.arange(column.rows)[::-1])
        except (Corrupt, Invalid):
            return

    with limited(4 << 20):
        runs(once, SMALL * 2)


def test_elements_of_no_bytes_take_no_memory_however_many_a_block_claims() -> None:
    columns = []
    for claimed in (2**40, 2**45):
        offsets = np.array([0, 1, claimed], np.int64)
        memory = np.concatenate([offsets.view(np.uint8), np.zeros(40, np.uint8)])
        block = m.Block("f", 1, 0, 64, 2, "ragged", "<i8", (0,), 0)
        columns.append(read_block(block, memory))
    with limited(1 << 20):
        assert columns[0].take([1, 0]).lengths().tolist() == [2**40 - 1, 1]
        both = gather("f", np.array([0, 1] * 20), np.array([1, 0] * 20), dict(enumerate(columns)))
        assert both.lengths().tolist() == [2**40 - 1, 1] * 20


# --- bytes on sockets -----------------------------------------------------------------------------------------------


async def test_bulk_frames_that_are_none_do_nothing_and_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    files = UnitFiles(tmp_path / "unit", 0, budget=1 << 20)
    (segment,) = files.make(1, 1 << 16)
    server = BulkServer(files, f"ipc://{tmp_path}/s/u", "0" * 64)
    client = BulkClient(server.endpoint, "0" * 64, name="c")
    nonce = server._sessions.nonce
    asked = [
        BulkOpen(b"s" * 16), BulkRead(1, b"s" * 16, nonce, segment.segment, 0, 100),
        BulkWrite(2, b"s" * 16, nonce, segment.segment, 0),
    ]  # fmt: skip
    answers = [BulkOpened(b"s" * 16, nonce, b"m" * 32), BulkDone(1), BulkDone(2, "invalid", "why")]

    def once(rng: random.Random) -> None:
        for corpus, take in ((asked, server._serve), (answers, client._on_frames)):
            header = msgspec.msgpack.encode(rng.choice(corpus))
            frames = [spoilt(rng, header) if rng.random() < 0.7 else header, b"data", rng.randbytes(32)]
            frames = frames[: rng.randrange(1, 4)]
            take([b"peer", *frames] if take == server._serve else frames)

    runs(once, SMALL // 2)
    assert not files.data(segment.segment).any(), "an unauthorised write"
    client.close()
    server.close()
    files.close()
    await asyncio.sleep(0)


def test_a_stream_gives_whole_frames_or_ends() -> None:
    limit = 4096

    def once(rng: random.Random) -> None:
        frames = [rng.randbytes(rng.choice([0, 1, 30, 2000])) for _ in range(rng.randrange(1, 6))]
        data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
        damaged = rng.random() < 0.6
        if damaged:
            data = spoilt(rng, data)
        ours, theirs = socket.socketpair()
        got: list[bytes] = []
        ends: list[str] = []
        stream = Stream(ours, lambda frame: got.append(bytes(frame)), ends.append, limit)
        at = 0
        while at < len(data) and not stream.closed:
            size = rng.choice([1, 3, 100, 5000])
            theirs.sendall(data[at : at + size])
            at += size
            stream.read()
            assert len(stream._partial) <= limit + 4
        assert all(len(frame) <= limit for frame in got)
        if not damaged:
            assert got == frames
            assert not ends
        theirs.close()
        stream.end("")

    runs(once, SMALL // 4)


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_nothing_that_a_client_asks_ends_the_controller_in_many_runs() -> None:
    runs(serve_bent_requests, 5000)


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_all_decoders_in_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "SMALL", MANY)
    test_a_frame_is_a_message_or_malformed(decode_request, [encode(m.Request(7, body)) for body in BODIES])
    test_a_frame_is_a_message_or_malformed(decode_response, [encode(m.Response(7, body)) for body in REPLIES])
    test_damaged_objects_are_corrupt_or_another_object_of_no_more_memory()
    test_a_block_that_lies_is_corrupt_and_takes_no_memory()
    test_a_snapshot_with_right_digests_and_wrong_values_is_refused_by_known_errors(Served().core.ledger)
    test_a_damaged_journal_is_corrupt_or_torn(tmp_path)
