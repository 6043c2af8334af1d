"""Prompts longer than `data.max_prompt_length`: refused, left out or shortened before anything starts.

A prompt is as long as what its agent will send: rendered by the chat template, with the tools that `tool_agent` shows
the model. Text that is short enough whatever the tokenizer makes of it is not encoded; what was counted once for large
datasets is remembered under $XDG_CACHE_HOME/streamrl (of 100,000 prompts of 280 tokens: 30 s on two busy cores to
count, 3 s to look up).
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec
import xxhash

from agent_loop.plugins import PluginError
from agent_loop.rendering.chat import ChatTokenizer, RenderingError
from streamrl.data.formats import Place
from streamrl.data.packed import PackedRows, cache_directory
from streamrl.errors import DatasetError

log = logging.getLogger(__name__)

Overlong = Literal["drop", "error", "left", "right", "middle"]
CHUNK = 2048
"""Rows that are encoded together."""
CHUNK_CHARACTERS = 4_000_000
"""Of their texts, after which a chunk ends earlier."""
MAX_CHUNKS = 20_000
"""That are remembered, the latest."""
REMEMBERED_FROM = 5000
"""Rows; fewer are counted in a second or two."""
SLACK = 64
"""Tokens that a tokenizer may add to a text that are not in it (spaces before its pieces)."""
MAX_CUTS = 8
Prompt = tuple[Place, dict[str, Any]]
"""A checked prompt row and where it stands."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """What is done with a prompt of more than `max_tokens` tokens, and how its tokens are counted."""

    chat: ChatTokenizer
    max_tokens: int
    overlong: Overlong = "error"
    schemas: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = lambda row: ()
    """The tools that a row's agent shows the model."""

    def apply(self, prompts: Iterable[Prompt], rows: PackedRows) -> int:
        """Count the prompts while `rows` grows by each that is taken, then drop or cut what is too long; how many rows
        were dropped. Raises DatasetError naming the first overlong row (overlong="error"), and for a prompt that the
        chat template cannot render."""
        dropped = array("q")
        first, more = "", -1
        for index, place, tokens in self._overlong(prompts):
            match self.overlong:
                case "drop":
                    dropped.append(index)
                case "error":
                    first, more = first or f"{place}: the prompt has {tokens} tokens", more + 1
                case _:
                    rows.replace(index, self._cut(rows[index], place), place)
        if first:
            raise DatasetError(
                f"{first}, data.max_prompt_length is {self.max_tokens}{f' (and {more} more rows)' if more else ''}; "
                "raise it, or set data.filter_overlong_prompts=true or data.truncation=left|right|middle"
            )
        rows.drop(dropped)
        return len(dropped)

    def _overlong(self, prompts: Iterable[Prompt]) -> Iterator[tuple[int, Place, int]]:
        """(index, place, tokens) of the overlong prompts."""
        memory, start = Memory(f"{self.max_tokens} {self.chat.tokenizer.to_str()}"), 0
        for places, texts in self._chunks(prompts):
            lengths = memory.find(texts)
            if lengths is None:
                lengths = memory.keep(texts, self._count(texts))
            yield from ((start + index, places[index], tokens) for index, tokens in lengths.items())
            start += len(texts)
        memory.save()

    def _chunks(self, prompts: Iterable[Prompt]) -> Iterator[tuple[list[Place], list[str]]]:
        """Places and rendered prompts, CHUNK at a time, fewer if they are long."""
        places, texts, characters = [], [], 0
        for place, row in prompts:
            try:
                texts.append(self.chat.prompt_text(row["raw_prompt"], self.schemas(row)))
            except (RenderingError, PluginError) as error:
                raise DatasetError(f"{place}: the prompt cannot be rendered: {error}") from error
            places.append(place)
            characters += len(texts[-1])
            if len(texts) == CHUNK or characters > CHUNK_CHARACTERS:
                yield places, texts
                places, texts, characters = [], [], 0
        if texts:
            yield places, texts

    def _count(self, texts: Sequence[str]) -> dict[int, int]:
        """Index -> tokens, of the overlong ones."""
        open_ones = [(index, text) for index, text in enumerate(texts) if not self._surely_fits(text)]
        encoded = self.chat.tokenizer.encode_batch_fast([text for _, text in open_ones], add_special_tokens=False)
        counted = ((index, len(tokens)) for (index, _), tokens in zip(open_ones, encoded, strict=True))
        return {index: tokens for index, tokens in counted if tokens > self.max_tokens}

    def _surely_fits(self, text: str) -> bool:
        """A token takes a byte at least; normalisation leaves ASCII as long as it is."""
        return len(text) + SLACK <= self.max_tokens and text.isascii()

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


class Memory:
    """What was counted in earlier starts: chunk of texts -> its overlong ones. One file for a tokenizer and a limit."""

    def __init__(self, counted_by: str) -> None:
        self._path = cache_directory() / f"overlong-{xxhash.xxh3_128_hexdigest(counted_by.encode())}"
        self._seen = self._new = 0
        try:
            self._chunks = msgspec.msgpack.decode(self._path.read_bytes(), type=dict[str, dict[int, int]])
        except (OSError, msgspec.DecodeError):
            self._chunks = {}

    def find(self, texts: Sequence[str]) -> dict[int, int] | None:
        self._seen += len(texts)
        return self._chunks.get(_digest(texts)) if self._chunks else None

    def keep(self, texts: Sequence[str], lengths: dict[int, int]) -> dict[int, int]:
        self._chunks[_digest(texts)] = lengths
        self._new += 1
        return lengths

    def save(self) -> None:
        """If it is worth it, and as well as it goes: without it the next start counts again."""
        if self._seen < REMEMBERED_FROM or not self._new:
            return
        latest = dict(islice(reversed(self._chunks.items()), MAX_CHUNKS))
        own = self._path.with_suffix(f".{os.getpid()}")
        try:
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes(msgspec.msgpack.encode(latest))
            own.rename(self._path)
        except OSError as error:
            log.info("prompt lengths are not remembered: %s", error)


def _digest(texts: Sequence[str]) -> str:
    digest = xxhash.xxh3_128()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()
