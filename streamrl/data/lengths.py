"""Prompts longer than `data.max_prompt_length`: refused, left out or shortened before anything starts.

A prompt is as long as what its agent will send: rendered by the chat template, with the tools that `tool_agent` shows
the model. Text that is short enough whatever the tokenizer makes of it is not encoded; what was counted once for large
datasets is remembered under $XDG_CACHE_HOME/streamrl (of 100,000 prompts of 280 tokens: 30 s on two busy cores to
count, 3 s to look up).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from agent_loop.plugins import PluginError
from agent_loop.rendering.chat import ChatTokenizer, RenderingError
from streamrl.data.reading import Place
from streamrl.errors import DatasetError

log = logging.getLogger(__name__)

Overlong = Literal["drop", "error", "left", "right", "middle"]
CHUNK = 2048
"""Rows that are rendered and encoded together."""
REMEMBERED_FROM = 5000
"""Rows; fewer are counted in a second or two."""
SLACK = 64
"""Tokens that a tokenizer may add to a text that are not in it (spaces before its pieces)."""
MAX_CUTS = 8


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """What is done with a prompt of more than `max_tokens` tokens, and how its tokens are counted."""

    chat: ChatTokenizer
    max_tokens: int
    overlong: Overlong = "error"
    schemas: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = lambda row: ()
    """The tools that a row's agent shows the model."""

    def apply(self, rows: list[dict[str, Any]], places: Sequence[Place]) -> list[dict[str, Any]]:
        """The rows that may be asked. Raises DatasetError naming the first overlong row (overlong="error"), and for a
        prompt that the chat template cannot render."""
        lengths = self._overlong(rows, places)
        if not lengths:
            return rows
        if self.overlong == "drop":
            return [row for index, row in enumerate(rows) if index not in lengths]
        first = min(lengths)
        if self.overlong == "error":
            more = f" (and {len(lengths) - 1} more rows)" if len(lengths) > 1 else ""
            raise DatasetError(
                f"{places[first]}: the prompt has {lengths[first]} tokens, data.max_prompt_length is "
                f"{self.max_tokens}{more}; raise it, or set data.filter_overlong_prompts=true or "
                "data.truncation=left|right|middle"
            )
        return [self._cut(row, places[index]) if index in lengths else row for index, row in enumerate(rows)]

    def _overlong(self, rows: Sequence[dict[str, Any]], places: Sequence[Place]) -> dict[int, int]:
        """Index -> tokens, of the overlong rows."""
        if len(rows) < REMEMBERED_FROM:
            return self._count(rows, places)
        memory = _memory(self._digest(rows, places))
        try:
            return msgspec.msgpack.decode(memory.read_bytes(), type=dict[int, int])
        except (OSError, msgspec.DecodeError):
            log.info("counting the tokens of %d prompts", len(rows))
        lengths = self._count(rows, places)
        _remember(memory, msgspec.msgpack.encode(lengths))
        return lengths

    def _count(self, rows: Sequence[dict[str, Any]], places: Sequence[Place]) -> dict[int, int]:
        lengths: dict[int, int] = {}
        indexed = enumerate(self._texts(rows, places))
        while chunk := list(islice(indexed, CHUNK)):
            open_ones = [(index, text) for index, text in chunk if not self._surely_fits(text)]
            encoded = self.chat.tokenizer.encode_batch_fast([text for _, text in open_ones], add_special_tokens=False)
            lengths |= {
                index: len(tokens)
                for (index, _), tokens in zip(open_ones, encoded, strict=True)
                if len(tokens) > self.max_tokens
            }
        return lengths

    def _surely_fits(self, text: str) -> bool:
        """A token takes a byte at least; normalisation leaves ASCII as long as it is."""
        return len(text) + SLACK <= self.max_tokens and text.isascii()

    def _texts(self, rows: Iterable[dict[str, Any]], places: Sequence[Place]) -> Iterable[str]:
        for row, place in zip(rows, places, strict=True):
            try:
                yield self.chat.prompt_text(row["raw_prompt"], self.schemas(row))
            except (RenderingError, PluginError) as error:
                raise DatasetError(f"{place}: the prompt cannot be rendered: {error}") from error

    def _digest(self, rows: Sequence[dict[str, Any]], places: Sequence[Place]) -> str:
        digest = xxhash.xxh3_128(f"{self.max_tokens} {self.chat.tokenizer.to_str()}".encode())
        for text in self._texts(rows, places):
            digest.update(f"{len(text)} {text}".encode())
        return digest.hexdigest()

    def _cut(self, row: dict[str, Any], place: Place) -> dict[str, Any]:
        """The row with its longest message shortened, so that the template around it stays whole."""
        messages = row["raw_prompt"]
        longest = max(range(len(messages)), key=lambda i: len(messages[i]["content"]))
        content = messages[longest]["content"]
        if isinstance(content, str):
            ids, excess = self.chat.encode(content), 0
            cut = messages
            for _ in range(MAX_CUTS):  # encoding what was decoded may take a token more
                over = len(self.chat.render_prompt(cut, self.schemas(row))) - self.max_tokens
                if over <= 0:
                    return {**row, "raw_prompt": cut}
                excess += over
                if excess >= len(ids):
                    break
                text = self._shortened(ids, len(ids) - excess)
                cut = [*messages[:longest], {**messages[longest], "content": text}, *messages[longest + 1 :]]
        raise DatasetError(
            f"{place}: the prompt cannot be cut to data.max_prompt_length={self.max_tokens} tokens; raise it, or set "
            "data.filter_overlong_prompts=true"
        )

    def _shortened(self, ids: list[int], keep: int) -> str:
        """`keep` tokens of a text: its beginning, its end, or both."""
        broken = "�"  # a character of which only some bytes are left
        match self.overlong:
            case "right":
                return self.chat.decode(ids[:keep]).rstrip(broken)
            case "left":
                return self.chat.decode(ids[-keep:]).lstrip(broken)
            case _:
                head, tail = ids[: keep // 2], ids[len(ids) - (keep - keep // 2) :]
                return self.chat.decode(head).rstrip(broken) + self.chat.decode(tail).lstrip(broken)


def _memory(digest: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "streamrl" / f"overlong-{digest}"


def _remember(path: Path, content: bytes) -> None:
    """As well as it goes: without it the next start counts again."""
    own = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(content)
        own.rename(path)
    except OSError as error:
        log.info("prompt lengths are not remembered: %s", error)
