"""A model behind an OpenAI-compatible HTTP interface, for judges and teachers.

    remote = OpenAIRemote("https://host/v1", "some-model", key=ApiKey.find(env="JUDGE_KEY"))
    verdict = await remote.chat([{"role": "user", "content": "Is 17 prime? Answer yes or no."}], max_tokens=3)
    scores = await remote.score(prompt_ids, response_ids)      # where the server gives log-probs of a prompt

Whose weights it serves is not ours: it has no versions, and no part in weight sync.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_loop.llm import openai_answers as answers
from agent_loop.llm.keys import ApiKey
from agent_loop.llm.protocol import CannotScore, Scores
from agent_loop.llm.remote_http import Backoff, RemoteHttp, RemoteRefused

T = TypeVar("T")

_NOT_OFFERED = frozenset({400, 404, 405, 422, 501})
"""Answers of a server that has no such endpoint, or not with these fields."""

_ENVELOPE = 1 << 20
_SAID_BYTES, _SCORED_BYTES = 4096, 512
"""Of an answer, for each token that it may say or score, with what servers tell beside it."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of a model. `log_probs`: of its tokens, at temperature 1; empty unless asked for and told."""

    text: str
    finish_reason: str
    tokens: tuple[str, ...] = ()
    log_probs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0


class OpenAIRemote:
    """Calls share one pool of connections; see `RemoteHttp` for retries, the deadline and the bound on concurrency."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: ApiKey | None = None,
        concurrency: int = 16,
        deadline: float = 120.0,
        backoff: Backoff | None = None,
    ) -> None:
        """`url` ends with the version, as in https://host/v1. Raises ValueError for what is no such address."""
        self.model = model
        self.http = RemoteHttp(url, key=key, concurrency=concurrency, deadline=deadline, backoff=backoff)
        self._way: str | None = None

    async def close(self) -> None:
        await self.http.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        log_probs: bool = False,
        **more: Any,
    ) -> Said:
        """The answer to a conversation. `more`: further fields of the interface (seed, stop, response_format, ...).

        Raises RemoteRefused, RemoteUnavailable, RemoteInvalid.
        """
        asked = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature, **more}
        asked |= {"logprobs": True} if log_probs else {}
        answer = await self._post("/chat/completions", asked, answers.Chat, max_tokens * _SAID_BYTES)
        choice = answer.choices[0]
        told = (choice.logprobs.content or []) if choice.logprobs else []
        return Said(
            text=choice.message.content or "",
            finish_reason=choice.finish_reason or "",
            tokens=tuple(each.token for each in told),
            log_probs=tuple(each.logprob for each in told),
            prompt_tokens=answer.used.prompt_tokens or 0,
            completion_tokens=answer.used.completion_tokens or 0,
        )

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        log_probs: bool = False,
        **more: Any,
    ) -> Said:
        """What follows a text or token ids. Raises RemoteRefused, RemoteUnavailable, RemoteInvalid."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        asked = {"prompt": given, "max_tokens": max_tokens, "temperature": temperature, **more}
        asked |= {"logprobs": 0} if log_probs else {}
        answer = await self._post("/completions", asked, answers.Completion, max_tokens * _SAID_BYTES)
        choice = answer.choices[0]
        told = choice.logprobs or answers.TokenLogProbs()
        return Said(
            text=choice.text,
            finish_reason=choice.finish_reason or "",
            tokens=tuple(told.tokens or ()),
            log_probs=tuple(told.token_logprobs or ()),
            prompt_tokens=answer.used.prompt_tokens or 0,
            completion_tokens=answer.used.completion_tokens or 0,
        )

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0, *, session: str = ""
    ) -> Scores:
        """The log-prob of each response token, as in `Scorer`: by `prompt_logprobs` (vLLM) or by `echo`, whichever the
        server takes first.

        Raises CannotScore (it takes neither, or `temperature` is not 1: the interface has log-probs of a prompt at 1
        alone), ValueError, RemoteRefused, RemoteUnavailable, RemoteInvalid.
        """
        if temperature != 1.0:
            raise CannotScore(f"temperature {temperature:g}: an OpenAI-compatible server tells log-probs at 1 alone")
        if not prompt_ids or not response_ids:
            raise ValueError("at least one prompt and one response token are needed to score")
        ids, count = [*prompt_ids, *response_ids], len(response_ids)
        began, most, refused = time.perf_counter(), len(ids) * _SCORED_BYTES, []
        for way in (self._way,) if self._way else ("prompt_logprobs", "echo"):
            asked = {"prompt": ids, "max_tokens": 1, "temperature": 0.0}
            try:
                if way == "prompt_logprobs":
                    asked |= {"prompt_logprobs": 0}
                    found = (await self._post("/completions", asked, answers.Scored, most)).log_probs(ids)
                else:
                    asked |= {"echo": True, "logprobs": 0}
                    found = (await self._post("/completions", asked, answers.Echoed, most)).log_probs(ids)
            except RemoteRefused as error:
                if error.status not in _NOT_OFFERED:
                    raise
                refused.append(str(error))
                continue
            if found is not None:
                self._way = way
                return Scores(found[-count:], engine_seconds=time.perf_counter() - began)
            refused.append(f"with {way} its answer has no log-probs of the prompt")
        raise CannotScore(f"{self.model} at {self.http.url} tells no log-probs of given tokens: {'; '.join(refused)}")

    async def _post(self, path: str, body: dict[str, Any], answer: type[T], most: int) -> T:
        return await self.http.post(path, {"model": self.model, **body}, answer, most=_ENVELOPE + most)
