"""Tags as callers have them: numbers may still be arrays or tensors of one element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.net.messages import Tag

_PLAIN = frozenset({str, int, float, bool, type(None)})


def plain_tags(tags: Sequence[Tag]) -> list[Tag]:
    """The tags with plain values in place of numpy's and torch's: a number for one element, lists for more.

    Raises TypeError for a tag that is no dict.
    """
    return [_plain_tag(tag) for tag in tags]


def _plain_tag(tag: Tag) -> Tag:
    if not isinstance(tag, dict):
        raise TypeError(f"a tag is a dict of plain values, got {tag!r}")
    if all(type(value) in _PLAIN for value in tag.values()):
        return tag
    return {name: _plain(value) for name, value in tag.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if type(value) not in _PLAIN and hasattr(value, "tolist") else value
