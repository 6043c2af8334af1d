"""An OpenAI-compatible server whose answers a test tells beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agent_loop.llm.keys import ApiKey
from agent_loop.llm.openai_remote import OpenAIRemote
from agent_loop.llm.remote_http import Backoff
from tests.http_app import Answer, Asked, HttpApp

KEY = ApiKey("sk-a-secret-that-nobody-may-see")
QUICK = Backoff(first=0.01, longest=0.05, tries=4)


class Remote:
    """A server whose answers are told beforehand; `seen` are the requests."""

    def __init__(self) -> None:
        self.answer: Callable[[Asked], Answer] = lambda asked: Answer({"choices": [{"text": "x"}]})
        self.seen: list[Asked] = []
        self.open = self.most = 0
        self.seconds = 0.0
        self.app = HttpApp(self._handle)

    async def _handle(self, asked: Asked) -> Answer:
        self.seen.append(asked)
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(self.seconds)
        self.open -= 1
        return self.answer(asked)

    def client(self, **more: Any) -> OpenAIRemote:
        return OpenAIRemote(self.app.url + "/v1", "judge", key=KEY, **({"backoff": QUICK, "deadline": 10.0} | more))


def log_prob(token: int) -> float:
    return -float(token % 7) - 0.5


def scores(asked: Asked) -> Answer:
    """As vLLM answers a question for prompt_logprobs."""
    told = [None, *({str(token): {"logprob": log_prob(token)}} for token in asked.body["prompt"][1:])]
    return Answer({"choices": [{"text": "", "prompt_logprobs": told}]})
