"""How old a token may be when it is trained.

The age of a token is the version being trained minus the version that sampled it. A bound S of 0 is on-policy.
verl's `max_off_policy_threshold` counts from 1, so S = threshold - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer_queue.net.messages import Group


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """`max_age` None only measures; else a group whose oldest token is older is dropped before it is leased."""

    max_age: int | None = None

    def too_old(self, group: Group, version: int) -> bool:
        """Whether `group`, trained at weights `version`, holds a token older than the bound."""
        return self.max_age is not None and version - oldest_version(group) > self.max_age


def oldest_version(group: Group) -> int:
    """The smallest weight version that sampled a token of the group's rows."""
    return min(int(row.tag["min_global_steps"]) for row in group.rows)
