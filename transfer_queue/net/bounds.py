"""What a request may hold: looked at by the client before it encodes one, and again by the controller.

Values are written out in full, so what is shared counts wherever it stands: `x = [x, x]`, forty times, has more parts
than anybody can send. They are walked level by level, for all values of a level at once, and never further than the
limit of their place, whatever they hold: themselves too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from numbers import Real
from typing import Any

import msgspec

from transfer_queue.errors import Invalid
from transfer_queue.keys import UNNAMED, check_given
from transfer_queue.net.argument_errors import verb_of
from transfer_queue.net.messages import (
    Admit,
    AdoptPartitions,
    Block,
    Commit,
    Fetch,
    GroupSpec,
    Mutation,
    OpenPartition,
    Query,
    SessionClose,
    Token,
)

MAX_TAG = 1 << 20
"""Bytes of a row's tag, packed: tags are told with every listing, and a frame has 64 MiB. Data belongs in a column."""

MAX_GROUP_TAG = 64 << 10
"""Bytes of a group's tag, packed: it is told with each of its changes, and with up to 256 others at once."""

TAG_PARTS = 2 * MAX_TAG
"""Parts and characters of a tag that are looked at before it is packed, and then measured."""

MAX_PARTS = 1 << 22
"""Parts and bytes of text of any other argument that is not just a list of names."""

TAGS_PARTS = 16 << 20
"""The same, of all tags of a request that are not flat."""

MAX_TEXT = 64 << 20
"""Characters of a list of names, or of all tags of a request: a frame takes no more bytes."""

MAX_LEVELS = 64
"""How deep a value may be nested; it may contain itself."""

MAX_WAIT = 30 * 86400.0
"""Seconds that anybody may wait."""

MAX_COUNT = 1 << 20
"""Rows that one request may ask for, or make."""

_PLAIN = frozenset({str, int, float, bool, type(None)})
_NUMBERS = _PLAIN - {str}
_SHORT = _NUMBERS | {Block, msgspec.Raw}
_PLAIN_CONTAINERS = frozenset({list, tuple, dict})
_SEQUENCES = (list, tuple, set, frozenset)
_SIZED = (str, bytes, bytearray, memoryview, msgspec.Raw, dict, *_SEQUENCES)
_NAMED = {"partition": "partition", "task": "task", "holder": "holder"}
_NAMED_LISTS = {"keys": "key", "uids": "uid", "fields": "field", "columns": "field"}


class NestedTooDeeply(Invalid, TypeError):
    """A value that contains itself, or might as well."""


def check_size(what: str, value: object, limit: int = MAX_PARTS, *, plain: bool = False) -> int:
    """How many parts and characters it has. Raises Invalid naming `what` for a value of more than `limit` of them, or
    nested too deeply; with `plain` also for one that holds other things than dict, list, str, int (64 bits), float,
    bool and None."""
    level: list[Any] = [value]
    left = limit
    for _ in range(MAX_LEVELS):
        kinds = set(map(type, level))
        if plain:
            _check_kinds(what, kinds, level)
        here = {
            kind: level if len(kinds) == 1 else [one for one in level if type(one) is kind] for kind in kinds - _NUMBERS
        }
        left -= sum(sum(map(len, values)) for kind, values in here.items() if issubclass(kind, _SIZED))
        if left < 0:
            raise Invalid(
                f"{what} has more than {limit} parts and characters (what is shared counts wherever it stands); put "
                "long data into a column, as arrays"
            )
        level = list(chain.from_iterable(_inside(what, kind, values) for kind, values in here.items()))
        if not level:
            return limit - left
    raise NestedTooDeeply(f"{what} is nested too deeply, or contains itself; {MAX_LEVELS} levels are the limit")


def _inside(what: str, kind: type, values: list[Any]) -> Iterable[Any]:
    if issubclass(kind, dict):
        return chain(chain.from_iterable(values), chain.from_iterable(map(dict.values, values)))
    if issubclass(kind, _SEQUENCES):
        return chain.from_iterable(values)
    if issubclass(kind, msgspec.Struct):
        return (getattr(one, name) for one in values for name in one.__struct_fields__)
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__"):
        raise TypeError(f"{what} holds a {kind.__qualname__}, which a message cannot hold; give a dict")
    return ()


def _check_kinds(what: str, kinds: set[type], level: list[Any]) -> None:
    for kind in kinds - _PLAIN - _PLAIN_CONTAINERS:
        raise Invalid(f"{what} is a {kind.__name__}; tags are plain values (use .item() or .tolist(), or put a column)")
    if int in kinds:
        for value in level:
            if type(value) is int and abs(value) >> 63:
                raise Invalid(f"{what} is {value if abs(value) >> 256 == 0 else 'an int'}, beyond 64 bits")


def check_wait(wait: Any, what: str = "wait") -> float:
    """Seconds that somebody is ready to wait. Raises TypeError or Invalid for what cannot be meant: every wait ends."""
    if not isinstance(wait, Real) or isinstance(wait, bool):
        raise TypeError(f"{what}={_shown(wait)} is a {type(wait).__name__}; give seconds, 0 to wait for nothing")
    try:
        seconds = float(wait)
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds <= MAX_WAIT:
        raise Invalid(f"{what}={_shown(wait)}; give seconds, from 0 to {MAX_WAIT:.0f} (30 days)")
    return seconds


def check_count(what: str, count: Any) -> int:
    """Rows that one request asks for, or makes. Raises Invalid."""
    if not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
        raise Invalid(f"{what}={_shown(count)}; expected 1 to {MAX_COUNT} rows; ask for more in several calls")
    return count


def check_names(body: Mutation | Query) -> None:
    """Names that are the queue's own, and counts and waits without an end, whoever sends them. Raises Invalid."""
    for name, what in _NAMED.items():
        value = getattr(body, name, None)
        if type(value) is str and value[:1] == UNNAMED:
            check_given(what, value)
            if isinstance(body, OpenPartition | Admit):
                raise Invalid(f"partition {value!r} begins with a NUL: a load fills it, it has no tasks and no groups")
    for name, what in _NAMED_LISTS.items():
        names = getattr(body, name, None)
        if type(names) is list:
            _check_given_all(what, names)
    wait = getattr(body, "wait", 0.0)
    if type(wait) in (float, int) and not wait <= MAX_WAIT:
        check_wait(wait)
    if isinstance(body, Fetch) and type(body.count) is int and body.count > MAX_COUNT:
        check_count("count", body.count)
    if isinstance(body, Admit | OpenPartition | Commit | AdoptPartitions):
        _check_inner_names(body)


def _check_inner_names(body: Admit | OpenPartition | Commit | AdoptPartitions) -> None:
    if isinstance(body, OpenPartition):
        for task in body.tasks:
            _check_given_all("task", [getattr(task, "name", None)])
            _check_given_all("field", getattr(task, "fields", []))
            if isinstance(ttl := getattr(task, "ttl", 0.0), float | int) and not ttl <= MAX_WAIT:
                raise Invalid(f"task {_shown(task.name)}: ttl={_shown(ttl)}; give at most {MAX_WAIT:.0f} s (30 days)")
    elif isinstance(body, AdoptPartitions):
        _check_given_all("partition", [*body.names, *body.names.values(), *body.consumed])
        _check_given_all("task", [*chain.from_iterable(body.consumed.values())])
    else:
        _check_given_all("field", [block.field for block in body.blocks])
        if isinstance(body, Admit):
            _check_given_all("uid", [getattr(spec, "uid", None) for spec in body.groups])
        for close in body.closes if isinstance(body, Commit) else ():
            _check_given_all("uid", [getattr(close, "uid", None)])
            _check_given_all("key", getattr(close, "rows", []))


def _check_given_all(what: str, names: list[Any]) -> None:
    for name in names:
        if type(name) is str and name[:1] == UNNAMED:
            check_given(what, name)


def check_request(body: Mutation | Query) -> None:
    """Raises Invalid or TypeError, naming the argument, for a request that is not to be encoded."""
    check_names(body)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        kind = type(value)
        if kind in _PLAIN or (not value and kind in _PLAIN_CONTAINERS):
            continue
        if kind is not list:
            if not (kind is Token and type(value.epoch) is int and type(value.counter) is int):
                _check_value(body, name, value)
        elif (kinds := set(map(type, value))) == {str}:
            if sum(map(len, value)) > MAX_TEXT:
                raise Invalid(f"{_argument(body, name)} has more than {MAX_TEXT} characters: send less at once")
        elif name == "tags" and isinstance(body, Commit):
            _check_tags(body.keys, value)
        elif name == "groups" and kinds == {GroupSpec}:
            _check_groups(value)
        elif not kinds <= _SHORT and not (kinds == {SessionClose} and _are_short(value)):
            check_size(_argument(body, name), value)


def _argument(body: Mutation | Query, name: str) -> str:
    return f"{verb_of(type(body).__name__)}: {name}"


def _check_value(body: Mutation | Query, name: str, value: Any) -> None:
    if serials := _serials(value):
        if sum(map(len, serials)) > MAX_TEXT:
            raise Invalid(f"{_argument(body, name)} has more than {MAX_TEXT // 8} serials: send less at once")
    else:
        check_size(_argument(body, name), value, TAG_PARTS if name == "sampling" else MAX_PARTS)


def _are_short(closes: list[SessionClose]) -> bool:
    """Whether these are what `check_size` would let pass, told for less in the usual case."""
    size = len(closes)
    for close in closes:
        if type(close.session) is not int or type(close.rows) is not list:
            return False
        if not {str}.issuperset(map(type, (close.uid, close.failed, *close.rows))):
            return False
        size += len(close.uid) + len(close.failed) + len(close.rows) + sum(map(len, close.rows))
    return size <= MAX_PARTS


def _serials(value: Any) -> list[bytes]:
    """Rows that an argument names by their serials: alone, or (AdoptPartitions) by partition and task."""
    if type(value) is dict and set(map(type, value.values())) == {dict}:
        found = list(chain.from_iterable(map(dict.values, value.values())))
        return found if set(map(type, found)) == {bytes} else []
    return [value] if type(value) is bytes else []


def _check_tags(keys: list[str], tags: list[Any]) -> None:
    if set(map(type, tags)) == {dict}:
        values, names = list(chain.from_iterable(map(dict.values, tags))), set(chain.from_iterable(tags))
        kinds = set(map(type, values))
        if kinds <= _PLAIN and {str}.issuperset(map(type, names)):
            text = sum(map(len, [one for one in values if type(one) is str])) if str in kinds else 0
            if text + max(map(len, names), default=0) * len(values) > MAX_TEXT:
                raise Invalid(f"put: the tags have more than {MAX_TEXT} characters: send less at once")
            return  # the usual case, looked at for all at once
    parts = 0
    for at, tag in enumerate(tags):
        what = f"the tag of {keys[at]!r}" if at < len(keys) else f"put: tags[{at}]"
        if type(tag) is not dict:
            check_size(what, tag, TAG_PARTS)
            continue
        check_all_tags(parts)
        for name, value in tag.items():
            if type(value) not in _PLAIN:
                parts += check_size(f"tag {name!r} of {keys[at]!r}" if at < len(keys) else what, value, TAG_PARTS)


def check_all_tags(parts: int) -> None:
    """Raises Invalid if tags of so many parts are too many for one request."""
    if parts > TAGS_PARTS:
        raise Invalid(f"the tags have more than {TAGS_PARTS} parts and characters: send less at once")


def _check_groups(groups: list[GroupSpec]) -> None:
    parts = 0
    for spec in groups:
        if not _PLAIN.issuperset((type(spec.uid), type(spec.n), type(spec.order), type(spec.min_sessions))):
            check_size("admit: groups", [spec.uid, spec.n, spec.order, spec.min_sessions], TAG_PARTS)
        if spec.tag:
            parts += check_size(f"the tag of group {_shown(spec.uid)}", spec.tag, TAG_PARTS)
            check_all_tags(parts)


def _shown(value: Any) -> str:
    """A wrong value in an error: short, and without walking through what it holds."""
    if isinstance(value, int):
        return repr(value) if abs(value) >> 256 == 0 else "an int of many digits"
    return repr(value)[:60] if isinstance(value, str | bytes | float) else type(value).__name__
