"""How old a sample may be when it is trained, and what is done about it: `trainer.v1.sampler`.

The age of a token is the version being trained minus the version that sampled it; a bound S of 0 is on-policy. verl's
`max_off_policy_threshold` counts from 1, so S = threshold - 1.

| strategy | what is bounded | where | what it costs |
|---|---|---|---|
| drop | a group's oldest token | the group leaves, while it is generated or before it is leased | samples, long first |
| wait | a group's oldest token | the next version waits for those that it would make too old | time |
| mask | every token | older ones leave `loss_mask`; a row, if more than `max_masked_ratio` of it is too old | tokens |
| null | nothing; ages are measured | | |

Everything here is a decision about numbers: no clock, no I/O.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from streamrl.config.sections.trainer import SamplerConfig
from transfer_queue.net.messages import Group


def oldest_version(group: Group) -> int:
    """The smallest weight version that sampled a token of the group's rows."""
    return min(int(row.tag["min_global_steps"]) for row in group.rows)


def newest_version(group: Group) -> int:
    """The largest weight version that sampled a token of the group's rows."""
    return max(int(row.tag["max_global_steps"]) for row in group.rows)


@dataclass(frozen=True, slots=True)
class Room:
    """What a version can still train."""

    now: int
    """Groups, after those that are being chosen."""
    later: int
    """Groups of every version after it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """strategy null: whatever is ready is trained, oldest dispatch order first."""

    max_age: int | None = None
    """S; older tokens leave the loss. None: nothing is too old."""
    max_masked_ratio: float = 1.0
    """A row of which more than this is too old leaves the loss."""
    waits: ClassVar[bool] = False
    """Whether `holds_back` is ever True."""

    def unfit(self, group: Group, version: int) -> bool:
        """Whether a ready group can no longer be trained at weights `version` or later."""
        return False

    def hopeless(self, oldest: int, version: int) -> bool:
        """Whether a group with a token of version `oldest` can no longer be trained, whatever else it will have."""
        return False

    def credit(self, wanted: int, per_step: int) -> int:
        """How many of the `wanted` groups may be out, where a version trains `per_step`."""
        return wanted

    def preferred(self, ready: Sequence[Group], count: int) -> Sequence[Group]:
        """`count` of the fit groups, which come in dispatch order."""
        return ready[:count]

    def holds_back(self, rest: Iterable[Group], growing: Iterable[int], version: int, room: Room) -> bool:
        """Whether those chosen have to wait for others. `rest`: the ready groups that were not chosen; `growing`: of
        each group that has been begun, and becomes ready without anything being trained first, a version that its
        oldest token is not older than."""
        return False


@dataclass(frozen=True, slots=True)
class Drop(Measured):
    """A group whose oldest token is too old leaves, and its credit issues another prompt."""

    max_age: int = 0

    def unfit(self, group: Group, version: int) -> bool:
        return version - oldest_version(group) > self.max_age

    def hopeless(self, oldest: int, version: int) -> bool:
        return version - oldest > self.max_age

    def credit(self, wanted: int, per_step: int) -> int:
        return _trainable(wanted, per_step, self.max_age)


@dataclass(frozen=True, slots=True)
class Mask(Measured):
    """Tokens that are too old leave the loss; a group leaves when none of its tokens would be left."""

    max_age: int = 0

    def unfit(self, group: Group, version: int) -> bool:
        return version - newest_version(group) > self.max_age

    def credit(self, wanted: int, per_step: int) -> int:
        return _trainable(wanted, per_step, self.max_age)


@dataclass(frozen=True, slots=True)
class Wait(Drop):
    """Nothing becomes too old: a version is not trained to its end, and the next one not published, before all that
    the next one would make too old is in it.

    A group has to be trained at version (its oldest token's) + S at the latest, and a version trains P groups. So the
    groups that are out can all be trained in time if, taken by deadline, the first P may wait for the version being
    trained, the next P for the one after it, and so on. That holds at first, since what is issued now has all of S
    versions before it and no more than (1 + S)·P groups are out (`credit`). It holds after each version if those that
    are left at its end keep it, which `holds_back` sees to.

    It cannot stand still for ever. It waits only for groups that are being generated, and only while their coming would
    help: generation needs nothing from the trainer for them (they have their credit, writes to admitted groups never
    wait, servers run on with the weights they have). A restart may leave more groups out than there is credit for;
    those that are not generated before others were trained are not waited for. When none of those that must come is
    missing, it never waits. A server that kept an older version than was published can still make a group too old: that
    one is dropped, since the bound holds whatever happens.

    The smaller the mini-batches, the less is waited: only the last of a version has no room for what is still to come.
    """

    waits: ClassVar[bool] = True

    def preferred(self, ready: Sequence[Group], count: int) -> Sequence[Group]:
        """Those with the oldest tokens first."""
        return sorted(ready, key=lambda group: (oldest_version(group), group.order))[:count]

    def hopeless(self, oldest: int, version: int) -> bool:
        return False

    def holds_back(self, rest: Iterable[Group], growing: Iterable[int], version: int, room: Room) -> bool:
        deadlines = sorted(oldest_version(group) + self.max_age for group in rest)
        missing = sorted(oldest + self.max_age for oldest in growing)
        for deadline in missing:
            insort(deadlines, deadline)
        for place, deadline in enumerate(deadlines):
            after = 0 if place < room.now else 1 + (place - room.now) // room.later
            if version + after > deadline and missing and missing[0] <= deadline:
                return True
        return False


def _trainable(wanted: int, per_step: int, max_age: int) -> int:
    """No more than can be trained before they are too old."""
    return min(wanted, (1 + max_age) * per_step)


def staleness(config: SamplerConfig) -> Measured:
    """The policy that a configuration names."""
    bound = None if config.max_off_policy_threshold is None else config.max_off_policy_threshold - 1
    match config.max_off_policy_strategy:
        case "drop" if bound is not None:
            return Drop(bound)
        case "wait" if bound is not None:
            return Wait(bound)
        case "mask" if bound is not None:
            return Mask(bound, config.max_masked_ratio)
    return Measured()
