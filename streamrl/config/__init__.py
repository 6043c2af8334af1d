"""Typed configuration, checked whole before anything starts.

    arguments + YAML tree --compose--> plain values --keys--> known ones --schema--> dataclasses --derive, checks--> run

`load_config` is that line. Nothing here imports torch or Ray, so that a mistake is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from streamrl.config.checks import check, check_ports
from streamrl.config.compose import compose_values, readable, resolve_over
from streamrl.config.derive import derive
from streamrl.config.keys import SortedKeys, disagreements, flatten, sort_keys
from streamrl.config.notes import notes
from streamrl.config.root import StreamRLConfig
from streamrl.config.schema import build, show
from streamrl.config.verl_keys import VERL_DEFAULTS, VERL_DEFAULTS_ASYNC
from streamrl.errors import ConfigError

__all__ = ["ConfigError", "Loaded", "StreamRLConfig", "check_ports", "from_dict", "load_config", "to_dict", "to_yaml"]


@dataclass(frozen=True, slots=True)
class Loaded:
    config: StreamRLConfig
    inert: tuple[str, ...]
    """Keys of verl's that were accepted and have no effect here."""
    notes: tuple[str, ...] = ()
    """What is allowed but deserves a line (streamrl.config.notes)."""
    unlike_verl: tuple[str, ...] = ()
    """Keys that were not given and whose default is another in verl: "key=ours (verl: its default)"."""


def load_config(arguments: Sequence[str] = (), config_dir: str | None = None, *, like_verl: bool = False) -> Loaded:
    """The configuration that `key=value` arguments select. `like_verl`: they are a command line of verl's, in which
    values that do not exist here (rollout.name=sglang without saying where) are replaced and noted. Raises ConfigError
    naming every mistake found."""
    arguments, unreadable = readable(arguments)
    try:
        composed = compose_values(arguments, config_dir)
        given = sort_keys(resolve_over(to_dict(StreamRLConfig()), composed), like_verl=like_verl)
    except ConfigError as error:
        raise ConfigError(*unreadable, *error.problems) from error
    given.problems[:0] = unreadable
    config = derive(_built(given))
    check(config)
    return Loaded(config, tuple(given.inert), tuple(notes(config)), _unlike_verl(config, composed))


def _unlike_verl(config: StreamRLConfig, given: DictConfig) -> tuple[str, ...]:
    values = dict(flatten(to_dict(config)))
    default = VERL_DEFAULTS if config.trainer.v1.trainer_mode == "sync" else VERL_DEFAULTS | VERL_DEFAULTS_ASYNC
    return tuple(
        f"{key}={show(values[key])} (verl: {show(verl)})"
        for key, verl in default.items()
        if OmegaConf.select(given, key) is None and values[key] != verl
    )


def to_dict(config: StreamRLConfig) -> dict[str, Any]:
    """Nested plain values: what crosses to other processes and what YAML shows."""
    return _plain(asdict(config))


def from_dict(values: Mapping[str, Any]) -> StreamRLConfig:
    """The inverse of `to_dict`, with the same checks of keys and types (not of files)."""
    return _built(sort_keys(values))


def to_yaml(config: StreamRLConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def _built(given: SortedKeys) -> StreamRLConfig:
    problems = list(given.problems)
    config = build(given.values, problems)
    problems += disagreements(given.mirrored, dict(flatten(to_dict(config))))
    if problems:
        raise ConfigError(*problems)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
