"""Tags as the ledger keeps them: the msgpack bytes in which they came, one object a row.

A dict of seven scalars takes 600 bytes in Python and 110 packed. They are decoded only to be checked, once, and to be
merged; readers get the bytes as they are (`shown`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Annotated, Any, cast

import msgspec

from transfer_queue.errors import Invalid
from transfer_queue.ledger.checks import check_tag
from transfer_queue.net.bounds import MAX_TAG
from transfer_queue.net.messages import PackedTag, Tag

EMPTY = msgspec.msgpack.encode({})

MAX_TAGS = 32 << 20
"""Bytes of tags in the answer to a change: that it is too large must be known before the change is made."""

PAGE_TAGS = 4 << 20
"""Bytes of tags in one part of an answer, unless one row has more."""

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_encode = msgspec.msgpack.Encoder().encode
_check_flat = msgspec.msgpack.Decoder(dict[str, bool | _Int64 | float | str | None]).decode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


def pack(key: str, tag: PackedTag) -> bytes:
    """A tag of a message. Raises Invalid, naming `key`, unless it holds plain values only."""
    if isinstance(tag, dict):
        check_tag(key, tag)
        return check_size(key, _encode(tag)) if tag else EMPTY
    check_size(key, tag)
    try:
        found = _check_flat(tag)
    except msgspec.ValidationError:
        found = _nested(key, tag)
    except msgspec.DecodeError as error:
        raise Invalid(f"the tag of {key!r} is not msgpack: {error}") from error
    return bytes(tag) if found else EMPTY


def check_size(key: str, tag: Sized, limit: int = MAX_TAG) -> Any:
    """The packed tag. Raises Invalid, naming `key`, if it is too large."""
    if len(tag) > limit:
        raise Invalid(
            f"the tag of {key!r} takes {len(tag)} bytes, the limit is {limit}: tags are told with every listing; put "
            "it into a column"
        )
    return tag


def check_sizes(what: str, tags: Iterable[Sized]) -> None:
    """Raises Invalid if an answer with all these tags is too large."""
    nbytes = sum(map(len, tags))
    if nbytes > MAX_TAGS:
        raise Invalid(f"the answer to {what} would tell {nbytes} bytes of tags, the limit is {MAX_TAGS}: fewer at once")


def fitting(tags: Iterable[Sized]) -> int:
    """How many of the tags, from the first, fit into one part of an answer; at least one."""
    nbytes, count = 0, 0
    for tag in tags:
        nbytes += len(tag)
        if count and nbytes > PAGE_TAGS:
            break
        count += 1
    return count


def pack_all(keys: Sequence[str], tags: Sequence[PackedTag]) -> list[bytes]:
    """`pack` of each."""
    return [pack(key, tag) for key, tag in zip(keys, tags, strict=True)]


def merge(old: bytes, new: bytes) -> bytes:
    """The tag with the entries of both; where both have one, that of `new`."""
    if old == EMPTY:
        return new
    if new == EMPTY:
        return old
    return _encode({**_decode(old), **_decode(new)})


def unpack(tag: bytes) -> Tag:
    return _decode(tag)


def shown(tag: bytes) -> Tag:
    """The tag as it goes into a reply: its bytes, which are the tag once the reply is encoded."""
    return cast(Tag, msgspec.Raw(tag))


def shown_all(tags: Iterable[bytes]) -> list[Tag]:
    """`shown` of each."""
    return cast(list[Tag], list(map(msgspec.Raw, tags)))


def _nested(key: str, tag: msgspec.Raw) -> Tag:
    """A tag with lists, dicts, or something that is no plain value."""
    try:
        found = _decode(tag)
    except msgspec.MsgspecError as error:
        raise Invalid(f"the tag of {key!r} is none: {error}") from error
    check_tag(key, found)
    return found
