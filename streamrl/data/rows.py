"""A prompt row: verl's columns, checked once.

    prompt        list of chat messages {"role", "content"}, or a plain string (one user message)     required
    data_source   string                                                                              required
    reward_model  object with "ground_truth"                                                          required
    extra_info    object; its "tools_kwargs" serve when the row has none of its own                   optional
    agent_name    string: which agent loop                                                            optional
    tools_kwargs  object: tool name -> object                                                         optional

`data.prompt_key` and `data.reward_fn_key` rename the first two. Further columns are ignored.
"""

from __future__ import annotations

from typing import Any

from streamrl.data.reading import Place, found
from streamrl.errors import DatasetError

ROLES = ("system", "user", "assistant", "tool")


def prompt_row(row: dict[str, Any], place: Place, *, prompt_key: str, source_key: str) -> dict[str, Any]:
    """The columns raw_prompt, data_source, reward_model, extra_info, agent_name, tools_kwargs.

    Raises DatasetError naming place, column and what was found.
    """
    extra_info = _object(row, "extra_info", place)
    return {
        "raw_prompt": _messages(_required(row, prompt_key, place), prompt_key, place),
        "data_source": _text(_required(row, source_key, place), source_key, place),
        "reward_model": _reward_model(row, place),
        "extra_info": extra_info,
        "agent_name": None if row.get("agent_name") is None else _text(row["agent_name"], "agent_name", place),
        "tools_kwargs": _object(row if "tools_kwargs" in row else extra_info, "tools_kwargs", place),
    }


def _required(row: dict[str, Any], column: str, place: Place) -> Any:
    if row.get(column) is None:
        raise DatasetError(f"{place}: column {column!r} is missing; the row has {', '.join(row) or 'no columns'}")
    return row[column]


def _text(value: Any, column: str, place: Place) -> str:
    if not isinstance(value, str) or not value:
        raise DatasetError(f"{place}, column {column!r}: expected a string, found {found(value)}")
    return value


def _object(row: dict[str, Any], column: str, place: Place) -> dict[str, Any]:
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DatasetError(f"{place}, column {column!r}: expected an object, found {found(value)}")
    return value


def _reward_model(row: dict[str, Any], place: Place) -> dict[str, Any]:
    _required(row, "reward_model", place)
    value = _object(row, "reward_model", place)
    if "ground_truth" not in value:
        raise DatasetError(f"{place}, column 'reward_model': expected a key 'ground_truth', found {found(value)}")
    return value


def _messages(value: Any, column: str, place: Place) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{place}, column {column!r}: expected chat messages or a string, found {found(value)}")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not _is_content(message.get("content")):
            raise DatasetError(
                f"{place}, column {column!r}, message {number}: expected {{'role': one of {', '.join(ROLES)}, "
                f"'content': a string}}, found {found(message)}"
            )
    return value


def _is_content(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, dict) for part in value))
