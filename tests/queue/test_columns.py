"""Columns: packing, gathering, and the layout in a block."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.net.messages import Block
from transfer_queue.storage.arena import Extent, fill
from transfer_queue.storage.columns import DTYPES, Column, read_block
from transfer_queue.storage.convert import as_column, as_columns, packed
from transfer_queue.storage.gather import gather, join_single

RAGGED = [np.array([1, 2, 3]), np.array([], dtype=np.int64), np.array([4])]


def block_of(column: Column) -> tuple[Block, np.ndarray]:
    data = np.full(column.nbytes, 0xAB, np.uint8)
    return fill(Extent(0, 0, len(data), data), "f", column), data


@pytest.mark.parametrize(
    "column",
    [
        Column.dense(np.arange(6, dtype=np.float32).reshape(2, 3)), Column.dense(np.arange(4)), Column.ragged(RAGGED),
        Column.ragged([np.ones((2, 3), np.float16), np.zeros((0, 3), np.float16)]), Column.dense(np.zeros((3, 0))),
        Column.objects(["a", {"b": 1}, None]), Column.ragged([np.zeros(0)]), Column.dense(np.array([True, False])),
    ],
)  # fmt: skip
def test_a_column_reads_back_from_its_block(column):
    block, data = block_of(column)
    back = read_block(block, data)
    assert (back.kind, back.dtype, back.shape, back.rows) == (column.kind, column.dtype, column.shape, column.rows)
    assert all(np.array_equal(a, b) for a, b in zip(back.rows_list(), column.rows_list(), strict=True))


@given(st.lists(st.lists(st.integers(-(2**31), 2**31), max_size=200), min_size=1, max_size=12), st.data())
def test_take_gives_the_rows_asked_in_the_order_asked(rows, data):
    column = Column.ragged([np.array(row, dtype=np.int64) for row in rows])
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20))
    assert [row.tolist() for row in column.take(index).rows_list()] == [rows[i] for i in index]


def test_take_works_for_dense_long_and_object_rows():
    assert Column.dense(np.array([[1, 2], [3, 4]])).take([1, 1]).values.tolist() == [[3, 4], [3, 4]]
    assert Column.objects(["a", "b"]).take([1, 0]).rows_list() == ["b", "a"]
    long = Column.ragged([np.arange(5000), np.arange(3)]).take([1, 0])
    assert [len(row) for row in long.rows_list()] == [3, 5000]
    with pytest.raises(IndexError, match=r"rows 0\.\.2"):
        long.take([0, 2])


def test_concat_joins_rows_and_refuses_columns_of_another_make():
    assert [len(r) for r in Column.concat([Column.ragged(RAGGED), Column.ragged(RAGGED[:1])]).rows_list()] == [
        3,
        0,
        1,
        3,
    ]
    with pytest.raises(Invalid, match="columns differ"):
        Column.concat([Column.ragged(RAGGED), Column.dense(np.arange(2))])


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": 4}, {"rows": 2**60}, {"rows": -1}, {"nbytes": 8}, {"dtype": "<f2", "shape": (1000,)},
        {"kind": "dense"}, {"shape": (2**62, 2**62)}, {"shape": (-1,)},
    ],
)  # fmt: skip
def test_a_block_that_contradicts_its_bytes_is_corrupt(damage):
    block, data = block_of(Column.ragged(RAGGED))
    with pytest.raises(Corrupt):
        read_block(msgspec.structs.replace(block, **damage), data)


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [0, 3, 3, 5], [1, 3, 3, 4], [0, -1, 3, 4], [0, 2**62, 2**62, 2**62]])
def test_offsets_that_point_outside_the_values_are_corrupt(offsets):
    block, data = block_of(Column.ragged(RAGGED))
    data[:32].view(np.int64)[:] = offsets
    with pytest.raises(Corrupt, match="offsets"):
        read_block(block, data)


def test_lists_of_arrays_are_ragged_and_other_lists_are_objects():
    assert as_column("f", [np.zeros(2), np.zeros(2)]).kind == "ragged"
    assert as_column("f", [np.zeros(2), np.zeros(2, np.float32)]).kind == "object"
    assert as_column("f", [1, 2]).kind == "object"
    assert as_column("f", np.array(["a", "b"])).rows_list() == ["a", "b"]


def test_a_column_of_the_wrong_length_or_kind_is_refused_by_field():
    with pytest.raises(Invalid, match="'responses' has 3 rows for 2 keys"):
        as_columns({"responses": RAGGED}, 2)
    with pytest.raises(Invalid, match="'x' is a dict"):
        as_column("x", {})
    with pytest.raises(Invalid, match=r"'x'.*not storable"):
        as_column("x", np.zeros(2, dtype="<M8[s]"))
    with pytest.raises(TypeError, match="field 'x' row 1"):
        as_column("x", [1, {2}])


def test_torch_tensors_dense_jagged_and_strided_nested_become_columns():
    torch = pytest.importorskip("torch")
    assert as_column("f", torch.ones(2, 3)).shape == (3,)
    rows = [torch.arange(3), torch.arange(1)]
    for nested in (torch.nested.as_nested_tensor(rows, layout=torch.jagged), torch.nested.as_nested_tensor(rows), rows):
        column = as_column("f", nested)
        assert column.kind == "ragged"
        assert [r.tolist() for r in column.rows_list()] == [[0, 1, 2], [0]]
    bf16 = as_column("f", torch.ones(2, 2, dtype=torch.bfloat16))
    assert bf16.dtype == "bfloat16"
    assert bf16.values.dtype == np.uint16
    assert read_block(*block_of(bf16)).dtype == "bfloat16"
    with pytest.raises(TypeError, match="float8"):
        as_column("f", torch.ones(2).to(torch.float8_e4m3fn))


def test_big_endian_values_are_stored_little_endian():
    column = as_column("f", np.array([1, 2], dtype=">i4"))
    assert column.dtype == "<i4"
    assert column.values.tolist() == [1, 2]
    assert "<i4" in DTYPES


ONES = {
    "dense": lambda i: Column.dense(np.full((1, 3), i, np.float32)),
    "scalar": lambda i: Column.dense(np.array([i % 2 == 0])),
    "ragged": lambda i: Column.ragged([np.arange(i % 5) + i]),
    "ragged in two": lambda i: Column.ragged([np.full((i % 4, 2), i, np.int32)]),
    "object": lambda i: Column.objects([{"i": i, "text": "x" * i}]),
}


def blocks_of(columns: list[Column]) -> tuple[list[Block], list[memoryview]]:
    pairs = [block_of(column) for column in columns]
    return [block for block, _ in pairs], [data.data for _, data in pairs]


@pytest.mark.parametrize("make", ONES.values(), ids=ONES)
def test_blocks_of_one_row_join_to_what_reading_each_gives(make):
    columns = [make(i) for i in range(20)]
    blocks, data = blocks_of(columns)
    found = join_single(blocks, data, np.empty)
    expected = Column.concat([read_block(b, d) for b, d in zip(blocks, data, strict=True)])
    assert (found.kind, found.dtype, found.shape, found.rows) == (expected.kind, expected.dtype, expected.shape, 20)
    assert found.values.tolist() == expected.values.tolist()
    assert found.values.flags.writeable
    if expected.offsets is not None:
        assert found.offsets.tolist() == expected.offsets.tolist()


def test_blocks_of_one_row_of_different_forms_are_left_to_the_general_way():
    for other in (Column.ragged([np.zeros(3, np.float32)]), Column.dense(np.zeros((1, 2))), Column.dense(np.zeros(2))):
        assert join_single(*blocks_of([ONES["ragged"](1), other]), np.empty) is None


@pytest.mark.parametrize("at", [0, 8, 9])
def test_a_block_of_one_row_whose_offsets_lie_is_not_joined(at):
    blocks, data = blocks_of([ONES["ragged"](i) for i in (1, 2, 3)])
    data[1][at] += 1
    assert join_single(blocks, data, np.empty) is None
    with pytest.raises(Corrupt):
        read_block(blocks[1], data[1])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("longest", [3, 2000])
@pytest.mark.parametrize("kind", ["dense", "wide", "ragged", "ragged in two", "object"])
def test_rows_gathered_from_many_blocks_are_the_rows_asked(kind, longest, seed):
    rng = np.random.default_rng(seed)
    make = {
        "dense": lambda n: Column.dense(rng.random(n)),
        "wide": lambda n: Column.dense(rng.integers(0, 9, (n, longest, 2))),
        "ragged": lambda n: Column.ragged([rng.random(rng.integers(0, longest + 1)) for _ in range(n)]),
        "ragged in two": lambda n: Column.ragged([rng.random((rng.integers(0, longest + 1), 2)) for _ in range(n)]),
        "object": lambda n: Column.objects(["x" * int(rng.integers(0, longest)) for _ in range(n)]),
    }[kind]
    sizes = rng.integers(1, [2, 4, 40][seed % 3], int(rng.integers(1, 6)))
    columns = {7 * i: make(n) for i, n in enumerate(sizes.tolist())}
    asked = [(b, int(rng.integers(columns[b].rows))) for b in rng.choice(list(columns), 30).tolist()]
    block, row = (np.array(numbers, np.int32) for numbers in zip(*asked, strict=True))
    got = gather("f", block, row, columns)
    expected = [columns[b][r] for b, r in asked]
    assert all(np.array_equal(a, b) for a, b in zip(got.rows_list(), expected, strict=True))
    assert got.rows == 30


def test_arrays_of_which_a_column_would_lose_a_part_are_refused_by_field():
    with pytest.raises(TypeError, match="'x' is a masked array"):
        as_column("x", np.ma.array([1, 2], mask=[False, True]))
    with pytest.raises(TypeError, match=r"'x' has numpy dtype .*'a'.*one field for each"):
        as_column("x", np.zeros(2, [("a", "<i4")]))
    with pytest.raises(Invalid, match="'x'.*got a scalar"):
        as_column("x", np.array({"a": 1}, dtype=object))


@pytest.mark.parametrize("value", [[0] * 500_000, [(0,)] * 200_000], ids=["plain", "tuples"])
async def test_many_objects_are_packed_while_the_event_loop_goes_on(value):
    turns, packing = 0, asyncio.ensure_future(packed({"o": [value]}, 1))
    while not packing.done():
        await asyncio.sleep(0)
        turns += 1
    assert packing.result()["o"][0] == value
    assert turns > 1  # what is packed on the loop itself is done in its first turn
    assert (await packed({"o": [1, 2]}, 2))["o"].rows_list() == [1, 2]


def strange_tensors():
    torch = pytest.importorskip("torch")
    ones = torch.ones(3)
    return {
        r"resolve_conj\(\)": torch.conj(ones.to(torch.complex64)),
        r"resolve_neg\(\)": torch.conj(ones.to(torch.complex64)).imag,
        "meta device": ones.to("meta"),
        r"sparse_coo; put `.to_dense\(\)": ones.to_sparse(),
        r"sparse_csr; put `.to_dense\(\)": torch.eye(3).to_sparse_csr(),
        r"quint8\); put `.dequantize\(\)": torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8),
        r"float8_e4m3fn; put `.view\(torch.uint8\)": ones.to(torch.float8_e4m3fn),
        "complex32; put `.to": ones.to(torch.complex32),
    }


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_cannot_be_stored_is_refused_by_field_row_and_remedy():
    for remedy, tensor in strange_tensors().items():
        with pytest.raises(TypeError, match=f"field 'x'.*{remedy}"):
            as_column("x", tensor)
        with pytest.raises(TypeError, match=f"field 'x' row 0.*{remedy}"):
            as_column("x", [tensor, tensor])
        with pytest.raises(TypeError, match=rf"field 'x' row 1: value\['t'\] .*{remedy}"):
            as_column("x", ["a", {"t": tensor}])
