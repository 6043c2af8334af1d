"""Checkpoints whose digests are right and whose contents no verb could have put: refused before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from transfer_queue import checkpoint
from transfer_queue.checkpoint import saving
from transfer_queue.checkpoint.format import FORMAT, Manifest, PartitionEntry
from transfer_queue.errors import Corrupt
from transfer_queue.local import LocalQueue
from transfer_queue.net import messages as m
from transfer_queue.storage.columns import Column
from transfer_queue.storage.objects import encode_object


def page(keys: list[str], *, tags: Any = None, consumed: Any = None, columns: Any = None) -> tuple[Any, ...]:
    if columns is None:
        columns = [("x", Column.dense(np.arange(len(keys))), np.arange(len(keys), dtype=np.int32))]
    return m.Rows(b"", keys, [{} for _ in keys] if tags is None else tags, [], []), columns, consumed or {}


def write(directory: Path, *partitions: tuple[str, list[tuple[Any, ...]]], rows: int | None = None) -> None:
    directory.mkdir()
    entries = []
    for number, (name, pages) in enumerate(partitions):
        with (directory / f"{number}.rows").open("wb") as file:
            written = [saving.write_page(file, *one) for one in pages]
        count = sum(len(one[0].keys) for one in pages) if rows is None else rows
        entries.append(PartitionEntry(name, f"{number}.rows", count, written))
    body = msgspec.json.encode(Manifest(FORMAT, True, {}, entries))
    (directory / "manifest.json").write_bytes(body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")


def objects(*values: bytes, dtype: str = "|u1") -> list[Any]:
    data = np.frombuffer(b"".join(values), np.uint8)
    offsets = np.cumsum([0, *map(len, values)])
    at = np.arange(len(values), dtype=np.int32)
    return [("x", Column("object", dtype, (), data.view(np.dtype(dtype)), offsets, len(values)), at)]


def repeated(*at: list[int]) -> list[Any]:
    return [("x", Column.dense(np.arange(len(one))), np.array(one, np.int32)) for one in at]


def tensor(*head: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(5, msgspec.msgpack.encode(list(head))))


LONG = "n" * 600
K = ["k"]
GOOD = [page(["a", "b"])]

HOSTILE = {
    "partition of the queue's own": (("\0load.ab", GOOD),),
    "partition without a name": (("", GOOD),),
    "partition of a long name": ((LONG, GOOD),),
    "two partitions of a name": (("p", GOOD), ("p", GOOD)),
    "key of a NUL": (("p", [page(["\0k"])]),),
    "long key on a later page": (("p", [*GOOD, page([LONG])]),),
    "key without a name": (("p", [page([""])]),),
    "key twice in a page": (("p", [page(["a", "a"])]),),
    "key on two pages": (("p", [*GOOD, page(["b"])]),),
    "large tag": (("p", [page(K, tags=[{"a": "x" * (2 << 20)}])]),),
    "tag of bytes": (("p", [page(K, tags=[{"a": b"x"}])]),),
    "too few tags": (("p", [page(K, tags=[])]),),
    "long task": (("p", [page(K, consumed={LONG: b"\1"})]),),
    "task of a NUL": (("p", [page(K, consumed={"\0t": b"\1"})]),),
    "too few flags": (("p", [page(K, consumed={"t": b""})]),),
    "long field": (("p", [page(K, columns=[(LONG, *repeated([0])[0][1:])])]),),
    "field of a NUL": (("p", [page(K, columns=[("\0x", *repeated([0])[0][1:])])]),),
    "row twice in a column": (("p", [page(["a", "b"], columns=repeated([0, 0]))]),),
    "row in two columns": (("p", [page(["a", "b"], columns=repeated([0, 1], [1]))]),),
    "row that is not there": (("p", [page(K, columns=repeated([1]))]),),
    "negative row": (("p", [page(K, columns=repeated([-1]))]),),
    "object that is none": (("p", [page(K, columns=objects(b"\xc1\xc1"))]),),
    "objects that are one": (("p", [page(["a", "b"], columns=objects(b"\x92\x01", b"\x02\x91\x01"))]),),
    "object of another dtype": (("p", [page(K, columns=objects(b"\x01", dtype="|b1"))]),),
    "tensor that is too short": (("p", [page(K, columns=objects(tensor("float32", [4], b"1234")))]),),
    "tensor of no dtype": (("p", [page(K, columns=objects(tensor("__class__", [0], b"")))]),),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_no_verb_could_have_put_is_damage_and_changes_nothing(tmp_path, monkeypatch, name):
    write(tmp_path / "c", *HOSTILE[name])
    async with LocalQueue() as queue:
        client = queue.client("mine")
        await client.put("p", ["mine"], {"x": np.arange(1)})
        asked: list[Any] = []
        monkeypatch.setattr(client, "_ask", lambda *arguments: asked.append(arguments))
        with pytest.raises(Corrupt, match=r"(?s)/c/(0.rows|manifest.json): .*; take another checkpoint"):
            await checkpoint.load(client, tmp_path / "c")
        assert asked == []


async def test_a_manifest_that_counts_other_rows_is_damage(tmp_path):
    write(tmp_path / "c", ("p", GOOD), rows=3)
    async with LocalQueue() as queue:
        with pytest.raises(Corrupt, match="2 rows with 2 keys, where the manifest says 3"):
            await checkpoint.load(queue.client("mine"), tmp_path / "c")


async def test_rows_without_keys_and_objects_of_every_kind_are_loaded(tmp_path):
    values = [(1, "x"), 1 << 70, np.arange(3), np.str_("t"), {"a": [None, b"b"]}]
    unnamed = [f"\0{'0' * 16}.{i}" for i in range(5)]
    nested = [encode_object(value) for value in values]
    write(tmp_path / "c", ("p", [page(unnamed, columns=objects(*nested), consumed={"t": b"\1\0\0\0\0"})]))
    async with LocalQueue() as queue:
        client = queue.client("mine")
        await checkpoint.load(client, tmp_path / "c")
        found = await client.find("p", fields=[], task="t")
        assert (found.keys, list(found.consumed)) == (unnamed, [1, 0, 0, 0, 0])
        got = [row for row in (await client.get("p", unnamed, ["x"]))["x"].rows_list()]
        assert (got[0], got[1], got[2].tolist(), got[3], got[4]) == (*values[:2], [0, 1, 2], *values[3:])
