"""A scripted LLM server and a tokenizer of bytes with a ChatML template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agent_loop.llm.protocol import Generation, SamplingParams, Scores, ServerDied, ServerLoad
from agent_loop.rendering.chat import ChatTokenizer

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>{{ '\n' }}"
    "{%- else -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{{ '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return tokenizer


def byte_chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(), TEMPLATE, special={"eos_token": "<|im_end|>"})


Script = Callable[[list[int], SamplingParams], "Sequence[int] | Generation | Exception"]


@dataclass
class FakeServer:
    """Implements LLMServer. `script` says what a call gives: tokens (cut at max_tokens), a Generation, or an error."""

    script: Script
    seconds: float = 0.0
    version: int = 0
    dead: bool = False
    calls: list[tuple[str, list[int], SamplingParams]] = field(default_factory=list)
    shown: list[list[bytes]] = field(default_factory=list)
    scored: list[tuple[list[int], list[int], float]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    probes: int = 0
    running: int = 0
    most_running: int = 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        self.shown.append(list(images))
        self.calls.append((request_id, list(prompt_ids), sampling))
        if self.dead:
            raise ServerDied("connection refused")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if self.dead:
            raise ServerDied("connection lost")
        result = self.script(prompt_ids, sampling)
        if isinstance(result, Exception):
            raise result
        return result if isinstance(result, Generation) else generation(result, sampling, self.version)

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        """Minus a thousandth of each token's id."""
        self.scored.append((list(prompt_ids), list(response_ids), temperature))
        if not self.dead:
            await asyncio.sleep(self.seconds)
        if self.dead:
            raise ServerDied("connection refused")
        return Scores([-token / 1000 for token in response_ids], self.version, queue_seconds=0.1, engine_seconds=0.2)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        self.aborted += request_ids or ["*"]
        return 0

    async def update_weights(self, path: str, version: int) -> None:
        self.version = version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self) -> ServerLoad:
        self.probes += 1
        if self.dead:
            raise ServerDied("connection refused")
        return ServerLoad(self.running, 0, 64, self.version, 0, 0.0)

    async def close(self) -> None: ...


def generation(tokens: Sequence[int], sampling: SamplingParams, version: int = 0, reason: Any = None) -> Generation:
    cut = list(tokens)[: sampling.max_tokens]
    why = reason or ("stop" if len(cut) == len(tokens) else "length")
    return Generation(cut, [-0.5] * len(cut), [version] * len(cut), why, queue_seconds=0.1, engine_seconds=0.2)


def says(*turns: str) -> Script:
    """Answers the k-th assistant turn of a conversation with the k-th text (the last one for all further), ended by
    the stop token. Which turn it is is read from the prompt, so sessions do not disturb each other."""
    chat = byte_chat()

    def script(prompt_ids: list[int], sampling: SamplingParams) -> list[int]:
        turn = chat.decode(prompt_ids).count("<|im_start|>assistant") - 1
        return chat.encode(turns[min(turn, len(turns) - 1)] + "<|im_end|>")

    return script
