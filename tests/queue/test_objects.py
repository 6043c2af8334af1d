"""Object columns: the same value of the same type comes back, or the producer is told what cannot."""

from __future__ import annotations

import collections
import enum
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import Corrupt
from transfer_queue.storage import objects
from transfer_queue.storage.objects import decode_object, decode_objects, encode_object, encode_objects


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**64 - 1, -(2**63), 2**64, -(10**40), 1.5, float("inf"), "", "grüße", b"\x00\xff",
        [], {}, (), (1, (2, [3])), [{"role": "user", "content": "17 * 23 = ?"}], {1: "a", "b": {2: [None, True]}},
        np.float32(1.5), np.int8(-3), np.str_("x"), np.bool_(True), [np.int64(5), 5, 5.0, True],
    ],
)  # fmt: skip
def test_a_value_comes_back_equal_and_of_the_same_type_at_every_depth(value):
    back = decode_object(encode_object(value))
    assert back == value
    assert _types(back) == _types(value)


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float16), np.array(3.0), np.array(["a", "bcd"]),
     np.array([1, 2], dtype=">i4"), np.array([True]), np.arange(8)[::2], np.array(["2026-01-01"], dtype="M8[D]")],
)  # fmt: skip
def test_an_array_comes_back_with_its_dtype_and_shape_and_can_be_written(array):
    back = decode_object(encode_object({"a": (array,)}))["a"][0]
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.flags.writeable


SCALARS = [
    np.bytes_(b"a\0"), np.bytes_(b"\0\0"), np.bytes_(b""), np.str_("a\0"), np.str_("\0grüße\0"), np.str_(""),
    np.datetime64("2026-01-01"), np.datetime64(25, "25s"), np.timedelta64(3), np.timedelta64(-3, "us"),
    np.longdouble(1) / 3, np.clongdouble(1j) / 3, np.float16(0.1), np.complex64(1j), np.uint64(2**64 - 1),
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: f"{type(scalar).__name__}-{scalar!r}")
def test_a_numpy_scalar_comes_back_whole_with_its_type(scalar):
    back = decode_object(encode_object([scalar]))[0]
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    assert back == scalar
    if isinstance(scalar, (bytes, str)):
        assert len(back) == len(scalar)


STRANGE = [
    np.zeros(2, "V4"), np.zeros(2, [("a", "<i4")]), np.zeros(2, [("a", "<i4")])[0], np.void(b"ab\0"),
    np.array([None, {}]), np.ma.array([1, 2], mask=[False, True]), np.rec.array([(1,)], dtype=[("a", "<i4")]),
]  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE, ids=lambda strange: f"{type(strange).__name__}-{strange.dtype}")
def test_numpy_values_that_cannot_come_back_are_refused(strange):
    with pytest.raises(TypeError, match="field 'f' row 1: numpy"):
        encode_objects([1, strange], field="f")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint16", "uint64", "bool", "complex64"])
def test_a_torch_tensor_comes_back_with_its_dtype_and_shape(dtype):
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(2, 3).to(getattr(torch, dtype)), torch.empty(0, 2, dtype=getattr(torch, dtype))):
        back = decode_object(encode_object([tensor]))[0]
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"tools": [print]}, "value['tools'][0]"), ({1, 2}, "set"), (Colour.RED, "Colour"), ({1.5: 1}, "1.5"),
        ({True: 1}, "bool"), (collections.defaultdict(int), "defaultdict"), (np.array([object()]), "dtype object"),
        (object(), "object"), ("\ud800", "surrogates"), (bytearray(b"x"), "bytearray"), (1j, "complex"),
    ],
)  # fmt: skip
def test_a_type_that_cannot_come_back_is_refused_naming_field_row_and_place(value, names):
    with pytest.raises(TypeError) as caught:
        encode_object(value, field="extra_info", row=7)
    assert "field 'extra_info' row 7" in str(caught.value)
    assert names in str(caught.value)


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        encode_object(loop)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81\xa1", b"\xc7\x01\x09\x00", b"\xd4\x03\x00", b"\x91" * 100_000, b"\xc7\x03\x02abc"]
)
def test_bytes_that_no_producer_wrote_are_corrupt_and_never_another_error(data):
    with pytest.raises(Corrupt):
        decode_object(data)


def _types(value):
    if isinstance(value, dict):
        return (dict, [(type(k), _types(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [_types(v) for v in value])
    return type(value)


def trees(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=4) | st.integers(-(2**63), 2**64 - 1), inner, max_size=4)
            | st.tuples(inner, inner)
        ),
        max_leaves=8,
    )


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary()


@given(st.lists(trees(LEAVES), max_size=12))
def test_values_encoded_at_once_are_the_bytes_of_each_and_decode_at_once(values):
    encoded = encode_objects(values)
    assert encoded == [encode_object(value) for value in values]
    offsets = np.cumsum([0, *map(len, encoded)])
    decoded = decode_objects(np.frombuffer(b"".join(encoded), np.uint8), offsets)
    assert decoded == values
    assert repr(decoded) == repr(values)


class Flattened(str):
    pass


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("wrong", [Flattened("x"), {1, 2}, {None: 1}, object(), collections.OrderedDict(a=1)], ids=repr)
def test_a_value_of_another_type_anywhere_in_a_column_names_its_row(wrong, depth):
    for _ in range(depth):
        wrong = {"a": [wrong]}
    values = [{"a": ["x"]}] * 5 + [wrong]
    with pytest.raises(TypeError, match="field 'f' row 5"):
        encode_objects(values, field="f")


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"]])
def test_text_that_is_no_unicode_names_its_row(value):
    with pytest.raises(TypeError, match=r"field 'f' row 1: '\\ud800' is no valid text: .*; put bytes"):
        encode_objects(["a", value], field="f")


def test_a_value_that_contains_itself_is_an_error_however_often():
    cycle: list = []
    cycle.extend([cycle] * 100)
    with pytest.raises(TypeError, match="row 1: .*contains itself"):
        encode_objects(["a", cycle])


@pytest.mark.parametrize("size", [0, 1, 600])
def test_bytes_that_no_object_has_are_corrupt_in_a_column_too(size):
    good = encode_object("x" * size)
    data = np.frombuffer(good + b"\xc1" + good, np.uint8)
    with pytest.raises(Corrupt):
        decode_objects(data, np.array([0, len(good), len(good) + 1, 2 * len(good) + 1]))


@pytest.mark.parametrize("end", [1, (1,)], ids=["plain", "with a tuple"])
def test_a_value_whose_parts_are_shared_beyond_measure_is_refused_at_once(end):
    value: list = [end]
    for _ in range(30):
        value = [value, value]
    begun = time.monotonic()
    with pytest.raises(TypeError, match=r"field 'f' row 1: more than \d+ parts"):
        encode_objects(["a", value], field="f")
    assert time.monotonic() - begun < 30


def test_many_values_may_have_more_parts_together_than_one_may(monkeypatch):
    monkeypatch.setattr(objects, "MAX_PARTS", 100)
    values = [{"row": row, "ids": list(range(row))} for row in range(60)]
    assert encode_objects(values, parts=100) == [encode_object(value) for value in values]
    with pytest.raises(TypeError, match="row 60: more than"):
        encode_objects([*values, list(range(101))], parts=100)
    with pytest.raises(objects.Large):
        encode_objects(values, parts=99)


def test_an_array_of_no_bytes_a_row_is_refused_since_it_could_not_be_read():
    texts, names = (np.zeros(3, dtype=[("n", kind)])["n"] for kind in ("U0", "S0"))
    for array in (texts, names, texts.reshape(3, 1)):
        with pytest.raises(TypeError, match="takes no bytes"):
            encode_object([array], field="f")
    for readable in (np.str_(""), np.zeros(0, "U"), np.array([""])):
        assert repr(decode_object(encode_object(readable))) == repr(readable)
