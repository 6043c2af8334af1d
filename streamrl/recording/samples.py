"""What the model said, for people: one jsonl per step, in verl's form.

<directory>/12.jsonl    input, output, gts, score, step, uid, num_turns, data_source, and what else the reward returned

A rank reads the rows and writes the file, whole by a rename, so a step that is done again after a resume replaces what
was written of it. Of this the trainer sees at most the few answers that are shown on the screen, cut short.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from streamrl.monitor.events import plain
from transfer_queue.keys import split_row_key

FIELDS = ["input_ids", "reward_model", "reward_extra_info", "num_turns", "data_source"]

SHOWN = 1000
"""Characters of a question, and of an answer, that are shown: its last ones."""


class Decoder(Protocol):
    """The part of ChatTokenizer that is needed."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which rows of the queue to write, and which of them to tell."""

    partition: str
    step: int
    keys: list[str]
    tags: list[dict[str, Any]]
    more: list[dict[str, Any]]
    """Further fields of each row's line."""
    directory: str | None
    """None: nothing is written."""
    show: list[str]
    """Keys of the answers that come back as text."""

    @property
    def wanted(self) -> list[int]:
        """Places of the rows that have to be read."""
        shown = set(self.show)
        return [i for i, key in enumerate(self.keys) if self.directory or key in shown]


def write_samples(order: SampleOrder, columns: Mapping[str, Any], chat: Decoder) -> list[dict[str, Any]]:
    """Write the file that `order` asks for; the answers to show. `columns`: FIELDS of the rows that are `wanted`."""
    lines = {order.keys[place]: _line(order, place, columns, i, chat) for i, place in enumerate(order.wanted)}
    if order.directory:
        _replace(Path(order.directory) / f"{order.step}.jsonl", list(lines.values()))
    return [_shown(lines[key]) for key in order.show]


def _line(order: SampleOrder, place: int, columns: Mapping[str, Any], index: int, chat: Decoder) -> dict[str, Any]:
    tag, ids = order.tags[place], np.asarray(columns["input_ids"][index]).tolist()
    asked = int(tag["prompt_len"])
    own = {
        "input": chat.decode(ids[:asked], skip_special_tokens=True),
        "output": chat.decode(ids[asked:], skip_special_tokens=True),
        "gts": (columns["reward_model"][index] or {}).get("ground_truth"),
        "score": tag["score"],
        "step": order.step,
        "uid": split_row_key(order.keys[place]).uid,
        "num_turns": int(columns["num_turns"][index]),
        "data_source": columns["data_source"][index],
        **order.more[place],
    }
    return own | {name: value for name, value in (columns["reward_extra_info"][index] or {}).items() if name not in own}


def _replace(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    encoder = msgspec.json.Encoder(enc_hook=plain)
    try:
        draft.write_bytes(b"".join(encoder.encode(line) + b"\n" for line in lines))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    def cut(text: str) -> str:
        return text if len(text) <= SHOWN else f"... {text[-SHOWN:]}"

    return {"input": cut(line["input"]), "output": cut(line["output"]), "score": line["score"], "mode": line["mode"]}
