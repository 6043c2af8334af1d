"""Python objects as bytes: a value comes back with the same type, or its producer gets a TypeError.

Plain msgpack carries dict (str or int keys), list, str, bytes, bool, int, float and None; extension types carry what
msgpack would lose: tuples, integers beyond 64 bits, numpy arrays and scalars, torch tensors. Types are matched
exactly, so a subclass (an Enum, a defaultdict, a numpy float that is also a float) is never flattened silently.
Nothing is ever unpickled or imported by name; torch is imported only to make a tensor that the bytes hold.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import Corrupt
from transfer_queue.storage.tensors import TORCH_DTYPES, why_not_storable

_TUPLE, _BIG_INT, _ARRAY, _SCALAR, _TENSOR = 1, 2, 3, 4, 5

_ARRAY_KINDS = "biufcmMUS"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}][0-9]{{1,9}}(\[[0-9]{{0,9}}[A-Za-z]{{1,2}}\])?")
_PLAIN = frozenset({str, bool, float, type(None), bytes})
_LEAVES = _PLAIN | {int}
_CARRIED = _LEAVES | {dict, list}
_KEYS = frozenset({str, int})
_ITEM_BYTES = {name: int(re.sub(r"\D", "", name) or 8) // 8 for name in TORCH_DTYPES}

_MAX_LEVELS = 64
"""Deeper than this is looked at value by value; it may contain itself."""

MAX_PARTS = 1 << 22
"""Parts that a value may have, each counted wherever it stands: values are written out in full, and thirty times
`x = [x, x]` is more than anybody can store."""

_LONG_VALUE = 512
"""Bytes of a value from which decoding one by one costs less than a copy of all."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


class _ArrayHead(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(_ArrayHead)


class Large(Exception):
    """Values that take longer to pack than an event loop should stand still."""


def encode_object(value: Any, *, field: str = "value", row: int = 0) -> bytes:
    """`value` as msgpack. Raises TypeError naming field, row, the path inside the value and the type."""
    try:
        return _encode(value, field, row, [MAX_PARTS])
    except _TooManyParts:
        raise _too_large(field, row) from None


def encode_objects(values: Sequence[Any], *, field: str = "value", parts: int = MAX_PARTS) -> list[bytes]:
    """Each of `values` as msgpack. Raises TypeError as `encode_object` does; if `parts` are fewer than MAX_PARTS, Large
    when all values together have more."""
    encoded: list[bytes] = []
    try:
        _encode_into(encoded, values, field, parts)
    except _TooManyParts:
        raise Large from None
    return encoded


def _encode_into(encoded: list[bytes], values: Sequence[Any], field: str, parts: int) -> None:
    try:
        if _carried(values, parts):
            encoded += list(map(_encoder.encode, values))
            return
    except (RecursionError, OverflowError, UnicodeEncodeError, ValueError):
        pass  # value by value tells which it is, or stores it as an extension
    except _TooManyParts:
        if parts < MAX_PARTS:
            raise
        if len(values) == 1:
            raise _too_large(field, len(encoded)) from None
        for half in (values[: len(values) // 2], values[len(values) // 2 :]):
            _encode_into(encoded, half, field, parts)
        return
    if parts == MAX_PARTS:
        encoded += [encode_object(value, field=field, row=row) for row, value in enumerate(values, len(encoded))]
        return
    left = [parts]
    encoded += [_encode(value, field, row, left) for row, value in enumerate(values, len(encoded))]


def _encode(value: Any, field: str, row: int, left: list[int]) -> bytes:
    try:
        return _encoder.encode(_pack(value, "", left))
    except _Unsupported as error:
        raise TypeError(f"field {field!r} row {row}: {error.args[0]}") from None
    except RecursionError:
        raise TypeError(f"field {field!r} row {row}: nested too deeply, or contains itself") from None
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 30) : error.start + 30]
        raise TypeError(
            f"field {field!r} row {row}: {text!r} is no valid text: it has surrogates (bytes, once, not UTF-8); put "
            "bytes, or `.encode(errors='replace').decode()`"
        ) from None
    except (OverflowError, ValueError) as error:
        raise TypeError(f"field {field!r} row {row}: {error}") from None


def _too_large(field: str, row: int) -> TypeError:
    return TypeError(
        f"field {field!r} row {row}: more than {MAX_PARTS} parts (one that is shared counts wherever it stands), or "
        "contains itself; put long data as arrays"
    )


def decode_objects(data: np.ndarray, offsets: np.ndarray) -> list[Any]:
    """The values that lie at `data[offsets[i] : offsets[i + 1]]`. Raises Corrupt."""
    rows, total = len(offsets) - 1, int(offsets[-1])
    if rows > 1 and total < _LONG_VALUE * rows and int(offsets[0]) == 0:
        try:
            return _list_decoder.decode(b"\xdd" + rows.to_bytes(4, "big") + data[:total].tobytes())  # as one array
        except (msgspec.DecodeError, RuntimeError, TypeError, ValueError, OverflowError):
            pass  # value by value tells which it is
    view = data.data
    return [decode_object(view[a:b]) for a, b in pairwise(offsets.tolist())]


def decode_object(data: bytes | memoryview | np.ndarray) -> Any:
    """The value again. Raises Corrupt for bytes that `encode_object` cannot have made."""
    try:
        return _decoder.decode(data.data if isinstance(data, np.ndarray) else data)
    except (msgspec.DecodeError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise Corrupt(f"an object of {len(data)} bytes cannot be decoded: {error}") from error


def check_objects(data: np.ndarray, offsets: np.ndarray) -> None:
    """Whether `decode_objects` would give values. Raises Corrupt. No tensors are made, so torch need not be there."""
    view = data.data
    for row, (a, b) in enumerate(pairwise(offsets.tolist())):
        try:
            _checker.decode(view[a:b])
        except (msgspec.DecodeError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise Corrupt(f"the object of row {row} ({b - a} bytes) cannot be decoded: {error}") from error


class _Unsupported(Exception):
    pass


class _TooManyParts(Exception):
    pass


def _of(kind: type, kinds: set[type], values: list[Any]) -> list[Any]:
    """Those of a kind."""
    if kind not in kinds:
        return []
    return values if len(kinds) == 1 else [value for value in values if type(value) is kind]


def _carried(values: Sequence[Any], parts: int) -> bool:
    """Whether msgpack carries all of these as they are: told level by level, for all values at once. Raises
    _TooManyParts if they have more than `parts`."""
    level: list[Any] = list(values)
    for _ in range(_MAX_LEVELS):
        kinds = set(map(type, level))
        if not kinds <= _CARRIED:
            return False
        if kinds <= _LEAVES:  # the usual end, at the first or second level
            return True
        dicts, lists = _of(dict, kinds, level), _of(list, kinds, level)
        parts -= sum(map(len, dicts)) + sum(map(len, lists))
        if parts < 0:
            raise _TooManyParts
        if not set(map(type, chain.from_iterable(dicts))) <= _KEYS:
            return False
        level = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]
        if not level:
            return True
    return False


def _pack(value: Any, path: str, left: list[int]) -> Any:
    """`value`, with what msgpack would lose replaced by extensions. Raises _TooManyParts once it has more parts than
    `left[0]`, from which they are taken off."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else msgspec.msgpack.Ext(_BIG_INT, str(value).encode())
    if kind is dict or kind is list or kind is tuple:
        left[0] -= len(value)
        if left[0] < 0:
            raise _TooManyParts
    if kind is dict:
        return {_key(k, path): _pack(v, f"{path}[{k!r}]", left) for k, v in value.items()}
    if kind is list:
        return [_pack(v, f"{path}[{i}]", left) for i, v in enumerate(value)]
    if kind is tuple:
        items = [_pack(v, f"{path}[{i}]", left) for i, v in enumerate(value)]
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(items))
    if kind is np.ndarray:
        return _pack_array(_ARRAY, value, path)
    if kind is np.bytes_ or kind is np.str_:
        return _pack_text(value)
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        return _pack_array(_SCALAR, np.asarray(value), path)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return _pack_tensor(value, path)
    raise _Unsupported(
        f"{kind.__module__}.{kind.__qualname__} at value{path} cannot be stored; use dict, list, tuple, str, bytes, "
        "bool, int, float, None, numpy arrays or torch tensors"
    )


def _key(key: Any, path: str) -> Any:
    if type(key) is str or (type(key) is int and _INT_MIN <= key <= _INT_MAX):
        return key
    raise _Unsupported(f"dict key {key!r} at value{path} is {type(key).__qualname__}; keys must be str or 64-bit int")


def _pack_array(code: int, array: np.ndarray, path: str) -> Any:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise _Unsupported(
            f"numpy dtype {array.dtype} at value{path} cannot be stored; use numbers, dates, text, or a dict of arrays"
        )
    if not array.dtype.itemsize:
        raise _Unsupported(f"numpy dtype {array.dtype} at value{path} takes no bytes; use `.astype('U1')` or a list")
    head = _ArrayHead(array.dtype.str, array.shape, array.tobytes())
    return msgspec.msgpack.Ext(code, _encoder.encode(head))


def _pack_text(value: np.bytes_ | np.str_) -> Any:
    """Not as an array of one, of which numpy would cut NULs at the end."""
    if isinstance(value, np.str_):
        head = _ArrayHead(f"<U{len(value)}", (), value.encode("utf-32-le", "surrogatepass"))
    else:
        head = _ArrayHead(f"|S{len(value)}", (), bytes(value))
    return msgspec.msgpack.Ext(_SCALAR, _encoder.encode(head))


def _pack_tensor(tensor: Any, path: str) -> Any:
    torch = sys.modules["torch"]
    if why := why_not_storable(tensor):
        raise _Unsupported(f"value{path} {why}")
    name = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    head = _ArrayHead(name, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return msgspec.msgpack.Ext(_TENSOR, _encoder.encode(head))


def _unpack(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(_decoder.decode(data))
    if code == _BIG_INT:
        return int(bytes(data).decode("ascii"))
    if code == _ARRAY:
        return _unpack_array(_head_decoder.decode(data))
    if code == _SCALAR:
        head = _head_decoder.decode(data)
        return _unpack_text(head) if head.dtype[1:2] in ("S", "U") else _unpack_array(head)[()]
    if code == _TENSOR:
        return _unpack_tensor(_head_decoder.decode(data))
    raise ValueError(f"unknown extension type {code}")


def _unpack_array(head: _ArrayHead) -> np.ndarray:
    if not _ARRAY_DTYPE.fullmatch(head.dtype):  # numpy would take sentences in its own language, and compile them
        raise ValueError(f"array dtype {head.dtype!r} is not allowed")
    dtype = np.dtype(head.dtype)
    return np.frombuffer(bytearray(head.data), dtype=dtype).reshape(head.shape)


def _unpack_text(head: _ArrayHead) -> np.bytes_ | np.str_:
    kind, unit = (np.bytes_, 1) if head.dtype.startswith("|S") else (np.str_, 4)
    if head.dtype != f"{'|S' if unit == 1 else '<U'}{len(head.data) // unit}" or len(head.data) % unit or head.shape:
        raise ValueError(f"{head.dtype!r} of shape {head.shape} in {len(head.data)} bytes is no numpy text")
    return kind(head.data) if unit == 1 else kind(head.data.decode("utf-32-le", "surrogatepass"))


def _check_tensor(head: _ArrayHead) -> None:
    """What can be told without torch. Raises ValueError."""
    if head.dtype not in TORCH_DTYPES:
        raise ValueError(f"tensor dtype {head.dtype!r} is not allowed")
    if min(head.shape, default=0) < 0 or math.prod(head.shape) * _ITEM_BYTES[head.dtype] != len(head.data):
        raise ValueError(f"a {head.dtype} tensor of shape {head.shape} does not lie in {len(head.data)} bytes")


def _unpack_tensor(head: _ArrayHead) -> Any:
    _check_tensor(head)
    import torch

    dtype = getattr(torch, head.dtype)
    if not head.data:
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(bytearray(head.data), dtype=dtype).reshape(head.shape)


def _check_ext(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(_checker.decode(data))
    if code == _TENSOR:
        return _check_tensor(_head_decoder.decode(data))
    return _unpack(code, data)


_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack)
_checker = msgspec.msgpack.Decoder(ext_hook=_check_ext)
_list_decoder = msgspec.msgpack.Decoder(list, ext_hook=_unpack)
