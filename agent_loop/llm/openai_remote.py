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
from typing import Any

from agent_loop.llm.keys import ApiKey
from agent_loop.llm.protocol import CannotScore, Scores
from agent_loop.llm.remote_http import Backoff, RemoteHttp, RemoteRefused, RemoteUnavailable

_NOT_OFFERED = frozenset({400, 404, 405, 422, 501})
"""Answers of a server that has no such endpoint, or not with these fields."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of a model. `log_probs`: of its tokens, at temperature 1; empty unless they were asked for."""

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
        """`url` ends with the version, as in https://host/v1."""
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

        Raises RemoteRefused, RemoteUnavailable.
        """
        asked = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature, **more}
        answer = await self._post("/chat/completions", asked | ({"logprobs": True} if log_probs else {}))
        choice, usage = _choice(answer), answer.get("usage") or {}
        told = (choice.get("logprobs") or {}).get("content") or []
        return Said(
            text=(choice.get("message") or {}).get("content") or "",
            finish_reason=choice.get("finish_reason") or "",
            tokens=tuple(each["token"] for each in told),
            log_probs=tuple(float(each["logprob"]) for each in told),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
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
        """What follows a text or token ids. Raises RemoteRefused, RemoteUnavailable."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        asked = {"prompt": given, "max_tokens": max_tokens, "temperature": temperature, **more}
        answer = await self._post("/completions", asked | ({"logprobs": 0} if log_probs else {}))
        choice, usage = _choice(answer), answer.get("usage") or {}
        told = choice.get("logprobs") or {}
        return Said(
            text=choice.get("text") or "",
            finish_reason=choice.get("finish_reason") or "",
            tokens=tuple(told.get("tokens") or ()),
            log_probs=tuple(float(each) for each in told.get("token_logprobs") or ()),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
        )

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0, *, session: str = ""
    ) -> Scores:
        """The log-prob of each response token, as in `Scorer`: by `prompt_logprobs` (vLLM) or by `echo`, whichever the
        server takes first.

        Raises CannotScore (it takes neither, or `temperature` is not 1: the interface has log-probs of a prompt at 1
        alone), ValueError, RemoteRefused, RemoteUnavailable.
        """
        if temperature != 1.0:
            raise CannotScore(f"temperature {temperature:g}: an OpenAI-compatible server tells log-probs at 1 alone")
        if not prompt_ids or not response_ids:
            raise ValueError("at least one prompt and one response token are needed to score")
        ids, count = [*prompt_ids, *response_ids], len(response_ids)
        began, refused = time.perf_counter(), []
        for way in (self._way,) if self._way else ("prompt_logprobs", "echo"):
            fields = {"prompt_logprobs": 0} if way == "prompt_logprobs" else {"echo": True, "logprobs": 0}
            try:
                answer = await self._post(
                    "/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0.0, **fields}
                )
            except RemoteRefused as error:
                if error.status not in _NOT_OFFERED:
                    raise
                refused.append(str(error))
                continue
            read = _by_prompt_logprobs if way == "prompt_logprobs" else _by_echo
            found = read(_choice(answer), ids)
            if found is not None:
                self._way = way
                return Scores(found[-count:], engine_seconds=time.perf_counter() - began)
            refused.append(f"with {way} its answer has no log-probs of the prompt")
        raise CannotScore(f"{self.model} at {self.http.url} tells no log-probs of given tokens: {'; '.join(refused)}")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self.http.post(path, {"model": self.model, **body})


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RemoteUnavailable(f"an answer without choices: its fields are {', '.join(sorted(answer)) or 'none'}")
    return choices[0]


def _by_prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> list[float] | None:
    """Per token of the prompt but the first; None if they are not there. One entry per token: {id: {"logprob": x}}."""
    told = choice.get("prompt_logprobs")
    if not isinstance(told, list) or len(told) != len(ids):
        return None
    try:
        return [float(entry[str(token)]["logprob"]) for entry, token in zip(told[1:], ids[1:], strict=True)]
    except (KeyError, TypeError):
        return None


def _by_echo(choice: dict[str, Any], ids: list[int]) -> list[float] | None:
    """The same from the prompt repeated in front of the one token that was made."""
    told = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(told, list) or not len(ids) <= len(told) <= len(ids) + 1:
        return None
    found = told[1 : len(ids)]
    return None if any(each is None for each in found) else [float(each) for each in found]
