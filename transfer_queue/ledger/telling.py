"""How many bytes groups take in an answer: leases and changes tell so many groups as fit, and at least one."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.errors import Invalid
from transfer_queue.ledger.groups import Group
from transfer_queue.ledger.partition import Partition

PAGE_GROUPS = 8 << 20
"""Bytes of groups in one answer, unless one group has more."""

MAX_TOLD = 40 << 20
"""Bytes of keys and tags that the rows of a group may have; a frame has 64 MiB. Its sessions share them evenly, so that
none can keep the group from being told, and one that has too much can still end as failed."""

ROW, GROUP = 16, 256
"""Bytes of a row and of a group besides what is counted."""

MAX_KEY = 2 << 10
"""Bytes of a key at most: 512 characters."""


def nbytes_of(p: Partition, group: Group) -> int:
    """Bytes of `p.view(group)` in an answer, or a little more."""
    nbytes = GROUP + len(group.tag) + 4 * (len(group.uid) + len(group.reason)) + 5 * group.n
    if group.state in ("ready", "training"):
        rows = group.rows()
        nbytes += ROW * len(rows)
        nbytes += sum(map(len, map(p.rows.tags.__getitem__, rows)))
        nbytes += sum(4 * len(p.rows.keys[row]) for row in rows)
    return nbytes


def fitting_groups(p: Partition, groups: Sequence[Group], limit: int = PAGE_GROUPS) -> int:
    """How many of the groups, from the first, fit into one answer; at least one."""
    if surely_fit(p, groups, limit):
        return len(groups)
    nbytes = 0
    for count, group in enumerate(groups):
        nbytes += nbytes_of(p, group)
        if count and nbytes > limit:
            return count
    return len(groups)


def surely_fit(p: Partition, groups: Sequence[Group], limit: int) -> bool:
    """Whether all of them fit, if each row had the largest tag that there ever was. Some microseconds: what is nearly
    always so should cost nothing."""
    rows = sum([group.row_count() for group in groups])
    each = GROUP + MAX_KEY
    heads = sum([each + len(group.tag) + 4 * len(group.reason) + 5 * group.n for group in groups])
    return heads + rows * (ROW + MAX_KEY + p.rows.largest_tag) <= limit


def check_told(group: Group, session: int, nbytes: int) -> None:
    """Raises Invalid if a session has more keys and tags than is its share."""
    limit = MAX_TOLD // group.n
    if nbytes > limit:
        raise Invalid(
            f"the rows of session {session} of group {group.uid!r} have {nbytes} bytes of keys and tags, the limit is "
            f"{limit} for each of its {group.n} sessions: they are told with every lease; put data into columns"
        )
