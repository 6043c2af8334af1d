"""The configuration seen as a set of dotted keys: which exist, of which type, and how a value becomes typed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from streamrl.config.root import StreamRLConfig
from streamrl.errors import shortened


@cache
def hints(section: type) -> dict[str, Any]:
    """Field name -> annotation, with limits."""
    return get_type_hints(section, include_extras=True)


@cache
def known_keys() -> dict[str, Any]:
    """Dotted key -> annotation, for every leaf of the tree."""
    return dict(_leaves(StreamRLConfig, ""))


def _leaves(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in hints(section).items():
        if is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name, hint


@cache
def sections() -> set[str]:
    """Dotted names of the inner nodes."""
    return {key.rsplit(".", depth)[0] for key in known_keys() for depth in range(1, key.count(".") + 1)}


def is_open(hint: Any) -> bool:
    """Whether a key's value is a mapping with free names."""
    return get_origin(hint) is dict


@cache
def named_sets() -> tuple[str, ...]:
    """Keys whose value maps names to settings; a list of names does as well."""
    return tuple(key for key, hint in known_keys().items() if is_open(hint) and is_open(get_args(hint)[1]))


def build(values: Mapping[str, Any], problems: list[str]) -> StreamRLConfig:
    """The typed configuration from nested plain values of known keys; absent keys keep their defaults.

    Adds to `problems` one message per wrong value, whose key then keeps its default.
    """
    return _build(StreamRLConfig, values, "", problems)


def _build(section: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    chosen: dict[str, Any] = {}
    for field in fields(section):
        if field.name not in values:
            continue
        key, value, hint = prefix + field.name, values[field.name], hints(section)[field.name]
        if is_dataclass(hint):
            chosen[field.name] = _build(hint, value, f"{key}.", problems)  # type: ignore[arg-type]
            continue
        try:
            chosen[field.name] = _leaf(value, hint)
        except (msgspec.ValidationError, ValueError):
            problems.append(f"{key}={show(value)} is not allowed; it takes {describe(hint)}")
    return section(**chosen)


def _leaf(value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple and isinstance(value, str):
        value = [value]  # verl writes both data.train_files=a and data.train_files=[a,b]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    return msgspec.convert(value, type=hint, strict=True)


def show(value: Any) -> str:
    """A value as a user would type it, cut if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = shortened(value)
        return repr(text) if not text or " " in text.partition("... (")[0] else text
    try:
        return shortened(str(value))
    except (RecursionError, ValueError) as error:  # an integer of thousands of digits
        return f"a {type(value).__name__} ({error})"


_WORDS: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null", Any: "any value",
}  # fmt: skip


def describe(hint: Any) -> str:
    """What a key takes, in words: "an integer >= 1 or null"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [(sign, getattr(args[1], name)) for name, sign in _LIMITS]
        return f"{describe(args[0])} " + " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)
    if origin is Literal:
        only = [show(choice) for choice in args]
        return f"only {only[0]}" if len(only) == 1 else "one of " + ", ".join(only)
    if origin in (Union, UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple:
        inner = describe(args[0])
        return f"a list of: {inner}" if args[-1] is Ellipsis else f"a list of {len(args)}, each {inner}"
    if origin is dict:
        if is_open(args[1]):
            return "a list of names (or {tool: name, setting: value}), or a mapping from names to mappings"
        lists = any(get_origin(arg) is list for arg in get_args(args[1]))
        return "a mapping to plain values" + (" or lists of them" if lists else "")
    return _WORDS.get(hint, str(hint))


_LIMITS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("pattern", "matching"))
