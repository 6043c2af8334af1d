"""SGLang's HTTP interface without SGLang: the published schema and what a client can rely on or trip over.

A scheduler makes one token per step for every running request. As in the original an abort means every id that begins
with the given one, a paused server answers control calls alone, memory is released only when nothing runs,
`ignore_eos` also ignores stop tokens, versions are told as spans at the end of a request, log-probs of a prompt's
tokens know no temperature, and those after top-k are told up to a number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.rollout.noise import uniforms
from tests.http_app import Answer, Asked, HttpApp

KEY = "fake-key"


@dataclass(eq=False)
class FakeRequest:
    rid: str
    prompt: list[int]
    params: dict[str, Any]
    extra_key: str
    scores_from: int = -1
    masked: bool = False
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    sent: int = 0
    reason: dict[str, Any] | None = None
    aborted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class FakeSglang:
    """Serves at `url` until `close`."""

    def __init__(
        self, *, vocab_size: int, slots: int, context_length: int, step_seconds: float = 0.002,
        incremental: bool = True, info: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`info`: what it says of itself."""
        self.info = {"disable_overlap_schedule": True, "sampling_mask_max_tokens": 4096} | (info or {})
        self.vocab_size, self.slots, self.context_length = vocab_size, slots, context_length
        self.step_seconds, self.incremental = step_seconds, incremental
        self.version, self.directory, self.paused, self.released = "default", "", False, False
        self.prefilled: list[tuple[str, str]] = []
        """(extra_key, weight version) of each prompt."""
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        self.calls: list[str] = []
        self._app = HttpApp(self._handle)
        self._work = self._app.thread.run(self._started())
        self.url = self._app.url

    def close(self) -> None:
        self._app.close()

    async def _started(self) -> asyncio.Task[None]:
        self._arrived, self._passing = asyncio.Event(), asyncio.Event()
        self._passing.set()
        return asyncio.ensure_future(self._schedule())

    async def hold(self) -> None:
        """What streams send from now on is on its way until `let_go`."""
        await self._app.thread.call(self._hold(True))

    async def let_go(self) -> None:
        await self._app.thread.call(self._hold(False))

    async def _hold(self, held: bool) -> None:
        self._passing.clear() if held else self._passing.set()

    async def _handle(self, asked: Asked) -> Answer:
        if asked.headers.get("authorization") != f"Bearer {KEY}":
            return Answer({"error": "Unauthorized"}, 401)
        self.calls.append(asked.path)
        body = asked.body or {}
        match asked.path:
            case "/ready" | "/health":
                return Answer()
            case "/generate":
                return self._generate(body)
            case "/abort_request":
                self._abort(body)
            case "/pause_generation":
                self._pause(body["mode"])
            case "/continue_generation":
                self.paused = False
                self._arrived.set()
            case "/update_weights_from_disk":
                return self._update(body)
            case "/release_memory_occupation":
                assert not self.running, "SGLang's scheduler ends here"
                self.released = True
            case "/resume_memory_occupation":
                self.released = False
            case "/flush_cache":
                if self.running or self.waiting:
                    return Answer("Flush cache failed.", 400)
            case "/server_info":
                return Answer({"version": "fake", "internal_states": [{"last_gen_throughput": 0.0}], **self.info})
            case "/v1/loads":
                return Answer({"loads": [{"num_running_reqs": len(self.running), "token_usage": 0.25}]})
            case _:
                return Answer({"detail": "Not Found"}, 404)
        return Answer({"message": "ok"})

    def _generate(self, body: dict[str, Any]) -> Answer:
        request = FakeRequest(
            body["rid"], body["input_ids"], body["sampling_params"], body.get("extra_key") or "",
            scores_from=body["logprob_start_len"], masked=body.get("return_sampling_mask", False),
        )  # fmt: skip
        assert body["return_logprob"]
        assert body["stream"]
        assert max(request.prompt) < self.vocab_size, "SGLang's scheduler ends here"
        total = len(request.prompt) + request.params["max_new_tokens"]
        if total > self.context_length:
            return Answer(stream=_error(f"maximum context length of {self.context_length}; a total of {total}"))
        limit = self.info["sampling_mask_max_tokens"]
        if request.masked and not 1 <= request.params["top_k"] <= limit:
            return Answer(stream=_error(f"return_sampling_mask requires top_k=1 or finite 1 < top_k <= {limit}"))
        self.waiting.append(request)
        self._arrived.set()
        return Answer(stream=self._stream(request))

    async def _stream(self, request: FakeRequest) -> AsyncIterator[str]:
        try:
            while True:
                await request.news.wait()
                request.news.clear()
                done = request.reason is not None
                chunk = json.dumps(self._chunk(request))
                request.sent = len(request.tokens)
                await self._passing.wait()
                yield chunk
                if done:
                    break
            yield "[DONE]"
        finally:
            request.aborted = True  # as when the client goes away

    def _chunk(self, request: FakeRequest) -> dict[str, Any]:
        first = request.sent if self.incremental else 0
        log_prob = -math.log(self.vocab_size)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.reason,
            "prompt_tokens": len(request.prompt),
            "weight_version": request.versions[-1] if request.versions else self.version,
            "num_retractions": 0,
            "completion_tokens": len(request.tokens),
            "cached_tokens": 0,
            "output_token_logprobs": [[log_prob, token, None] for token in request.tokens[first:]],
        }
        if request.scores_from >= 0:
            scored = request.prompt[request.scores_from :]
            meta["input_token_logprobs"] = [[None, scored[0], None], *([fake_log_prob(t), t, None] for t in scored[1:])]
        if request.masked:
            log_prob = -math.log(self._kept(request.params))
            meta["output_token_sampling_logprobs"] = [log_prob] * len(request.tokens[first:])
        if request.reason is not None:
            meta["weight_versions"] = _spans(request.versions)
        return {"output_ids": request.tokens[first:], "meta_info": meta}

    def _abort(self, body: dict[str, Any]) -> None:
        for request in [*self.running, *self.waiting]:
            if body.get("abort_all") or (body["rid"] and request.rid.startswith(body["rid"])):
                request.aborted = True
        for request in [each for each in self.waiting if each.aborted]:
            self.waiting.remove(request)
            self._end(request, {"type": "abort", "message": "Abort in waiting queue"})

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "retract":
            self.waiting.extendleft(reversed(self.running))
            self.running.clear()

    def _update(self, body: dict[str, Any]) -> Answer:
        weights = list(Path(body["model_path"]).glob("*.safetensors"))
        if not weights or not Path(body["model_path"], "config.json").is_file():
            return Answer({"success": False, "message": f"no weights in {body['model_path']}"}, 400)
        if body.get("flush_cache", True) and (self.running or self.waiting):
            return Answer({"success": False, "message": "Flush cache failed after updating weights"}, 400)
        self.version, self.directory = body["weight_version"], body["model_path"]
        return Answer({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _schedule(self) -> None:
        while True:
            if self.paused or not (self.running or self.waiting):
                self._arrived.clear()
                await self._arrived.wait()
                continue
            while self.waiting and len(self.running) < self.slots:
                request = self.waiting.popleft()
                self.prefilled.append((request.extra_key, self.version))
                self.running.append(request)
            for request in list(self.running):
                self._step(request)
            await asyncio.sleep(self.step_seconds)

    def _step(self, request: FakeRequest) -> None:
        params, made = request.params, request.tokens
        if request.aborted:
            return self._end(request, {"type": "abort", "message": "Aborted"})
        position = len(request.prompt) + len(made)
        token = int(uniforms(params["sampling_seed"] or 0, 0, position, 1)[0] * self._kept(params))
        made.append(token)
        request.versions.append(self.version)
        if token in params["stop_token_ids"] and not params["ignore_eos"]:
            return self._end(request, {"type": "stop", "matched": token})
        if len(made) == params["max_new_tokens"]:
            return self._end(request, {"type": "length", "length": len(made)})
        request.news.set()

    def _kept(self, params: dict[str, Any]) -> int:
        """Tokens that are left of equally likely ones: the first."""
        by_top_p = math.floor(params["top_p"] * self.vocab_size) + 1
        return min(params["top_k"] if params["top_k"] > 0 else self.vocab_size, by_top_p, self.vocab_size)

    def _end(self, request: FakeRequest, reason: dict[str, Any]) -> None:
        request.reason = reason
        if request in self.running:
            self.running.remove(request)
        request.news.set()


def fake_log_prob(token: int) -> float:
    """Of a token of a prompt, whatever stands before it."""
    return -1.0 - token / 8


async def _error(message: str) -> AsyncIterator[str]:
    yield json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": 400}})
    yield "[DONE]"


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans
