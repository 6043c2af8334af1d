"""A prompt row, checked once. Where each column comes from: streamrl.data.columns.

raw_prompt      list of chat messages {"role", "content"}; a plain string is one user message,
                and {"type": "text"} parts of a content are joined to a string                         required
data_source     string; a row with a bare answer and none of it is of the source its file is named after
reward_model    object with "ground_truth"; a bare answer becomes {"style": "rule", "ground_truth": answer}   required
extra_info      object; with a bare answer, the row's further columns are in it, too
agent_name      string: which agent loop
tools_kwargs    object: tool name -> object
tool_selection  list of the tools that this row's agent may call; none: all
n               samples of this prompt; none: actor_rollout_ref.rollout.n
images, videos, audios    lists, untouched
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.data.columns import Columns
from streamrl.data.formats import Place, found
from streamrl.errors import DatasetError

ROLES = ("system", "user", "assistant", "tool")
GIVE_OR_LEAVE_OUT = "give it a value, or leave the row out"
MAX_N = 4096
"""Samples of one prompt, as for actor_rollout_ref.rollout.n."""


def prompt_row(row: dict[str, Any], place: Place, columns: Columns) -> dict[str, Any]:
    """The columns above, absent ones None. Raises DatasetError naming place, column and what was found."""
    reader = _Reader(row, place, columns)
    messages = _messages(reader)
    extra_info = reader.object("extra_info")
    reward_model = reader.object("reward_model")
    source = reader.text("data_source")
    if reward_model is None:
        reward_model = {"style": "rule", "ground_truth": reader.required("ground_truth", before="reward_model")}
        extra_info = columns.further(row) | (extra_info or {})
        source = source or Path(str(place.file)).stem
    elif "ground_truth" not in reward_model:
        raise reader.error("reward_model", "a key 'ground_truth'", reward_model)
    elif reward_model["ground_truth"] is None:
        raise DatasetError(f"{reader.at('reward_model')}: its 'ground_truth' is null; {GIVE_OR_LEAVE_OUT}")
    return {
        "raw_prompt": messages,
        "data_source": source or reader.required("data_source"),
        "reward_model": reward_model,
        "extra_info": extra_info or {},
        "agent_name": reader.text("agent_name"),
        "tools_kwargs": reader.object("tools_kwargs") or {},
        "tool_selection": _names(reader),
        "n": _group_size(reader),
        **{name: reader.list(name) for name in ("images", "videos", "audios")},
    }


class _Reader:
    """The columns of one row by our names, and errors by theirs."""

    def __init__(self, row: dict[str, Any], place: Place, columns: Columns) -> None:
        self.row, self.place, self.columns = row, place, columns

    def value(self, column: str) -> Any:
        return self.columns.find(self.row, column)[1]

    def required(self, column: str, *, before: str = "") -> Any:
        """`before` is a column that would have done as well."""
        if (value := self.value(column)) is not None:
            return value
        names = (*((self.columns.names(before)) if before else ()), *self.columns.names(column))
        if null := next((name for name in names if name in self.row), None):
            raise DatasetError(f"{self.place}: column {null!r} is null; {GIVE_OR_LEAVE_OUT}")
        first, *others = names
        instead = f" (and {', '.join(others)})" if others else ""
        has = ", ".join(self.row) or "no columns"
        raise DatasetError(f"{self.place}: column {first!r}{instead} is missing; the row has {has}")

    def text(self, column: str) -> str | None:
        value = self.value(column)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(column, "a string", value)
        return value

    def object(self, column: str) -> dict[str, Any] | None:
        value = self.value(column)
        if value is not None and not isinstance(value, dict):
            raise self.error(column, "an object", value)
        return value

    def list(self, column: str) -> list[Any] | None:
        value = self.value(column)
        if value is not None and not isinstance(value, list):
            raise self.error(column, "a list", value)
        return value

    def error(self, column: str, expected: str, value: Any) -> DatasetError:
        return DatasetError(f"{self.at(column)}: expected {expected}, found {found(value)}")

    def at(self, column: str) -> str:
        return f"{self.place}, column {self.columns.find(self.row, column)[0]!r}"


def _messages(reader: _Reader) -> list[dict[str, Any]]:
    value = reader.required("prompt")
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise reader.error("prompt", "chat messages or a string", value)
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not _is_content(message.get("content")):
            raise DatasetError(
                f"{reader.at('prompt')}, message {number}: expected {{'role': one of {', '.join(ROLES)}, "
                f"'content': a string}}, found {found(message)}"
            )
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise DatasetError(
                f"{reader.at('prompt')}, message {number}: expected tool_calls as a list of objects, found "
                f"{found(calls)}"
            )
    return [message | {"content": _text(message["content"])} for message in value]


def _is_content(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, dict) for part in value))


def _text(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts that are all text as one text, a line each, which every chat template can render."""
    if isinstance(content, str) or not all(isinstance(part.get("text"), str) for part in content):
        return content
    if any(part.get("type", "text") != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _names(reader: _Reader) -> list[str] | None:
    names = reader.list("tool_selection")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise reader.error("tool_selection", "a list of tool names", names)
    return names


def _group_size(reader: _Reader) -> int | None:
    n = reader.value("n")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N):
        raise reader.error("n", f"a number of samples from 1 to {MAX_N}", n)
    return n
