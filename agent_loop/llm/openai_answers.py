"""What an OpenAI-compatible server answers, as far as it is read: decoding checks it, names what is wrong, and where.

Fields that are not read may hold anything.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from agent_loop.llm.protocol import LEAST_LOG_PROB, MOST_LOG_PROB

T = TypeVar("T")

Choices = Annotated[list[T], msgspec.Meta(min_length=1)]
LogProb = Annotated[float, msgspec.Meta(ge=LEAST_LOG_PROB, le=MOST_LOG_PROB)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Usage(msgspec.Struct):
    prompt_tokens: Count | None = 0
    completion_tokens: Count | None = 0


class _Used(msgspec.Struct, kw_only=True):
    usage: Usage | None = None

    @property
    def used(self) -> Usage:
        return self.usage or Usage()


class Token(msgspec.Struct):
    token: str
    logprob: LogProb


class Content(msgspec.Struct):
    content: list[Token] | None = None


class Message(msgspec.Struct):
    content: str | None = None
    """None: it calls a tool, or refuses."""


class ChatChoice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None
    logprobs: Content | None = None


class Chat(_Used):
    choices: Choices[ChatChoice]


class TokenLogProbs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[LogProb] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens or ()) != len(self.token_logprobs or ()):
            raise ValueError("as many tokens as token_logprobs are expected")


class CompletionChoice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    logprobs: TokenLogProbs | None = None


class Completion(_Used):
    choices: Choices[CompletionChoice]


class OwnLogProb(msgspec.Struct):
    logprob: LogProb


class ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, OwnLogProb] | None] | None = None
    """One entry per token of the prompt, by token id; None for the first."""


class Scored(msgspec.Struct):
    choices: Choices[ScoredChoice]

    def log_probs(self, ids: list[int]) -> list[float] | None:
        """Per token of the prompt but the first; None if they are not there."""
        told = self.choices[0].prompt_logprobs
        if told is None or len(told) != len(ids):
            return None
        found = [(entry or {}).get(str(token)) for entry, token in zip(told[1:], ids[1:], strict=True)]
        own = [each.logprob for each in found if each is not None]
        return own if len(own) == len(found) else None


class EchoLogProbs(msgspec.Struct):
    token_logprobs: list[LogProb | None] | None = None


class EchoChoice(msgspec.Struct):
    logprobs: EchoLogProbs | None = None


class Echoed(msgspec.Struct):
    choices: Choices[EchoChoice]

    def log_probs(self, ids: list[int]) -> list[float] | None:
        """The same, from the prompt repeated in front of the one token that was made."""
        logprobs = self.choices[0].logprobs
        told = logprobs.token_logprobs if logprobs else None
        if told is None or not len(ids) <= len(told) <= len(ids) + 1:
            return None
        own = [each for each in told[1 : len(ids)] if each is not None]
        return own if len(own) == len(ids) - 1 else None
