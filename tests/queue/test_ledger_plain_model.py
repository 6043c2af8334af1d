"""Plain rows and what tasks consume of them against a plain model: any sequence of key-value verbs, fetches, loads,
clears, losses, moves, snapshots and deaths gives what the model says. Groups: test_ledger_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from transfer_queue.errors import Invalid, NotFound, QueueError, StorageKeyNotFoundError
from transfer_queue.ledger import Ledger, dump, load
from transfer_queue.ledger.consuming import ready
from transfer_queue.ledger.moving import survivors
from transfer_queue.ledger.order import packed, unpacked
from transfer_queue.ledger.tags import unpack
from transfer_queue.net import messages as m

PARTITION, TASK = st.sampled_from(["q", "q", "q", "r", "staged"]), st.sampled_from(["t", "v"])
KEYS = st.lists(st.integers(0, 7).map("k{}".format), min_size=1, max_size=5, unique=True)
FIELD, FLAG, SEGMENT = st.sampled_from(["x", "y"]), st.booleans(), st.integers(0, 2)
GONE = 10**9
"""No row has this serial."""


@dataclass
class MRow:
    serial: int
    tag: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, m.Block] = field(default_factory=dict)


@dataclass
class MPartition:
    rows: dict[str, MRow] = field(default_factory=dict)
    consumed: dict[str, set[int]] = field(default_factory=dict)
    remembered: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    durability: str = "spill"

    def serials(self) -> list[int]:
        return [row.serial for row in self.rows.values()]

    def unconsumed(self, task: str) -> list[int]:
        return [serial for serial in self.serials() if serial not in self.consumed.get(task, ())]


class PlainMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.ledger, self.model, self.records, self.now = Ledger(), dict[str, MPartition](), [], 0.0
        self.snapshot = b""
        self.blocks = self.serial = 0
        self.dead: list[int] = []
        self.do(m.Life(format=1, run="r", epoch=1))
        self.put("q", ["k0", "k1", "k2", "k3"], "x", True, "x")
        self.consume("q", "t", [0, 2], True, "0/0", 0)

    def do(self, mutation: m.Mutation, error: type[QueueError] | None = None) -> Any:
        """Apply; it must raise exactly `error`, and then have changed nothing."""
        before = self.ledger.fingerprint()
        self.now += 0.25
        if error is not None:
            with pytest.raises(error) as caught:
                self.ledger.apply(mutation, self.now)
            assert type(caught.value) is error
            assert self.ledger.fingerprint() == before
            return None
        reply = self.ledger.apply(mutation, self.now)
        self.records.append(msgspec.msgpack.encode(m.Record(len(self.records) + 1, self.now, "", 0, mutation)))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=m.Reply)

    def erase(self, name: str, keys: list[str]) -> None:
        self.dead += [self.model[name].rows.pop(key).serial for key in keys]

    def some_serials(self, name: str, picks: list[int]) -> list[int]:
        serials = self.model[name].serials()
        return list(dict.fromkeys(serials[pick % len(serials)] for pick in picks)) if serials else []

    # --- rules ------------------------------------------------------------------------------------------------

    @rule(name=PARTITION, keys=KEYS, column=FIELD, tagged=FLAG, entry=FIELD)
    def put(self, name: str, keys: list[str], column: str, tagged: bool, entry: str) -> None:
        self.blocks += 1
        block = m.Block(
            column, self.blocks % 3, 64 * self.blocks, 8 * len(keys), len(keys), "dense", "<i8", (), self.blocks
        )
        tags: list[Any] | None = [{entry: self.blocks + i} for i in range(len(keys))] if tagged else None
        reply = self.do(m.Commit(name, keys, [block], tags))
        rows = self.model.setdefault(name, MPartition()).rows
        merged = any(key in rows and rows[key].tag for key in keys)
        for i, key in enumerate(keys):
            if key not in rows:
                rows[key] = MRow(self.serial)
                self.serial += 1
            rows[key].blocks[column] = block
            rows[key].tag |= tags[i] if tags else {}
        assert reply.tags == ([rows[key].tag for key in keys] if merged else None)
        assert reply.fields == sorted(set.intersection(*(set(rows[key].blocks) for key in keys)))

    @rule(name=PARTITION, keys=KEYS, wrong=st.sampled_from(["", "", "dead", "others"]))
    def tags_of_the_rows_that_were_meant(self, name: str, keys: list[str], wrong: str) -> None:
        """A writer that says which serials its keys had."""
        rows = self.model[name].rows if name in self.model else {}
        keys = [key for key in keys if key in rows]
        if not keys or (wrong == "dead" and not self.dead):
            return
        serials = [rows[key].serial for key in keys]
        if wrong == "dead":
            serials[0] = self.dead[-1]
        elif wrong == "others":
            serials = [*serials[1:], serials[0]] if len(serials) > 1 else serials * 2
        error = {"": None, "dead": StorageKeyNotFoundError, "others": Invalid}[wrong]
        tag: m.Tag = {"meant": True}
        self.do(m.Commit(name, keys, [], [tag] * len(keys), rows=packed(np.asarray(serials))), error)
        if error is None:
            for key in keys:
                rows[key].tag |= tag

    @rule(name=PARTITION, keys=KEYS, picks=st.lists(st.integers(0, 9), max_size=2))
    def clear(self, name: str, keys: list[str], picks: list[int]) -> None:
        if name not in self.model:
            self.do(m.Clear(name, keys), NotFound)
            return
        serials = self.some_serials(name, picks)
        self.do(m.Clear(name, keys, packed(np.asarray([*serials, GONE]))))
        rows = self.model[name].rows
        self.erase(name, [key for key, row in rows.items() if key in keys or row.serial in serials])

    @rule(name=PARTITION, sure=FLAG)
    def clear_partition(self, name: str, sure: bool) -> None:
        if name not in self.model:
            self.do(m.ClearPartition(name), NotFound)
        elif sure:
            self.do(m.ClearPartition(name))
            self.erase(name, list(self.model[name].rows))
            del self.model[name]

    @rule(name=PARTITION, durability=st.sampled_from(["", "memory", "spill", "journal"]))
    def open_partition(self, name: str, durability: Any) -> None:
        self.do(m.OpenPartition(name, durability=durability))
        partition = self.model.setdefault(name, MPartition())
        partition.durability = durability or partition.durability
        assert self.ledger.is_durable(name) == (partition.durability == "journal")

    @rule(
        name=PARTITION, task=TASK, picks=st.lists(st.integers(0, 9), min_size=1, max_size=4), all_of_it=FLAG,
        key=st.sampled_from(["", "0/0", "0/1"]), gone=st.integers(0, 4),
    )  # fmt: skip
    def consume(self, name: str, task: str, picks: list[int], all_of_it: bool, key: str, gone: int) -> None:
        """What a fetch does once the sampler has chosen."""
        if name not in self.model:
            self.do(m.Consume(name, task, [], b"", b""), NotFound)
            return
        partition = self.model[name]
        serials = self.some_serials(name, picks)
        taken = [*(serials if all_of_it else serials[1:]), GONE]
        remember = {key: packed(np.asarray(serials[::-1], np.int64))} if key else {}
        asked = packed(np.asarray([*serials, GONE] if gone == 4 else serials, np.int64))
        error = StorageKeyNotFoundError if gone == 4 else None
        reply = self.do(m.Consume(name, task, ["x"], asked, packed(np.asarray(taken)), remember), error)
        if reply is None:
            return
        partition.consumed.setdefault(task, set()).update(taken[:-1])
        if key:
            partition.remembered[task, key] = serials[::-1]
        by_serial = {row.serial: (key, row) for key, row in partition.rows.items()}
        assert unpacked(reply.rows).tolist() == serials
        assert reply.keys == [by_serial[serial][0] for serial in serials]
        assert reply.tags == [by_serial[serial][1].tag for serial in serials]
        assert reply.have == [bytes("x" in by_serial[serial][1].blocks for serial in serials)]
        assert reply.consumed == bytes(serial in partition.consumed[task] for serial in serials)

    @rule(name=PARTITION, task=st.sampled_from(["t", "v", None]))
    def reset_consumption(self, name: str, task: str | None) -> None:
        if name not in self.model:
            self.do(m.ResetConsumption(name, task), NotFound)
            return
        self.do(m.ResetConsumption(name, task))
        partition = self.model[name]
        partition.consumed = {t: serials for t, serials in partition.consumed.items() if task not in (None, t)}
        partition.remembered = {
            (t, k): found for (t, k), found in partition.remembered.items() if task not in (None, t)
        }

    @rule(names=st.lists(PARTITION, min_size=2, max_size=2, unique=True), task=TASK, picks=st.lists(st.integers(0, 9)))
    def adopt(self, names: list[str], task: str, picks: list[int]) -> None:
        """A load ends: one takes the name of the other."""
        staged, name = names
        if staged not in self.model:
            self.do(m.AdoptPartitions({staged: name}), NotFound)
            return
        serials = self.some_serials(staged, picks)
        consumed = {staged: {task: packed(np.asarray(serials, np.int64))}}
        self.do(m.AdoptPartitions({staged: name}, {name: {task: b""}}), NotFound)
        self.do(m.AdoptPartitions({staged: name}, consumed))
        if name in self.model:
            self.erase(name, list(self.model[name].rows))
        partition = self.model[name] = self.model.pop(staged)
        partition.consumed.setdefault(task, set()).update(serials)

    @rule(names=st.sampled_from([{"q": "q"}, {"q": "r", "r": "q"}, {"q": "r", "staged": "r"}]))
    def names_that_would_overwrite_what_was_loaded_are_refused(self, names: dict[str, str]) -> None:
        if all(name in self.model for name in names):
            self.do(m.AdoptPartitions(names), Invalid)

    @rule(segment=SEGMENT)
    def lose_a_segment(self, segment: int) -> None:
        self.do(m.LoseSegments([segment]))
        for name, partition in self.model.items():
            rows = partition.rows.items()
            self.erase(name, [k for k, row in rows if any(b.segment == segment for b in row.blocks.values())])

    @rule(segment=SEGMENT, clear=KEYS, write=st.lists(st.integers(0, 7).map("k{}".format), max_size=2, unique=True))
    def survivors_are_moved(self, segment: int, clear: list[str], write: list[str]) -> None:
        """Those that are cleared, or written anew, while they are copied are left alone."""
        moves = []
        for name, partition in self.model.items():
            before = {row.serial: dict(row.blocks) for row in partition.rows.values()}
            for batch in survivors(self.ledger.partition(name).rows, {segment}, 1 << 20):
                self.blocks += 1
                count = len(batch.serials)
                place = {"segment": 99, "offset": 64 * self.blocks, "rows": count, "nbytes": 8 * count}
                moves.append((name, batch, [replace(block, **place) for block in batch.sources[0][0]], before))
        for name in list(self.model):
            self.clear(name, clear, [])
            if write:
                self.put(name, write, "x", False, "x")
        for name, batch, blocks, before in moves:
            self.do(m.Move(name, [segment], [batch.moved(blocks)]))
            rows = {row.serial: row for row in self.model[name].rows.values()}
            for serial in batch.serials.tolist():
                now = rows[serial].blocks if serial in rows else {}
                if all(now.get(block.field) is before[serial][block.field] for block in blocks):
                    now |= {block.field: block for block in blocks}
        assert write or segment not in self.ledger.segments.use

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = msgspec.msgpack.encode(list(dump(self.ledger)))
        self.records = []

    @rule()
    def crash_and_recover(self) -> None:
        """From the last snapshot, if there is one, and the records since then."""
        again = load(msgspec.msgpack.decode(self.snapshot) if self.snapshot else [])
        for record in self.records:
            record = msgspec.msgpack.decode(record, type=m.Record)
            again.apply(record.mutation, record.now)
        assert again.fingerprint() == self.ledger.fingerprint()
        self.ledger = again
        self.do(m.Life(format=1, run="r", epoch=self.ledger.epoch + 1))

    # --- invariants -------------------------------------------------------------------------------------------

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        assert set(self.ledger.partitions) == set(self.model)
        for name, partition in self.model.items():
            rows = self.ledger.partition(name).rows
            assert {key: unpack(rows.tags[row]) for key, row in rows.ids.items()} == {
                key: row.tag for key, row in partition.rows.items()
            }
            found = self.ledger.find(m.Find(name, fields=[]))
            assert found.keys == list(partition.rows)
            assert unpacked(found.rows).tolist() == partition.serials()
            for key, row in partition.rows.items():
                located = self.ledger.lookup(name, [key])
                blocks = {one.field: located.blocks[int.from_bytes(one.block, "little")] for one in located.places}
                assert blocks == row.blocks

    @invariant()
    def tasks_are_offered_what_they_have_not_consumed(self) -> None:
        for name, partition in self.model.items():
            p = self.ledger.partition(name)
            for task in ("t", "v"):
                serials, rows, more = ready(p, task, ["x"])
                with_x = {row.serial for row in partition.rows.values() if "x" in row.blocks}
                expected = [serial for serial in partition.unconsumed(task) if serial in with_x]
                assert (serials.tolist(), more) == (expected, False)
                assert rows.tolist() == [_id(p, serial) for serial in expected]
                assert p.consumption.unconsumed(p.rows.order, task)[0].tolist() == partition.unconsumed(task)
            for (task, key), serials in partition.remembered.items():
                known = p.consumption.recall(task, key)
                assert known is not None
                assert known.tolist() == serials

    @invariant()
    def live_bytes_are_those_of_the_blocks(self) -> None:
        """One block may be of rows of two partitions only after a load has renamed one of them."""
        for name, partition in self.model.items():
            blocks = {id(block): block for row in partition.rows.values() for block in row.blocks.values()}
            assert self.ledger.partition(name).rows.nbytes == sum(block.nbytes for block in blocks.values())
        total = sum(p.rows.nbytes for p in self.ledger.partitions.values())
        assert total == sum(use.nbytes for use in self.ledger.segments.use.values())


def _id(p: Any, serial: int) -> int:
    return int(p.rows.order.find(np.asarray([serial]))[0])


def test_plain_rows_agree_with_the_model() -> None:
    run_state_machine_as_test(PlainMachine, settings=_settings(100, 30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plain_rows_agree_with_the_model_for_long() -> None:
    run_state_machine_as_test(PlainMachine, settings=_settings(2000, 50))


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
