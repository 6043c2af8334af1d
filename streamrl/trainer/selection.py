"""Which ready groups are trained: those that are fit, and of these the ones that the sampler chooses."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_loop.plugins import load_from_file
from agent_loop.user_code import place_of, told, watched
from streamrl.config.sections.trainer import CustomSamplerConfig
from streamrl.errors import UserError
from streamrl.trainer.scores import all_equal
from streamrl.trainer.staleness import Drop, Measured, oldest_version
from transfer_queue.net.messages import Group

__all__ = [
    "FILTERED", "STALE", "Drop", "Measured", "Sampler", "SamplerError", "Selection", "custom_sampler", "oldest_version",
]  # fmt: skip

STALE, FILTERED = "stale", "filtered"

SLOW = 10.0
"""Seconds after which a sampler that has not returned is told of."""


class SamplerError(UserError, RuntimeError):
    """The user's sampler is broken."""


class Sampler(Protocol):
    """A user's choice (`trainer.v1.sampler.custom_sampler`); the class is made with `sampler_kwargs`."""

    def choose(self, ready: Sequence[Group], count: int, version: int) -> Sequence[Group] | None:
        """`count` of the groups in `ready`, to be trained at weights `version`; None to wait for further ones.

        `ready` are at least `count` groups that are fit, oldest dispatch order first. A group has `uid`, `order`, its
        `tag`, and `rows` with a tag each (score, response_len, min_global_steps, ...). Called again after every change.
        """
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Looked at before a group is leased. Who is unfit is dropped, its credit issues another prompt."""

    staleness: Measured = field(default_factory=Measured)
    filter_equal: bool = False
    """A group whose sampled sessions all scored the same is filtered (dynamic sampling, DAPO, arXiv:2503.14476)."""
    components: tuple[str, ...] = ()
    """If it is components of the score that are compared: the same in each of them."""
    sampler: Sampler | None = None
    """None: as the staleness policy prefers."""

    def unfit(self, group: Group, version: int) -> str | None:
        """Why `group` is not trained at weights `version`; None: it is fit."""
        if self.staleness.unfit(group, version):
            return STALE
        return FILTERED if self.filter_equal and all_equal(group, self.components) else None

    def choose(self, ready: Sequence[Group], count: int, version: int) -> Sequence[Group] | None:
        """`count` of the fit groups, or None to wait. Raises SamplerError."""
        if self.sampler is None:
            return self.staleness.preferred(ready, count)
        return chosen_by(self.sampler, ready, count, version)

    @property
    def chooser(self) -> str:
        """Who may hold ready groups back: for messages."""
        return "others" if self.sampler is None else f"{_name(self.sampler)} to choose them"


def chosen_by(sampler: Sampler, ready: Sequence[Group], count: int, version: int) -> Sequence[Group] | None:
    """The sampler's choice. Raises SamplerError, with the line of the user's code, for whatever it does but choose; one
    that does not return is told of in the log, with the line where it is."""
    stands = f"{_name(sampler)} has not returned after {SLOW:g} s, and training stands still meanwhile"
    with watched(SLOW, stands):
        try:
            chosen = sampler.choose(ready, count, version)
        except Exception as error:
            raise SamplerError(f"{_name(sampler)} failed with {told(error)}") from error
        except SystemExit as error:
            raise SamplerError(f"{_name(sampler)} wanted to exit ({error.code!r}) ({place_of(error)})") from error
    if chosen is None:
        return None
    if inspect.iscoroutine(chosen):
        chosen.close()
    if not isinstance(chosen, Sequence) or not all(isinstance(group, Group) for group in chosen):
        raise SamplerError(
            f"{_name(sampler)} returned {reprlib.repr(chosen)}, a {type(chosen).__name__}; it returns a list of the "
            "groups it is given, or None to wait, and is no async function"
        )
    uids, known = {group.uid for group in chosen}, {group.uid for group in ready}
    if len(uids) != count or len(chosen) != count or not uids <= known:
        raise SamplerError(
            f"{_name(sampler)} gave {len(chosen)} groups ({len(uids)} different, {len(uids - known)} that are not "
            f"ready) where {count} of {len(ready)} ready ones are wanted; it returns that many of those it is given, "
            "or None to wait"
        )
    return chosen


def _name(sampler: Sampler) -> str:
    return f"{type(sampler).__name__}.choose (trainer.v1.sampler.custom_sampler)"


def custom_sampler(config: CustomSamplerConfig, kwargs: Mapping[str, Any]) -> Sampler | None:
    """The configured one, None if there is none. Raises PluginError, and whatever its constructor does."""
    if config.path is None:
        return None
    return load_from_file(f"{config.path}:{config.name}", "sampler")(**kwargs)
