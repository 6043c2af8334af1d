"""Which argument of a request is wrong: in words of its caller, once encoding or decoding has failed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from transfer_queue.errors import Invalid

_VERBS = {"Commit": "put", "SegmentRequest": "put", "Seal": "put", "ListKeys": "list", "Find": "lookup"}

_STEPS = 2
"""Steps to the tag of a key: of what has no end, no more are told."""

_ENCODE = msgspec.msgpack.Encoder().encode
_PYTHON = {"`array`": "a list", "`object`": "a dict", "`None`": "None"}


@lru_cache(256)
def verb_of(message: str) -> str:
    """What a client calls to send this message: Commit is put, OpenPartition is open_partition."""
    return _VERBS.get(message) or re.sub("(?<=[a-z])(?=[A-Z])", "_", message).lower()


def refused_by_decoder(error: msgspec.ValidationError, verb: str) -> Invalid:
    """For a request of `verb` whose body does not fit: "put: keys[0]: Expected `str`, got None"."""
    message, verb = verb, verb_of(verb)
    what, _, place = str(error).partition(" - at `$[1]")
    argument = place.rstrip("`").lstrip(".")
    for name, meant in _PYTHON.items():
        what = what.replace(name, meant)
    if what.startswith("Invalid enum value") and (allowed := _allowed(message, argument)):
        what += f"; expected one of {', '.join(map(repr, allowed))}"
    if argument == "token":
        what += "; give the token of the lease, as `lease` returned it"
    return Invalid(f"{verb}: {argument}: {what}" if argument else f"{verb}: {what}")


def _allowed(message: str, argument: str) -> tuple[Any, ...]:
    """What a Literal at `tasks[0].stage` of a message may be."""
    from transfer_queue.net import messages

    kind = getattr(messages, message, None)
    for name in re.sub(r"\[[^]]*\]", "", argument).split("."):
        hints = get_type_hints(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}
        kind = hints.get(name)
        if get_origin(kind) is list:
            (kind,) = get_args(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def refused_by_encoder(error: Exception, body: Any) -> Exception:
    """For a request with a value that no message can hold: a TypeError for its type, else Invalid; it names the place,
    in a tag the key and the name."""
    nowhere: tuple[str, tuple[Any, ...], Any] = ("body", (), None)
    name, place, value = next(_unfit(body), nowhere)
    keys = getattr(body, "keys", None)
    if name == "tags" and keys and place and (index := place[0]) < len(keys):
        rest = place[1:]
        where = f"tag {rest[0]!r} of {keys[index]!r}" if rest else f"the tag of {keys[index]!r}"
    else:
        where = f"{verb_of(type(body).__name__)}: {name}" + "".join(f"[{step!r}]" for step in place)
    if isinstance(value, int):
        return Invalid(f"{where} is {value if abs(value) >> 256 == 0 else 'an int'}, beyond 64 bits")
    if isinstance(value, str):
        return Invalid(f"{where} is {value[:60]!r}, which is no valid text: it has surrogates (bytes, once, not UTF-8)")
    if isinstance(error, RecursionError):
        return TypeError(f"{where} is nested too deeply, or contains itself")
    return TypeError(f"{where} is a {type(value).__name__}, which a message cannot hold ({error})")


def _unfit(body: msgspec.Struct) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """The innermost values that cannot be encoded, by field and the way to them."""
    for name in body.__struct_fields__:
        for place, value in _inside(getattr(body, name)):
            yield name, place, value


def _inside(value: Any, depth: int = 0) -> Iterator[tuple[tuple[Any, ...], Any]]:
    try:
        _ENCODE(value)
    except RecursionError:
        if depth == _STEPS:
            yield (), value
            return
    except (TypeError, ValueError, OverflowError):
        pass
    else:
        return
    if isinstance(value, msgspec.Struct):
        steps = [(name, getattr(value, name)) for name in value.__struct_fields__]
    elif isinstance(value, dict):
        steps = [*((key, key) for key in value), *value.items()]
    elif isinstance(value, list | tuple):
        steps = list(enumerate(value))
    else:
        yield (), value
        return
    for step, part in steps:
        for place, unfit in _inside(part, depth + 1):
            yield (step, *place), unfit
