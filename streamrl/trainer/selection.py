"""Which ready groups are worth training on.

The age of a token is the version being trained minus the version that sampled it. A bound S of 0 is on-policy.
verl's `max_off_policy_threshold` counts from 1, so S = threshold - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.trainer.scores import all_equal
from transfer_queue.net.messages import Group

STALE, FILTERED = "stale", "filtered"


@dataclass(frozen=True, slots=True)
class Selection:
    """Looked at before a group is leased. Who is unfit is dropped, its credit issues another prompt."""

    max_age: int | None = None
    """A group whose oldest token is older is stale; None only measures."""
    filter_equal: bool = False
    """A group whose sampled sessions all scored the same is filtered (dynamic sampling, DAPO, arXiv:2503.14476)."""
    components: tuple[str, ...] = ()
    """If it is components of the score that are compared: the same in each of them."""

    def unfit(self, group: Group, version: int) -> str | None:
        """Why `group` is not trained at weights `version`; None: it is fit."""
        if self.max_age is not None and version - oldest_version(group) > self.max_age:
            return STALE
        return FILTERED if self.filter_equal and all_equal(group, self.components) else None


def oldest_version(group: Group) -> int:
    """The smallest weight version that sampled a token of the group's rows."""
    return min(int(row.tag["min_global_steps"]) for row in group.rows)
