"""Requests of one SGLang server, on one event loop: slots, versions, swaps.

```
 generate ─► waiting ──a slot is free──► running: a task that reads its stream ◄══ HTTP ══ SGLang
 update_weights: pause(in_place) ─► load ─► stamp ─► continue;  sleep: pause(retract), give the cache up
```

A request that begins after a swap is prefilled after it: its prefix cache is salted with the version, and entries of
another version are never found. Requests that were running go on with the cache they have. One that is aborted is
answered at once, and holds its slot until SGLang has let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, Literal, TypeVar

from agent_loop.llm.protocol import Generation, SamplingParams, Scores, ServerDied, ServerLoad, StopReason
from streamrl.rollout.calls import Calls
from streamrl.rollout.events import Reporter
from streamrl.rollout.sglang.request import Call, added, body, new_salt, version_of, versions
from streamrl.rollout.sglang.wire import Refused, SglangHttp
from streamrl.weight_sync import WeightsDamaged

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEALTH_SECONDS = 1.0
"""A server that was silent for so long is asked how it is before its load is told."""
CACHE = ["kv_cache"]
"""What sleep gives up: weights may come meanwhile."""

_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length"}


class SglangCalls(Calls[Call]):
    """Everything here runs on the event loop of the server.

    Invariant: a token carries the version that SGLang says sampled it.
    """

    engine_name = "SGLang"

    def __init__(
        self, http: SglangHttp, *, slots: int, version: int, support: int, releases: bool, report: Reporter
    ) -> None:
        super().__init__(slots=slots, version=version, report=report)
        self.http, self._support, self._releases = http, support, releases
        self._leaving: set[Call] = set()
        """Answered, but still in SGLang."""
        self._paused = False
        """Whether SGLang itself stands."""
        self._salt = new_salt(version)
        self._preemptions = self._prompt_tokens = self._cached_tokens = 0
        self._rows_scored = self._tokens_scored = 0
        self._score_queue_seconds = 0.0
        self._usage = 0.0
        self._heard = time.monotonic()

    async def generate(self, call_id: str, prompt: list[int], sampling: SamplingParams, seed: int) -> Generation:
        self._check_new(call_id)
        return await self._answer(Call(call_id, prompt, sampling, seed, asyncio.get_running_loop().create_future()))

    async def score(self, prompt: list[int], response: list[int]) -> Scores:
        """Takes a slot for a prefill, and one token that is thrown away: it has the version."""
        self.check_alive()
        answer = asyncio.get_running_loop().create_future()
        call_id = f"score {uuid.uuid4().hex}"
        return await self._answer(
            Call(call_id, [*prompt, *response], SamplingParams(max_tokens=1), 0, answer, scored=len(response))
        )

    async def _answer(self, call: Call) -> Any:
        self._submit(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            await self._drop([call])
            raise

    async def abort(self, ids: Iterable[str] | None) -> int:
        self.check_alive()
        meant = list(self.open.values()) if ids is None else [self.open[id] for id in ids if id in self.open]
        calls = [call for call in meant if not call.scored]
        await self._drop(calls)
        return len(calls)

    async def stand(self, reason: Literal["paused", "asleep"]) -> None:
        async with self._changing:
            self.check_alive()
            release = reason == "asleep" and reason not in self._stands and self._releases
            self._stands.add(reason)
            if release or not self._paused:
                await self._pause("retract" if release else "in_place")
            if release:
                await self._call(self.http.release_memory(CACHE))

    async def go(self, reason: Literal["paused", "asleep"]) -> None:
        async with self._changing:
            self.check_alive()
            if reason not in self._stands:
                return
            if reason == "asleep" and self._releases:
                await self._call(self.http.resume_memory(CACHE))
            self._stands.discard(reason)
            await self._resume()

    async def update_weights(self, directory: str, version: int) -> float:
        """From a directory in Hugging Face's layout; seconds in which no token was made. Raises WeightsDamaged: SGLang
        does not take them, and has put the old ones back."""
        self.check_alive()
        async with self._changing:
            began = time.monotonic()
            async with self._standing():
                unheard = self._take_back()
                try:
                    await self._call(self.http.update_from_disk(directory, version))
                except Refused as error:
                    raise WeightsDamaged(str(error)) from error
                else:
                    self.version, self._salt = version, new_salt(version)
                    if not self._running and not self._leaving:
                        with contextlib.suppress(Refused):  # something runs that is not ours; the salt is enough
                            await self._call(self.http.flush_cache())
                finally:
                    self._send(unheard)
            self._report.weights(began, time.monotonic(), version)
            return time.monotonic() - began

    async def load(self) -> ServerLoad:
        """Raises ServerDied if the server has failed, is closed, or hangs."""
        self.check_alive()
        if time.monotonic() - self._heard > HEALTH_SECONDS:
            ranks = await self._call(self.http.loads())
            self._usage = sum(rank.get("token_usage", 0.0) for rank in ranks) / max(1, len(ranks))
        return ServerLoad(
            **self._figures(),
            preemptions=self._preemptions,
            cache_usage=self._usage,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            rows_scored=self._rows_scored,
            tokens_scored=self._tokens_scored,
            score_queue_seconds=self._score_queue_seconds,
        )

    def _fail_open(self, reason: str) -> None:
        for call in [*self.open.values(), *self._leaving]:
            if not call.answer.done():
                call.answer.set_exception(ServerDied(reason))
            if call.reader is not None and call.reader is not asyncio.current_task():
                call.reader.cancel()
        self.open.clear()
        self._waiting.clear()
        self._running.clear()

    def _slots_held(self) -> int:
        return len(self._running) + len(self._leaving)

    def _begin(self, call: Call) -> None:
        call.admitted = time.perf_counter()
        self._send([call])

    def _send(self, calls: list[Call]) -> None:
        for call in calls:
            if self.failure is None and self.open.get(call.id) is call:
                call.rid = uuid.uuid4().hex
                call.reader = asyncio.ensure_future(self._read(call))

    def _take_back(self) -> list[Call]:
        """Requests of which nothing came yet, while SGLang stands. They may be prefilled after the swap, and must not
        find cache entries from before it: their streams are closed, which ends them, and they are to be sent again."""
        calls = [call for call in self._running.values() if not call.generation.token_ids]
        for call in calls:
            reader, call.reader = call.reader, None
            if reader is not None:
                reader.cancel()
        return calls

    async def _drop(self, calls: list[Call]) -> None:
        """Answer these with the tokens they have; SGLang ends them when it can."""
        gone = [call for call in calls if self.open.get(call.id) is call]
        for call in gone:
            call.end("aborted")
            if call.id in self._running and call.reader is not None:
                self._leaving.add(call)
            self._forget(call)
        self._admit()
        if self.failure is None:
            await asyncio.gather(*(self._call(self.http.abort(call.rid)) for call in gone if call in self._leaving))

    async def _read(self, call: Call) -> None:
        """A call's stream to its end: the root of its task, so everything that goes wrong is settled here."""
        try:
            finished = False
            async with contextlib.aclosing(self.http.generate(body(call, self._salt, self._support))) as stream:
                async for chunk in stream:
                    if call in self._leaving:  # SGLang heard of the abort before the request: it ends with the stream
                        return
                    meta = chunk["meta_info"]
                    if not call.scored:
                        self._take(call, chunk["output_ids"], meta)
                    finished = meta["finish_reason"] is not None
                    if finished:
                        self._finish(call, meta)
            if not finished and call not in self._leaving:
                raise ServerDied(f"the stream of request {call.id} ended before the request")
        except Refused as error:
            if not call.answer.done():
                call.answer.set_exception(ValueError(str(error)))
        except ServerDied as error:
            if call not in self._leaving:  # else the stream was given up by both
                self.fail(str(error))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self.fail(f"its answer to request {call.id} is not of SGLang's schema: {error!r}")
        finally:
            if call.reader is asyncio.current_task():  # else it was sent again
                self._leave(call)

    def _leave(self, call: Call) -> None:
        self._forget(call)
        self._leaving.discard(call)
        if not call.answer.done():
            call.answer.set_exception(ServerDied(self.failure or "the request was given up"))
        self._admit()

    def _take(self, call: Call, ids: list[int], meta: dict[str, Any]) -> None:
        """What a chunk adds, whether it holds all tokens so far or only the new ones. The versions are appended last
        (protocol.since)."""
        self._heard = time.monotonic()
        got = call.generation
        fresh, told = added(ids, meta, len(got.token_ids))
        if not (count := len(fresh)):
            return
        log_probs = [min(each, 0.0) for each in told if each is not None and not math.isnan(each)]
        if len(log_probs) != count:
            raise self.fail(f"the model gives NaN at weight version {self.version}: these weights are broken")
        if not got.token_ids:
            self._first_token(call)
            self._prompt_tokens += len(call.prompt)
            self._cached_tokens += meta.get("cached_tokens") or 0
        self._tokens += count
        self._was_busy(self._heard, scored=self._tokens_scored)
        got.token_ids += fresh
        got.log_probs += log_probs
        got.weight_versions += [version_of(meta)] * count

    def _finish(self, call: Call, meta: dict[str, Any]) -> None:
        self._preemptions += meta.get("num_retractions") or 0
        got, reason = call.generation, meta["finish_reason"]
        if call.scored and reason["type"] in _REASONS:
            if scores := call.end_score(meta):
                self._rows_scored += 1
                self._tokens_scored += call.scored
                self._score_queue_seconds += scores.queue_seconds
            self._heard = time.monotonic()
            self._was_busy(self._heard, scored=self._tokens_scored)
            return self._forget(call)
        if "weight_versions" in meta and not call.scored:
            stamped = versions(meta, len(got.token_ids))
            if stamped != got.weight_versions:  # the scheduler's own count goes first
                logger.warning("request %s: versions %s, not as they came", call.id, meta["weight_versions"])
                got.weight_versions[:] = stamped
        if reason["type"] in _REASONS:
            call.end(_REASONS[reason["type"]])
        elif reason.get("status_code") == 400:
            raise Refused(f"SGLang refuses the request: {reason.get('message')}")
        elif call.scored:
            if not call.answer.done():
                call.answer.set_exception(ServerDied(f"SGLang gave up a row to score: {reason.get('message')}"))
        else:  # aborted, and not by us: its client goes on elsewhere
            call.end("aborted")
        self._forget(call)

    async def _pause(self, mode: Literal["in_place", "retract"]) -> None:
        await self._call(self.http.pause(mode))
        self._paused = True
        await self._settle()

    async def _resume(self) -> None:
        if self._stands or self.failure is not None:
            return
        if self._paused:
            await self._call(self.http.resume())
            self._paused = False
        self._goes_on()

    @contextlib.asynccontextmanager
    async def _standing(self) -> AsyncIterator[None]:
        """For a swap. Where nothing is in SGLang there is nothing to pause: nothing is sent meanwhile."""
        self._stands.add("swap")
        try:
            if not self._paused and (self._running or self._leaving):
                await self._pause("in_place")
            yield
        finally:
            self._stands.discard("swap")
            await self._resume()

    async def _settle(self) -> None:
        """SGLang's answer to the pause came after its last tokens, on other connections: they are here when a further
        answer is, and are taken when their tasks had a turn."""
        await self._call(self.http.info())
        for _ in range(4):
            await asyncio.sleep(0)

    async def _call(self, call: Awaitable[T]) -> T:
        """The answer of the server; one that is gone or does not answer fails."""
        try:
            answer = await call
        except ServerDied as error:
            self.check_alive()
            raise self.fail(str(error)) from error
        self._heard = time.monotonic()
        return answer
