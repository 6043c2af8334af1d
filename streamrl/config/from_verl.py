"""`streamrl config from-verl FILE`: what a script asks of verl, as a command for this package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.config import StreamRLConfig, to_dict
from streamrl.config.compose import parsed
from streamrl.config.keys import disagreements, flatten, sort_keys
from streamrl.config.schema import build, known_keys
from streamrl.config.shell_script import UNKNOWN, commands
from streamrl.config.verl_keys import MIRRORED, OF_VLLM, SERVER, VERL_DEFAULTS, VERL_DEFAULTS_ASYNC, VERL_ENTRY
from streamrl.errors import ConfigError

_MODULE = re.compile(r"^(verl|recipe)\.[\w.]*main\w*$|(^|/)main_(ppo|dapo)\w*\.py$")


@dataclass(slots=True)
class Translation:
    arguments: list[str] = field(default_factory=list)
    """key=value, in the order of the script."""
    inert: list[str] = field(default_factory=list)
    """Keys without effect here."""
    added: list[str] = field(default_factory=list)
    """key=value of what the script leaves to verl's default where ours is another."""
    notes: list[str] = field(default_factory=list)
    """What else a user should know."""
    problems: list[str] = field(default_factory=list)
    """One message per argument that asks for what is not there."""
    passes_on: bool = False
    """The script hands its own arguments on ("$@")."""

    def command(self) -> str:
        """To be typed into a shell."""
        rest = ['"$@"'] if self.passes_on else []
        return " \\\n  ".join(["streamrl train", *map(_quoted, [*self.arguments, *self.added]), *rest]) + "\n"


def translate_file(path: str) -> Translation:
    """Raises ConfigError for a file that starts no verl."""
    try:
        script = Path(path).read_text(encoding="utf-8")
        translation = translate(overrides_of(script))
        translation.passes_on = re.search(r"\$[@*]|\$\{@\}", script) is not None
        return translation
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def overrides_of(script: str) -> list[str]:
    """The arguments of the command that starts verl. Raises ValueError."""
    for words in commands(script):
        for index, word in enumerate(words):
            if _MODULE.search(word):
                return words[index + 1 :]
    raise ValueError("found no command that starts verl, as python3 -m verl.trainer.main_ppo key=value ...")


def translate(overrides: Sequence[str]) -> Translation:
    """The same run here."""
    result = Translation()
    given: dict[str, Any] = {}
    mirrored: dict[str, Any] = {}
    for argument in overrides:
        if argument in VERL_ENTRY:
            continue
        if argument.startswith("-") or "=" not in argument:
            result.problems.append(f"{argument}: only key=value is translated; what it stands for must be written so")
        else:
            _translate(argument, result, given, mirrored)
    ours = dict(flatten(to_dict(StreamRLConfig()))) | given
    if ours[SERVER] != "vllm":
        idle = [key for key in OF_VLLM if given.get(key, OF_VLLM[key]) != OF_VLLM[key]]
        result.inert += idle
        result.arguments = [line for line in result.arguments if _key(line) not in OF_VLLM]
    result.problems += disagreements({key: v for key, v in mirrored.items() if not _open(ours[MIRRORED[key]])}, ours)
    in_turns = given.get("trainer.v1.trainer_mode", "sync") == "sync"
    defaults = VERL_DEFAULTS if in_turns else VERL_DEFAULTS | VERL_DEFAULTS_ASYNC
    missing = {key: value for key, value in defaults.items() if key not in given}
    if "reward.custom_reward_function.path" not in given:
        result.notes.append(
            "verl takes a scorer of its own by data_source here; name yours in reward.custom_reward_function.path, or "
            "a registered one in reward.custom_reward_function.name"
        )
    result.added = [f"{key}={_hydra(value)}" for key, value in missing.items()]
    return result


def _translate(argument: str, result: Translation, given: dict[str, Any], mirrored: dict[str, Any]) -> None:
    """Adds one argument to the result, the values of ours that it gives, and what repeats such ones."""
    key, _, text = argument.lstrip("+").partition("=")
    if UNKNOWN.search(text):
        sorted_keys, value, unknown = sort_keys(_nested(key, text), like_verl=True), text, True
    else:
        try:
            override = parsed(argument)
            key, value, unknown = override.key_or_group, override.value(), False
        except ConfigError as error:
            result.problems.extend(error.problems)
            return
        sorted_keys = sort_keys(_nested(key, value), like_verl=True)
    if not unknown and not sorted_keys.problems:
        build(sorted_keys.values, sorted_keys.problems)
    result.inert += sorted_keys.inert
    result.problems += sorted_keys.problems
    mirrored |= {key: item for key, item in sorted_keys.mirrored.items() if not _open(item)}
    known = {name: item for name, item in flatten(sorted_keys.values) if name in known_keys()}
    for name, item in known.items():
        same = name == key and item == value
        result.arguments.append(f"{name}={text}" if same else f"{name}={_hydra(item)}")
    given |= known


def _key(argument: str) -> str:
    """Of ours; an argument may name something below it."""
    name = argument.lstrip("+").partition("=")[0]
    return next((key for key in OF_VLLM if name.startswith(f"{key}.")), name)


def _open(value: Any) -> bool:
    """Whether only the shell knows it."""
    return isinstance(value, str) and UNKNOWN.search(value) is not None


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _hydra(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "True", False: "False"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[\w/.$@%+*?-]+", value):
        escaped = value.replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


def _quoted(argument: str) -> str:
    """For the shell, which still has to fill in what it alone knows; quoted as a person would."""
    if not UNKNOWN.search(argument):
        simply = "'" in argument and not re.search(r'["`\\\\$!]', argument)
        return f'"{argument}"' if simply else shlex.quote(argument)
    return '"' + re.sub(r'(["`\\])', r"\\\1", argument) + '"'
