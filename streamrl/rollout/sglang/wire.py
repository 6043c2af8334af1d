"""SGLang's HTTP interface, as far as it is used here: one method per endpoint, and what each can raise.

Written after sglang 0.5.23 (sglang/srt/entrypoints/http_server.py). `Refused` is an answer that says no; every other
trouble (no connection, a broken stream, silence) is ServerDied.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import httpx2

from agent_loop.llm.keys import ApiKey
from agent_loop.llm.protocol import ServerDied

CONTROL_SECONDS = 50.0
"""For one call: it waits for the step under way, and a swap for all its bytes. Below the deadline of the callers
(streamrl.rollout.replica), who would otherwise learn less."""
CONNECT_SECONDS = 10.0
_SHOWN = 400


class Refused(ValueError):
    """The server understood, and says no."""


class SglangHttp:
    """Belongs to the event loop on which it is first used."""

    def __init__(self, url: str, key: ApiKey | None) -> None:
        self.url = url.rstrip("/")
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers=key.headers if key else {},
            timeout=httpx2.Timeout(CONTROL_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # no proxy lies between two processes of one run
            follow_redirects=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def is_ready(self) -> bool:
        """Whether it takes requests; False also while nobody listens yet. Raises ServerDied: not with our key."""
        try:
            status = (await self._client.get("/ready", timeout=CONNECT_SECONDS)).status_code
        except httpx2.TransportError:
            return False
        if status in (401, 403):
            raise self._no("/ready", status, "")
        return status == 200

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream. Its tokens may be long in coming (it may be paused), so there is no deadline."""
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        try:
            async with self._client.stream(
                "POST", "/generate", json={**body, "stream": True}, timeout=timeout
            ) as answer:
                if answer.status_code != 200:
                    raise self._no("/generate", answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise Refused(f"SGLang refuses the request: {str(chunk['error'])[:_SHOWN]}")
                    yield chunk
        except (httpx2.TransportError, json.JSONDecodeError) as error:
            raise ServerDied(f"SGLang's stream broke: {error!r}") from error

    async def abort(self, rid: str | None) -> None:
        """None: all. A request is meant by every prefix of its id."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self, mode: Literal["in_place", "retract"]) -> None:
        """Returns when no step is under way: the scheduler has answered a question that came after."""
        await self._post("/pause_generation", {"mode": mode})
        await self.info()

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update_from_disk(self, directory: str, version: int) -> None:
        """The prefix cache stays. Raises Refused: the old weights stay, too."""
        body = {"model_path": directory, "weight_version": str(version), "flush_cache": False}
        await self._post("/update_weights_from_disk", body)

    async def flush_cache(self) -> None:
        """Raises Refused while requests run or wait."""
        await self._post("/flush_cache", {})

    async def release_memory(self, tags: list[str]) -> None:
        """The scheduler must have no running request (mode "retract"): it would end."""
        await self._post("/release_memory_occupation", {"tags": tags})

    async def resume_memory(self, tags: list[str]) -> None:
        await self._post("/resume_memory_occupation", {"tags": tags})

    async def info(self) -> dict[str, Any]:
        """Its arguments and the scheduler's own state, asked of it."""
        return (await self._ask("GET", "/server_info")).json()

    async def loads(self) -> list[dict[str, Any]]:
        """By data-parallel rank: num_running_reqs, num_waiting_reqs, token_usage, queues, ..."""
        return (await self._ask("GET", "/v1/loads")).json()["loads"]

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx2.Response:
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx2.TimeoutException as error:
            raise ServerDied(f"SGLang gave no answer to {path} within {CONTROL_SECONDS:.0f} s") from error
        except httpx2.TransportError as error:
            raise ServerDied(f"SGLang does not answer {path}: {error!r}") from error
        if answer.status_code != 200:
            raise self._no(path, answer.status_code, answer.text)
        return answer

    @staticmethod
    def _no(path: str, status: int, text: str) -> Exception:
        said = text[:_SHOWN]
        if status in (401, 403):
            return ServerDied(f"SGLang does not take our key at {path} ({status}); see rollout.sglang.key_env")
        if 400 <= status < 500:
            return Refused(f"SGLang refuses {path} ({status}): {said}")
        return ServerDied(f"SGLang fails at {path} ({status}): {said}")
