"""vLLM's engine as an `LLMServer`, on one event loop: slots, versions, swaps.

```
 generate ─► waiting ──a slot is free──► running ──add_request──► AsyncLLM ══ process of the engine: scheduler, workers
                                            ▲                        ║
             tokens, log-probs, versions ◄──┴── deltas of each step ═╝
 commit:       pause(keep) ─► drain ─► workers load what they have prepared (weights.py) ─► stamp ─► resume
 sleep(level): pause(keep) ─► drain ─► running calls wait again, with their tokens ─► vLLM gives its memory up
```

A request that begins after a swap is prefilled after it: its prefix cache is salted with the version, and blocks of
another version are never found. Requests that were running go on with the cache they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_loop.llm.protocol import Generation, SamplingParams, ServerDied, ServerLoad, StopReason
from streamrl.rollout.calls import Calls
from streamrl.rollout.events import Reporter
from streamrl.rollout.expected_weights import ExpectedWeights
from streamrl.rollout.vllm.request import Call, engine_sampling
from streamrl.rollout.vllm.weights import Prepared, WorkerWeights

T = TypeVar("T")

CONTROL_SECONDS = 50.0
"""For one call of the engine: it waits for the step under way, and a swap for all its bytes. Below the deadline of the
callers (streamrl.rollout.replica), who would otherwise learn less."""

_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass(slots=True)
class Cache:
    """What vLLM tells of its KV cache after every step."""

    usage: float = 0.0
    preemptions: int = 0
    looked_up: int = 0
    """Tokens that requests began with."""
    found: int = 0


class VllmCalls(Calls[Call]):
    """Everything here runs on the event loop of the engine.

    Invariant: a token carries the version of the weights that sampled it.
    """

    engine_name = "vLLM's engine"

    def __init__(
        self, engine: Any, *, slots: int, version: int, expected: ExpectedWeights, report: Reporter, cache: Cache,
        sleep_level: int | None = None,
    ) -> None:  # fmt: skip
        """`sleep_level`: vLLM's; None gives no memory up."""
        super().__init__(slots=slots, version=version, report=report)
        self.engine, self._cache = engine, cache
        self.weights = WorkerWeights(engine, expected, self._engine_call)
        self._syncing = asyncio.Lock()
        """Held before `_changing`."""
        self._level = sleep_level
        self._away: set[str] = set()
        """What of vLLM's memory is given up: "weights", "kv_cache"."""
        self._blank = False
        """The weights are lost."""

    async def start(self) -> None:
        """Before anything else. What vLLM was started with is version 0."""
        await self._stamp(0)

    async def generate(self, call_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        self._check_new(call_id)
        call = Call(call_id, prompt, sampling, asyncio.get_running_loop().create_future())
        self._submit(call)
        try:
            while True:
                await call.slot
                if call.id in self._waiting:  # it was taken out again before it began
                    continue
                if call.aborted:
                    call.generation.stop_reason = "aborted"
                    break
                call.retracted = None
                await self._follow(call)
                if call.retracted is None:
                    break
        finally:
            self._leave(call)
        return call.generation

    async def abort(self, ids: Iterable[str] | None) -> int:
        self.check_alive()
        asked = list(self.open.values()) if ids is None else [self.open[id] for id in ids if id in self.open]
        calls = [call for call in asked if not call.aborted]
        for call in calls:
            call.aborted = True
            if self._waiting.pop(call.id, None) and not call.slot.done():
                call.slot.set_result(None)
        in_engine = [call.engine_id for call in calls if call.queue is not None]
        if in_engine:
            await self._engine_call(self.engine.abort(in_engine))
        return len(calls)

    async def stand(self, reason: str) -> None:
        async with self._changing:
            self.check_alive()
            if not self._stands:
                self._stands.add(reason)
                await self._pause()
            self._stands.add(reason)

    async def go(self, reason: str) -> None:
        async with self._changing:
            self.check_alive()
            if reason in self._stands:
                self._stands.discard(reason)
                await self._resume()

    async def sleep(self) -> None:
        """Stand; with a level also without the cache and the weights on the device, and no call in the engine."""
        async with self._changing:
            self.check_alive()
            if "asleep" in self._stands:
                return
            if not self._stands:
                self._stands.add("asleep")
                await self._pause()
            self._stands.add("asleep")
            if self._level is not None:
                await self._retract()
                await self._engine_call(self.engine.sleep(self._level, mode="keep"))
                self._away, self._blank = {"weights", "kv_cache"}, self._level == 2

    async def wake_up(self) -> None:
        async with self._changing:
            self.check_alive()
            if "asleep" not in self._stands:
                return
            if self._blank:
                raise self.fail("it was woken up before it got weights, and sleep_level=2 had given up the old ones")
            if self._away:
                await self._fetch(*self._away)
            self._stands.discard("asleep")
            if self._level is not None and self._stands:
                await self._pause()  # it goes on by itself once it has all its memory; nothing is in it yet
            await self._resume()

    async def prepare(self, path: str, version: int) -> str:
        """The checksum, as all workers have read it. Requests go on meanwhile. Raises WeightError."""
        async with self._syncing:
            return (await self._prepare(path, version)).digest

    async def commit(self, path: str, version: int) -> float:
        """Seconds in which no token was made for it. Raises WeightError; the old weights stay."""
        async with self._syncing:
            prepared = self.weights.take(path, version) or await self._prepare(path, version)
            async with self._changing:
                self.check_alive()
                began = time.monotonic()
                async with self._standing():
                    if "weights" in self._away:
                        await self._fetch("weights")
                    await self.weights.load(prepared)
                    await self._stamp(version)
                    self._blank = False
                ended = time.monotonic()
            self._report.weights(began, ended, version)
            return ended - began

    async def _prepare(self, path: str, version: int) -> Prepared:
        self.check_alive()
        return await self.weights.prepare(path, version)

    async def _stamp(self, version: int) -> None:
        """Tokens sampled from now on carry `version`. The engine stands."""
        await self._engine_call(self.engine.update_weight_version(str(version)))
        self.version = version

    async def checksum(self) -> str | None:
        self.check_alive()
        return await self.weights.checksum()

    def load(self) -> ServerLoad:
        """Raises ServerDied if the engine has failed, is closed, or hangs."""
        self.check_alive()
        if self.engine.errored:
            raise self.fail(f"its process has ended{exits(self.engine)}; what it said last is in this server's log")
        return ServerLoad(
            **self._figures(),
            preemptions=self._cache.preemptions,
            cache_usage=self._cache.usage,
            prompt_tokens=self._cache.looked_up,
            cached_tokens=self._cache.found,
        )

    def close(self) -> None:
        self.weights.close()
        super().close()

    def _fail_open(self, reason: str) -> None:
        for call in self.open.values():
            if not call.slot.done():
                call.slot.set_exception(ServerDied(reason))
            if call.queue is not None:
                call.queue.put(ServerDied(reason))

    def _begin(self, call: Call) -> None:
        call.join()
        if not call.slot.done():  # else it was just cancelled, and is about to leave
            call.slot.set_result(None)

    def _leave(self, call: Call) -> None:
        now = time.perf_counter()
        started = now if call.admitted is None else call.admitted
        call.generation.queue_seconds = started - call.submitted
        call.generation.engine_seconds = now - started
        self._forget(call)
        self._admit()

    async def _retract(self) -> None:
        """The running calls wait again, before all others, with the tokens they have. The engine stands."""
        calls, now = [call for call in self._running.values() if not call.aborted], time.perf_counter()
        for call in calls:
            call.retracted, call.slot = now, asyncio.get_running_loop().create_future()
            del self._running[call.id]
        self._waiting = {call.id: call for call in calls} | self._waiting
        self._report.idle()
        in_engine = [call.engine_id for call in calls if call.queue is not None]
        if in_engine:
            await self._engine_call(self.engine.abort(in_engine))

    async def _fetch(self, *tags: str) -> None:
        """Memory that was given up."""
        await self._engine_call(self.engine.wake_up(sorted(tags)))
        self._away -= set(tags)

    async def _follow(self, call: Call) -> None:
        """From the engine's first token of a call to its last."""
        from vllm.exceptions import VLLMClientError  # pyright: ignore[reportMissingImports]
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

        self.check_alive()
        call.before = len(call.generation.token_ids)
        try:
            prompt = tokens_input(call.prompt + call.generation.token_ids, cache_salt=f"version {self.version}")
            call.queue = queue = await self.engine.add_request(call.engine_id, prompt, engine_sampling(call))
            if call.aborted or call.retracted is not None:
                await self.engine.abort(call.engine_id)
            self.check_alive()
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                self._take(call, output.outputs[0], finished)
        except asyncio.CancelledError:
            if self.failure is None:
                await self.engine.abort(call.engine_id)
            raise
        except ServerDied:
            raise
        except VLLMClientError as error:  # refused before the engine had it
            raise ValueError(f"vLLM does not take request {call.id}: {error}") from error
        except Exception as error:  # vLLM's own, of many classes: the engine is not what it was
            raise self.fail(self._why(error)) from error

    def _why(self, error: BaseException) -> str:
        """Of what vLLM raised. Where its process is gone it says "see stack trace (above)", and none is there."""
        if type(error).__name__ != "EngineDeadError":
            return repr(error)
        return f"its process has ended{exits(self.engine)}; what it said last is in this server's log"

    def _take(self, call: Call, output: Any, finished: bool) -> None:
        """The tokens that a step gave. The versions are appended last (protocol.since)."""
        ids, got = list(output.token_ids), call.generation
        if ids:
            self._tokens += len(ids)
            self._was_busy(time.monotonic())
            if not got.token_ids:
                self._first_token(call)
            log_probs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
            if any(log_prob != log_prob for log_prob in log_probs):
                raise self.fail(f"the model gives NaN at weight version {self.version}: these weights are broken")
            got.token_ids += ids
            got.log_probs += log_probs
            got.weight_versions += [self.version] * len(ids)
        if finished:
            if output.finish_reason not in _REASONS:
                raise self.fail(f"request {call.id} ended with {output.finish_reason!r}")
            got.stop_reason = _REASONS[output.finish_reason]
            stamped = [int(span.version) for span in output.weight_versions or () for _ in range(span.start, span.end)]
            if stamped != got.weight_versions[call.before :]:
                raise self.fail(
                    f"request {call.id}: the engine says {output.weight_versions}, we {got.weight_versions}"
                )
            call.queue = None
            if call.retracted is not None and output.finish_reason == "abort" and not call.aborted:
                call.pieces += 1
            else:  # it ended before it could be taken out
                call.retracted = None

    async def _pause(self) -> None:
        """No step is under way afterwards, and every token made so far has been taken."""
        core = self.engine.engine_core  # `engine.pause_generation` is this and a sleep of 20 ms in place of the drain
        await self._engine_call(core.pause_scheduler_async(mode="keep", clear_cache=False))

        def drained() -> bool:
            taken = all(call.queue is None or call.queue.output is None for call in self._running.values())
            return taken and core.outputs_queue.empty()

        while not drained():  # noqa: ASYNC110
            await asyncio.sleep(0)  # the takers are ready to run: some turns of the loop, and no time

    async def _resume(self) -> None:
        if self._stands or self.failure is not None:
            return
        await self._engine_call(self.engine.resume_generation())
        self._goes_on()

    @contextlib.asynccontextmanager
    async def _standing(self) -> AsyncIterator[None]:
        """For a swap."""
        if not self._stands:
            self._stands.add("swap")
            await self._pause()
        try:
            yield
        finally:
            if "swap" in self._stands:
                self._stands.discard("swap")
                await self._resume()

    async def _engine_call(self, call: Awaitable[T], seconds: float | None = CONTROL_SECONDS) -> T:
        """The answer of the engine; one that has died or does not answer fails the server."""
        asked: asyncio.Future[T] = asyncio.ensure_future(call)
        died = self.engine.output_handler
        waited = {asked} if died is None else {asked, died}
        try:
            done, _ = await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if asked in done and asked.exception() is None:
            return asked.result()
        if asked in done and (error := asked.exception()) is not None:
            raise self.fail(self._why(error))
        raise self.fail(f"its process has ended{exits(self.engine)}" if done else f"no answer within {seconds} s")


def exits(engine: Any) -> str:
    """How the processes of an engine ended, as far as that is known: " (killed by SIGKILL)"."""
    manager: Any = engine
    for name in ("engine_core", "resources", "engine_manager"):
        manager = getattr(manager, name, None)
    codes = [code for each in getattr(manager, "processes", ()) if (code := each.exitcode)]
    told = [f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}" for code in codes]
    return f" ({', '.join(told)})" if told else ""
