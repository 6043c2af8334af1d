"""Object columns: the same value of the same type comes back, or the producer is told what cannot."""

from __future__ import annotations

import collections
import enum

import numpy as np
import pytest

from transfer_queue.errors import Corrupt
from transfer_queue.storage.objects import decode_object, encode_object


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
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
