"""Which columns a prompt row is made of, in the words of the frameworks that datasets were written for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COLUMNS: dict[str, tuple[str, ...]] = {
    # ours            verl                         TRL                     SkyRL         slime
    "prompt":         ("prompt",                                                        "input"),
    "data_source":    ("data_source",                                     "env_class"),
    "reward_model":   ("reward_model",                                    "reward_spec"),
    "ground_truth":   ("ground_truth",             "answer", "solution",                "label"),
    "extra_info":     ("extra_info",                                      "extras",     "metadata"),
    "agent_name":     ("agent_name",),
    "tools_kwargs":   ("tools_kwargs",   "extra_info.tools_kwargs"),
    "tool_selection": ("tool_selection", "extra_info.tool_selection"),
    "n":              ("n", "__rollout_n__"),
    "images":         ("images",),
    "videos":         ("videos",),
    "audios":         ("audios",),
}  # fmt: skip
"""Ours -> theirs, the first that a row has; a dot goes into an object. `ground_truth` serves a row that has no
`reward_model` object around it."""

MAPPED = frozenset(name.partition(".")[0] for names in COLUMNS.values() for name in names)


@dataclass(frozen=True, slots=True)
class Columns:
    """COLUMNS, with those that the configuration names itself (data.prompt_key and the like) instead of the table's."""

    named: Mapping[str, str]

    def names(self, column: str) -> tuple[str, ...]:
        """Where a column may stand in a row."""
        return (self.named[column],) if column in self.named else COLUMNS[column]

    def find(self, row: Mapping[str, Any], column: str) -> tuple[str, Any]:
        """(the name it has in the row, its value), or ("", None)."""
        for name in self.names(column):
            outer, dot, inner = name.partition(".")
            value = row.get(name)
            if value is None and dot and isinstance(row.get(outer), Mapping):
                value = row[outer].get(inner)
            if value is not None:
                return name, value
        return "", None

    def further(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that stand for nothing here."""
        return {name: value for name, value in row.items() if name not in MAPPED and name not in self.named.values()}


DEFAULT = Columns({})
