"""The table of rows against a plain model: whatever is written over whatever, rows have what was written last."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.errors import Invalid
from transfer_queue.ledger.blocks import Segments
from transfer_queue.ledger.order import Serials
from transfer_queue.ledger.queries import lookup
from transfer_queue.ledger.rows import RowTable
from transfer_queue.ledger.tags import EMPTY, merge, pack, unpack
from transfer_queue.net.messages import Block

FIELDS = [f"f{i}" for i in range(70)]
"""More than fit in 64 bits; most of what is written takes the first few."""


class Model:
    """Per key and field the block and the row in it."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, tuple[Block, int]]] = {}
        self.blocks = 0

    def block(self, field: str, rows: int, rng: random.Random) -> Block:
        self.blocks += 1
        segment, offset, digest = rng.randrange(6), self.blocks << 20, self.blocks << 40
        if rng.random() < 0.3:
            return Block(field, segment, offset, 8 * (rows + 1) + 64, rows, "ragged", "<i8", (), digest)
        shape = rng.choice([(), (2, 1)])
        return Block(field, segment, offset, 8 * rows * (2 if shape else 1), rows, "dense", "<i8", shape, digest)

    def live(self) -> list[Block]:
        found = {block.digest: block for fields in self.rows.values() for block, _ in fields.values()}
        return list(found.values())


def check(table: RowTable, segments: Segments, model: Model, rng: random.Random) -> None:
    assert set(table.ids) == set(model.rows)
    live = model.live()
    assert table.nbytes == sum(block.nbytes for block in live)
    for segment in range(6):
        use = segments.use.get(segment)
        here = [block for block in live if block.segment == segment]
        assert (use.nbytes if use else 0) == sum(block.nbytes for block in here)
        assert (use.blocks if use else 0) == len(here)
        hit = {key for key, fields in model.rows.items() if any(b.segment == segment for b, _ in fields.values())}
        assert {table.keys[row] for row in table.rows_in([segment])} == hit
    for count in (1, 5, 40):
        some = rng.sample(sorted(model.rows), min(count, len(model.rows)))
        rows = [table.ids[key] for key in some]
        common = set.intersection(*(set(model.rows[key]) for key in some)) if some else set()
        assert table.common_fields(rows) == sorted(common)
        assert table.have(sorted(common), rows)
        assert table.have(["f0", "never"], rows) is (not rows)
        for field in ("f0", "f1", "f69", "never"):
            assert table.has(field, np.asarray(rows, np.int64)).tolist() == [field in model.rows[key] for key in some]
        check_lookup(table, model, some, rng)
        for field, puts, index in table.locate(["f0", "f1", "f2", "f69"], rows):
            for key, row, put, at in zip(some, rows, puts.tolist(), index.tolist(), strict=True):
                expected = model.rows[key].get(field)
                assert table.block_of(row, field) == expected
                assert expected == (None if put < 0 else (table.puts.block(put, field), at))


def check_lookup(table: RowTable, model: Model, keys: list[str], rng: random.Random) -> None:
    partition: Any = SimpleNamespace(name="p", rows=table, groups={})
    common = sorted(set.intersection(*(set(model.rows[key]) for key in keys))) if keys else []
    fields = rng.sample(common, rng.randint(0, len(common)))
    located = lookup(partition, [*keys, "unknown"], fields)
    assert (located.keys, [place.field for place in located.places]) == (keys, fields if keys else [])
    needed = {model.rows[key][field][0].digest for key in keys for field in fields}
    assert {block.digest for block in located.blocks} == needed, "no block that was not asked for"
    for place in located.places:
        blocks, index = (np.frombuffer(data, "<i4").tolist() for data in (place.block, place.index))
        found = [(located.blocks[block], row) for block, row in zip(blocks, index, strict=True)]
        assert found == [model.rows[key][place.field] for key in keys]


def restored(table: RowTable) -> tuple[RowTable, Segments]:
    """By way of what a snapshot holds."""
    segments = Segments()
    again = RowTable(segments, Serials())
    for section in table.dump():
        again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(section)))
    again.owner = list(table.owner)
    assert list(again.ids) == list(table.ids)
    return again, segments


def test_rows_have_what_was_written_last() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    segments = Segments()
    table, model = RowTable(segments, Serials()), Model()
    for step in range(250):
        action = rng.random()
        present = sorted(model.rows)
        if action < 0.2 or not present:
            keys = [f"k{step}_{i}" for i in range(rng.choice([1, 1, 3, 50]))]
            table.add(keys)
            model.rows.update((key, {}) for key in keys)
        elif action < 0.85:
            keys = rng.sample(present, min(len(present), rng.choice([1, 1, 2, 20, 90])))
            fields = rng.sample(FIELDS if action < 0.25 else FIELDS[:5], rng.randint(1, 4))
            rows = len(keys) + rng.choice([0, 0, 2])
            index = rng.sample(range(rows), len(keys)) if rows > len(keys) or rng.random() < 0.3 else None
            blocks = [model.block(field, rows, rng) for field in fields]
            table.write(blocks, [table.ids[key] for key in keys], index)
            for i, key in enumerate(keys):
                model.rows[key] |= {block.field: (block, index[i] if index else i) for block in blocks}
        else:
            keys = rng.sample(present, min(len(present), rng.choice([1, 10, 60])))
            rows = [table.ids[key] for key in keys]
            if action < 0.93:
                table.erase(rows)
                for key in keys:
                    del model.rows[key]
            else:
                table.strip(rows)
                model.rows.update((key, {}) for key in keys)
        if step % 5 == 0:
            check(table, segments, model, rng)
        if step % 50 == 25:
            table, segments = restored(table)
    assert len(table.places) <= len(FIELDS)
    table.erase(list(table.ids.values()))
    assert (table.nbytes, segments.use) == (0, {})


def test_rows_of_one_put_take_one_place() -> None:
    table = RowTable(Segments(), Serials())
    rows = table.add([f"k{i}" for i in range(100)])
    first, second = ([Model().block(f, 100, random.Random(0)) for f in fields] for fields in (FIELDS[:12], FIELDS[:6]))
    table.write(first, rows)
    assert len(table.places) == 1
    table.write(first, rows)
    assert len(table.places) == 1
    table.write(second, rows)
    assert len(table.places) == 2


def test_tags_are_packed_as_they_are_and_merge() -> None:
    flat, nested = {"a": 1, "b": None, "c": "x", "d": 0.5, "e": True}, {"a": 2, "list": [1, {"x": "y"}]}
    for tag in (flat, nested):
        packed = msgspec.msgpack.encode(tag)
        assert pack("k", msgspec.Raw(packed)) == pack("k", tag) == packed
    assert unpack(merge(pack("k", flat), pack("k", nested))) == flat | nested
    assert merge(EMPTY, pack("k", flat)) == merge(pack("k", flat), EMPTY) == pack("k", flat)
    assert pack("k", msgspec.Raw(b"\xde\0\0")) == EMPTY


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (msgspec.msgpack.encode({"a": b"bytes"}), "tag 'a' of 'k' is a bytes"),
        (msgspec.msgpack.encode({"a": [b"bytes"]}), "tag 'a' of 'k' is a bytes"),
        (msgspec.msgpack.encode({"a": 1 << 63}), "beyond 64 bits"),
        (msgspec.msgpack.encode({1: 2}), "the tag of 'k' is none"),
        (msgspec.msgpack.encode([1]), "the tag of 'k' is none"),
        (b"\x81\xa1a\xa2\xff\xfe", "the tag of 'k' is not msgpack"),
        (b"\x81\xa1a", "the tag of 'k' is not msgpack"),
        (b"\x80\x80", "the tag of 'k' is not msgpack"),
    ],
)
def test_a_packed_tag_that_is_none_is_refused_by_key(tag: bytes, text: str) -> None:
    with pytest.raises(Invalid, match=text):
        pack("k", msgspec.Raw(tag))
