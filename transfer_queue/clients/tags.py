"""Tags as callers have them: numbers may still be arrays or tensors of one element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from transfer_queue.errors import Invalid
from transfer_queue.ledger.checks import check_plain
from transfer_queue.net.bounds import TAG_PARTS, check_all_tags
from transfer_queue.net.messages import Tag

_NAMES = frozenset({str})
_PLAIN = frozenset({str, int, float, bool, type(None)})


def plain_tags(keys: Sequence[str], tags: Sequence[Tag]) -> list[Tag]:
    """The tags with plain values in place of numpy's and torch's: a number for one element, lists for more.

    Raises TypeError for a tag that is no dict, Invalid for a value that cannot be a tag; both name the key.
    """
    if (
        set(map(type, tags)) == {dict}
        and _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, tags))))
        and _NAMES.issuperset(map(type, chain.from_iterable(tags)))
    ):
        return list(tags)  # the usual case, looked at for all at once
    plain, parts = [], 0
    for key, tag in zip(keys, tags, strict=True):
        found, more = _plain_tag(key, tag)
        plain.append(found)
        check_all_tags(parts := parts + more)
    return plain


def _plain_tag(key: str, tag: Tag) -> tuple[Tag, int]:
    """The tag with plain values, and how many parts those have that are not just one."""
    if not isinstance(tag, dict):
        raise TypeError(f"the tag of {key!r} is {tag!r}; a tag is a dict of plain values")
    for name in tag:
        if not isinstance(name, str):
            raise Invalid(f"the tag of {key!r} has a name {name!r} that is a {type(name).__name__}; names are strings")
    if all(type(value) in _PLAIN for value in tag.values()):
        return tag, 0
    plain = {name: _plain(f"tag {name!r} of {key!r}", value) for name, value in tag.items()}
    return plain, sum(check_plain(f"tag {name!r} of {key!r}", value) for name, value in plain.items())


def _plain(what: str, value: Any) -> Any:
    if type(value) in _PLAIN or not hasattr(value, "tolist"):
        return value
    if (size := math.prod(getattr(value, "shape", ()))) > TAG_PARTS:
        raise Invalid(f"{what} is an array of {size} numbers; put it into a column")
    return value.tolist()
