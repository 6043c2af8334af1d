"""From the YAML tree and `key=value` arguments to one nested mapping of plain values.

The YAML tree (streamrl/configs) and the arguments follow Hydra's rules and grammar. Nothing is ever instantiated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from streamrl.config.schema import named_sets
from streamrl.errors import ConfigError, shortened

TREE = Path(__file__).resolve().parent.parent / "configs"
GROUPS = ("experiment",)
"""Directories of the tree from which an argument picks a file: experiment=calculator."""
UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, OSError, RecursionError, TypeError, ValueError)
"""What Hydra, OmegaConf and YAML raise for files and values that are none."""
RESOLVERS = ("oc.env", "oc.select")
"""What may stand before the colon in ${name:...}."""


def readable(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(those that can be read, one message for each other one)."""
    good: list[str] = []
    problems: list[str] = []
    for argument in arguments:
        try:
            _normalised(argument)
            good.append(argument)
        except ConfigError as error:
            problems += error.problems
    return good, problems


def compose_values(arguments: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """The values that the tree and the arguments set; interpolations are checked, not resolved yet.

    `config_dir` is searched for experiments, too. Raises ConfigError.
    """
    named = {key: value for argument in arguments for key, value in _names(argument)}
    lines = [_normalised(argument) for argument in arguments if not any(_names(argument))]
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir} is no directory")
        lines.append(f"hydra.searchpath=['file://{Path(config_dir).resolve()}']")
    try:
        with initialize_config_dir(config_dir=str(TREE), version_base="1.3"):
            values = compose("train", overrides=lines)
        OmegaConf.set_struct(values, False)
        for key in named_sets():
            given = named.get(key, OmegaConf.select(values, key))
            if isinstance(given, str | list | ListConfig):
                OmegaConf.update(values, key, _by_name(key, given), merge=False)
        _check_interpolations(OmegaConf.to_container(values, resolve=False))
    except MissingConfigException as error:
        raise ConfigError(_missing(error, config_dir)) from error
    except UNREADABLE as error:
        of_a_file = isinstance(error, UnicodeDecodeError | RecursionError | YAMLError)
        source = (_experiments(lines, config_dir) if of_a_file else "") or "the configuration"
        raise ConfigError(f"{source} cannot be read: {_why(error)}") from error
    return values


def resolve_over(defaults: dict[str, Any], values: DictConfig) -> dict[str, Any]:
    """`values` laid over `defaults`, with ${...} replaced by what it names."""
    try:
        merged = OmegaConf.merge(OmegaConf.create(defaults), values)
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except UNREADABLE as error:
        raise ConfigError(f"the configuration cannot be resolved: {_why(error)}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _normalised(argument: str) -> str:
    """The argument so that Hydra takes it whether or not the thin tree mentions the key."""
    override = parsed(argument)
    if override.is_sweep_override():
        raise ConfigError(f"{shortened(argument)}: a run takes one value, not a sweep; write a list as key=[a,b]")
    if override.is_delete():
        return argument
    if override.key_or_group in GROUPS and not isinstance(override.value(), str | list):
        raise ConfigError(
            f"{shortened(argument)}: name one of {', '.join(_options(override.key_or_group))}; none: leave it out"
        )
    line = argument.lstrip("+")
    return line if override.key_or_group in GROUPS else f"++{line}"


def _names(argument: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of an argument that gives a list of names, which Hydra would not put over a mapping."""
    override = parsed(argument)
    if override.key_or_group in named_sets() and not override.is_delete() and isinstance(override.value(), str | list):
        yield override.key_or_group, override.value()


def _by_name(key: str, given: Any) -> dict[str, Any]:
    """{name: settings} of [name, {tool: name, setting: value, ...}]: Hydra's grammar has no key that is a path."""
    named: dict[str, Any] = {}
    for entry in [given] if isinstance(given, str) else given:
        name = entry if isinstance(entry, str) else entry.get("tool") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or name in named:
            twice = " (it is there twice)" if name in named else ""
            raise ConfigError(
                f"{key}: cannot read {entry}{twice}; it takes a list of names (or {{tool: name, setting: value}}), or "
                "a mapping from names to mappings"
            )
        named[name] = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "tool"}
    return named


def parsed(argument: str) -> Override:
    """An argument by Hydra's grammar. Raises ConfigError."""
    try:
        return OverridesParser.create().parse_override(argument)
    except RecursionError as error:
        raise ConfigError(f"cannot read the argument {shortened(argument)!r}: it is nested too deeply") from error
    except HydraException as error:
        raise ConfigError(
            f"cannot read the argument {shortened(argument)!r}: expected key=value ({shortened(_first_line(error))}); "
            "quote special characters as key='\"value\"'"
        ) from error


def _missing(error: MissingConfigException, config_dir: str | None) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    return f"there is no {group or 'config'} named {name!r}; there is: {', '.join(_options(group, config_dir))}"


def _options(group: str, config_dir: str | None = None) -> list[str]:
    return [
        name
        for tree in (TREE, *([Path(config_dir)] if config_dir else []))
        for name in sorted(path.stem for path in (tree / group).glob("*.yaml"))
    ]


def _experiments(lines: Sequence[str], config_dir: str | None) -> str:
    """The user's files that the arguments pick; those that are shipped can be read."""
    names = [
        (group, line.removeprefix(f"{group}=")) for group in GROUPS for line in lines if line.startswith(f"{group}=")
    ]
    files = [Path(config_dir or TREE, group, f"{name}.yaml") for group, name in names]
    return ", ".join(str(file) for file in files if config_dir and file.is_file())


def _why(error: BaseException) -> str:
    match error:
        case UnicodeDecodeError():
            return f"{error}; save the file as UTF-8"
        case RecursionError():
            return "it is nested too deeply, or holds itself (by a YAML anchor, or in `defaults`); take that out"
        case YAMLError():
            return shortened(re.sub(r"\s+", " ", str(error)), 300)
        case HydraException() | OmegaConfBaseException():
            return _first_line(error)
        case _:
            return f"{type(error).__name__}: {_first_line(error)}"


def _check_interpolations(node: Any) -> None:
    for text in _strings(node):
        if re.search(r"\$\{[^}]*\$\{", text):
            raise ConfigError(f"nested interpolation in {text!r} is not allowed; name one key as ${{section.key}}")
        for name in re.findall(r"\$\{\s*([^:}]*?)\s*:", text):
            if name not in RESOLVERS:
                raise ConfigError(f"the resolver {name!r} in {text!r} is not allowed; only {', '.join(RESOLVERS)} are")


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
