"""Sorting the keys a user gave: known, verl's without effect here, verl's not available yet, unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from streamrl.config.advice import as_spelt_here, remedy
from streamrl.config.schema import is_open, known_keys, sections, show
from streamrl.config.verl_keys import (
    INERT,
    INERT_ITEMS,
    MEANT,
    MIRRORED,
    OF_SGLANG,
    OF_VLLM,
    OTHER_SERVERS,
    REFUSED,
    RENAMED,
    SERVER,
    SGLANG_AT,
    SUBSTITUTED,
    UNAVAILABLE,
)


@dataclass(slots=True)
class SortedKeys:
    values: dict[str, Any] = field(default_factory=dict)
    """Known keys only, nested."""
    inert: list[str] = field(default_factory=list)
    """Dotted keys that were accepted and do nothing, or something else than their name says."""
    mirrored: dict[str, Any] = field(default_factory=dict)
    """Those of them that repeat a key of ours, and their values (verl_keys.MIRRORED)."""
    problems: list[str] = field(default_factory=list)
    """One message per key that is unknown or asks for what does not exist yet."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf. Mappings under an open key stay whole, so does an empty mapping."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        hint = known_keys().get(key)
        if isinstance(value, Mapping) and value and not (hint is not None and is_open(hint)):
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def sort_keys(tree: Mapping[str, Any], *, like_verl: bool = False) -> SortedKeys:
    """The keys of a nested mapping, sorted. `like_verl`: written for verl, so that what stands in for a value that does
    not exist here is taken and noted."""
    result = SortedKeys()
    renamed = [(_renamed(key), key, value) for key, value in flatten(tree)]
    servers = {value for key, _, value in renamed if key == SERVER}
    reached = any(key in SGLANG_AT and value for key, _, value in renamed)
    sglang = "sglang" in servers and (reached or not like_verl)
    without_vllm = servers - {"vllm"}
    for key, _, value in sorted(renamed, key=lambda item: item[0] != item[1]):  # over the default in its place now
        if "_target_" in key.split(".") or _has_target(value):
            result.problems.append(f"{key}: nothing in the configuration runs code, so _target_ is refused")
        elif without_vllm and key in OF_VLLM and not (sglang and key in OF_SGLANG):
            if value != OF_VLLM[key]:
                result.inert.append(key)
        elif key == SERVER and not like_verl and value in OTHER_SERVERS:
            result.problems.append(
                f"{key}={value}: there is no such kind here, but torch, vllm, sglang and sim; one of your own is "
                "actor_rollout_ref.rollout.server=path/to/file.py:function (docs/rollout.md#another-kind-of-server)"
            )
        elif key in known_keys():
            path: list[str] = [*key.split(".")]
            instead = like_verl and not (sglang and key == SERVER)
            _put(result.values, path, _as_ours(key, value, result.inert, instead=instead))
        elif key in UNAVAILABLE:
            if value not in UNAVAILABLE[key]:
                result.problems.append(_unavailable(key, value, UNAVAILABLE[key]))
            elif isinstance(value, str) and (ours := MEANT.get(key, {}).get(value)):
                result.inert.append(f"{key}={value} ({ours})")
        elif _matches(key, INERT):
            result.inert.append(key)
            if key in MIRRORED and value is not None:
                result.mirrored[key] = value
        elif _matches(key, REFUSED):
            if value not in ({}, None):
                result.problems.append(_unavailable(key, value))
        elif key in sections():
            if value not in ({}, None):
                result.problems.append(
                    f"{key}={show(value)}: {key} is a section; its keys are {', '.join(_children(key))}"
                )
        else:
            result.problems.append(_unknown(key))
    return result


def disagreements(mirrored: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One message per key that repeats one of `ours` (flat) with another value."""
    return [
        f"{key}={show(value)} differs from {MIRRORED[key]}={show(ours[MIRRORED[key]])}, which is what counts here; "
        "leave it out or make them the same"
        for key, value in mirrored.items()
        if value != ours[MIRRORED[key]]
    ]


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _unavailable(key: str, value: Any, usual: tuple[Any, ...] = ()) -> str:
    instead = f" or set {show(usual[0])}" if usual else ""
    advice = f" ({text})" if (text := remedy(key)) else ""
    return f"{key}={show(value)} is not available yet; leave it out{instead}{advice}"


def _has_target(value: Any) -> bool:
    return isinstance(value, Mapping) and any(name == "_target_" or _has_target(item) for name, item in value.items())


def _as_ours(key: str, value: Any, inert: list[str], *, instead: bool) -> Any:
    """The value without what has no effect here, or, if `instead`, the one that takes its place."""
    for item in INERT_ITEMS.get(key, ()):
        if isinstance(value, Mapping) and item in value:
            inert.append(f"{key}.{item}")
            value = {name: given for name, given in value.items() if name != item}
        elif value == item or (isinstance(value, list) and item in value):
            inert.append(f"{key}={item}")
            value = [other for other in value if other != item] if isinstance(value, list) else []
    if instead and isinstance(value, str) and (ours := SUBSTITUTED.get(key, {}).get(value)):
        inert.append(f"{key}={value} ({ours} instead)")
        value = ours
    return value


def _renamed(key: str) -> str:
    for old, new in RENAMED.items():
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return key


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _children(section: str) -> list[str]:
    prefix = section + "."
    return sorted({key[len(prefix) :].split(".")[0] for key in known_keys() if key.startswith(prefix)})


def _unknown(key: str) -> str:
    near = nearest(key)
    if near is not None and near not in known_keys():
        return f"unknown key {key}; verl's {near} is not available yet" + (f" ({remedy(near)})" if remedy(near) else "")
    hint = f"did you mean {near}?" if near else "`streamrl train --dry-run experiment=calculator` prints all keys"
    return f"unknown key {key}; {hint}"


def nearest(key: str) -> str | None:
    """The known key that `key` most likely means: spelt as elsewhere, with a prefix forgotten, misplaced, or misspelt.
    It may be one of verl's that is not available."""
    known = list(known_keys())
    if (ours := as_spelt_here(key)) in known:
        return ours
    forgotten = [name for name in (*known, *UNAVAILABLE) if name.endswith("." + key)]
    if len(forgotten) == 1:
        return forgotten[0]
    section, _, last = key.rpartition(".")
    deeper = [name for name in known if name.startswith(section + ".") and name.endswith("." + last)]
    if len(deeper) == 1:
        return deeper[0]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if close:
        return close[0]
    same = [name for name in known if name.rsplit(".", 1)[-1] == last]
    return next(iter(difflib.get_close_matches(key, same or known, n=1, cutoff=0.0 if same else 0.75)), None)
