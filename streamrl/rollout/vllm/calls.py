"""vLLM's engine as an `LLMServer`, on one event loop: slots, versions, swaps.

```
 generate ─► waiting ──a slot is free──► running ──add_request──► AsyncLLM ══ process of the engine: scheduler, workers
                                            ▲                        ║
             tokens, log-probs, versions ◄──┴── deltas of each step ═╝
 prepare: check, checksum, workers map the file ─► commit: pause(keep) ─► drain ─► workers load ─► stamp ─► resume
 sleep(level):   pause(keep) ─► drain ─► running calls wait again, with their tokens ─► vLLM gives its memory up
```

Requests wait here for a slot and not in vLLM, so that one that begins after a swap is prefilled after it: its prefix
cache is salted with the version, and blocks of another version are never found. Requests that were running go on with
the cache they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_loop.llm.protocol import Generation, SamplingParams, ServerDied, ServerLoad, StopReason
from agent_loop.seeds import derive_seed
from streamrl.rollout.events import Reporter
from streamrl.rollout.expected_weights import ExpectedWeights
from streamrl.rollout.vllm.answers import Answers
from streamrl.weight_sync import WeightError, WeightsDamaged, WeightsMissing

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_SECONDS = 50.0
"""For one call of the engine: it waits for the step under way, and a swap for all its bytes. Below the deadline of the
callers (streamrl.rollout.replica), who would otherwise learn less."""
PREPARE_SECONDS = 170.0
"""For all workers to read a version, from a disk maybe, while steps go on."""
STALL_SECONDS = 120.0
"""A running engine that gives no token for so long is taken for hung; a prefill of a large model takes seconds."""
TEMPERATURES = (0.01, 2.0)
"""vLLM takes 0, too. It raises a lower one silently, and the log-probs would be those of another temperature."""

_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
_REFUSALS: dict[str, type[WeightError]] = {"WeightsMissing": WeightsMissing, "WeightsDamaged": WeightsDamaged}


@dataclass(slots=True, eq=False)
class Call:
    """One generation. `queue`: where the engine puts its outputs, once it has the request."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    slot: asyncio.Future[None]  # done when it has one, or was aborted without
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    queue: Any = None
    aborted: bool = False
    pieces: int = 0
    """Requests of the engine that it was before; a sleep takes it out."""
    before: int = 0
    """Tokens that it had when the engine got it."""
    retracted: float | None = None
    """Since when it waits again, until the engine has let it go and it has a slot."""
    generation: Generation = field(default_factory=Generation)

    @property
    def engine_id(self) -> str:
        return f"{self.id} +{self.pieces}" if self.pieces else self.id

    def join(self) -> None:
        """It gets a slot, at first or again: the time in between counts as neither waiting nor running."""
        now = time.perf_counter()
        stood = 0.0 if self.retracted is None else now - self.retracted
        self.admitted = now if self.admitted is None else self.admitted + stood


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that all workers have mapped and read."""

    path: str
    version: int
    about: str
    """What it is called to the workers."""
    digest: str


@dataclass(slots=True)
class Cache:
    """What vLLM tells of its KV cache after every step."""

    usage: float = 0.0
    preemptions: int = 0
    looked_up: int = 0
    """Tokens that requests began with."""
    found: int = 0


class VllmCalls:
    """Everything here runs on the event loop of the engine.

    Invariants: at most `slots` calls are in the engine; a token carries the version of the weights that sampled it; a
    call is answered exactly once; nothing is scheduled while there is a reason to stand.
    """

    def __init__(
        self, engine: Any, *, slots: int, version: int, expected: ExpectedWeights, report: Reporter, cache: Cache,
        sleep_level: int | None = None,
    ) -> None:  # fmt: skip
        """`sleep_level`: vLLM's; None gives no memory up."""
        self.engine, self.slots, self.version = engine, slots, version
        self.open: dict[str, Call] = {}
        self.failure: str | None = None
        self._waiting: dict[str, Call] = {}
        self._running: dict[str, Call] = {}
        self._stands: set[str] = set()
        self._changing = asyncio.Lock()
        self._syncing = asyncio.Lock()
        """Held before `_changing`."""
        self._prepared: Prepared | None = None
        self._questions, self._answers = 0, Answers()
        self._level = sleep_level
        self._away: set[str] = set()
        """What of vLLM's memory is given up: "weights", "kv_cache"."""
        self._blank = False
        """The weights are lost."""
        self._expected, self._report, self._cache = expected, report, cache
        self._digest: str | None = None
        self.reload_seconds = 0.0
        """Of the last swap, vLLM's own part: its reload of tensors in memory."""
        self._tokens = 0
        self._last_token = self._busy_from = time.monotonic()

    async def start(self) -> None:
        """Before anything else. What vLLM was started with is version 0."""
        await self._answers.listen()
        await self.stamp(0)

    async def generate(self, call_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        self.check_alive()
        if call_id in self.open:
            raise ValueError(f"request id {call_id!r} is already open here; ids must be unique per server")
        call = Call(call_id, prompt, sampling, asyncio.get_running_loop().create_future())
        self.open[call_id] = self._waiting[call_id] = call
        self._admit()
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
            prepared = self._prepared
            if prepared is None or (prepared.path, prepared.version) != (path, version):
                prepared = await self._prepare(path, version)
            self._prepared = None
            return await self._load(prepared)

    async def _prepare(self, path: str, version: int) -> Prepared:
        self.check_alive()
        self._prepared = None
        await asyncio.to_thread(self._expected.check, path)
        self._questions += 1
        about = f"question {self._questions}: version {version} at {path}"
        parallel = self.engine.vllm_config.parallel_config
        told = self._answers.expect(about, parallel.world_size * parallel.data_parallel_size)
        await self._on_workers("prepare_published_weights", path, about, self._answers.address)
        async with asyncio.timeout(PREPARE_SECONDS):
            answers = await self._engine_call(told, None)
        for refusal, text in answers:
            if refusal:
                raise _REFUSALS[refusal](text)
        if len(digests := {digest for _, digest in answers}) > 1:
            raise WeightsDamaged(f"workers of one server have read different checksums of {path}: {sorted(digests)}")
        self._prepared = Prepared(path, version, about, digests.pop())
        return self._prepared

    async def _load(self, prepared: Prepared) -> float:
        async with self._changing:
            self.check_alive()
            began = time.monotonic()
            async with self._standing():
                if "weights" in self._away:
                    await self._fetch("weights")
                loaded = await self._on_workers("commit_published_weights", prepared.about)
                await self.stamp(prepared.version)
                self._digest, self._blank, self.reload_seconds = prepared.digest, False, max(loaded)
            ended = time.monotonic()
            self._report.weights(began, ended, prepared.version)
            return ended - began

    async def _on_workers(self, method: str, *args: str) -> list[Any]:
        return await self._engine_call(self.engine.collective_rpc(method, args=args))

    async def stamp(self, version: int) -> None:
        """Tokens sampled from now on carry `version`. The engine stands."""
        await self._engine_call(self.engine.update_weight_version(str(version)))
        self.version = version

    async def checksum(self) -> str | None:
        self.check_alive()
        if self._digest is None:
            self._digest = await asyncio.to_thread(self._expected.digest)
        return self._digest

    def load(self) -> ServerLoad:
        """Raises ServerDied if the engine has failed, is closed, or hangs."""
        self.check_alive()
        if self.engine.errored:
            raise self.fail("its process has ended")
        silent = time.monotonic() - self._last_token
        if self._running and not self._stands and silent > STALL_SECONDS:
            raise self.fail(f"no token for {silent:.0f} s with {len(self._running)} requests running")
        return ServerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self.slots,
            weight_version=self.version,
            tokens_generated=self._tokens,
            preemptions=self._cache.preemptions,
            cache_usage=self._cache.usage,
            prompt_tokens=self._cache.looked_up,
            cached_tokens=self._cache.found,
            asleep="asleep" in self._stands,
            **self._report.figures(time.monotonic()),
        )

    def fail(self, reason: str) -> ServerDied:
        """The end of the engine: open calls, and all that come, are ServerDied."""
        if self.failure is None:
            logger.error("vLLM's engine failed: %s", reason)
            self._report.died(reason)
            self._end(f"the engine failed: {reason}")
        return ServerDied(self.failure)

    def close(self) -> None:
        self._answers.close()
        if self.failure is None:
            self._end("the server was closed")

    def check_alive(self) -> None:
        if self.failure is not None:
            raise ServerDied(self.failure)

    def _end(self, reason: str) -> None:
        self.failure = reason
        self._report.idle()
        for call in self.open.values():
            if not call.slot.done():
                call.slot.set_exception(ServerDied(reason))
            if call.queue is not None:
                call.queue.put(ServerDied(reason))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.slots and not self._stands and self.failure is None:
            call = self._waiting.pop(next(iter(self._waiting)))
            if not self._running:
                self._last_token = self._busy_from = time.monotonic()
            self._running[call.id] = call
            call.join()
            if not call.slot.done():  # else it was just cancelled, and is about to leave
                call.slot.set_result(None)

    def _leave(self, call: Call) -> None:
        now = time.perf_counter()
        started = now if call.admitted is None else call.admitted
        call.generation.queue_seconds = started - call.submitted
        call.generation.engine_seconds = now - started
        del self.open[call.id]
        self._waiting.pop(call.id, None)
        if self._running.pop(call.id, None) is not None and not self._running:
            self._report.idle()
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
            raise self.fail(repr(error)) from error

    def _take(self, call: Call, output: Any, finished: bool) -> None:
        """The tokens that a step gave. The versions are appended last (protocol.since)."""
        ids, got = list(output.token_ids), call.generation
        if ids:
            now = time.monotonic()
            self._report.busy(self._busy_from, now, self._tokens + len(ids))
            self._tokens += len(ids)
            self._last_token = self._busy_from = now
            if not got.token_ids:
                began = call.submitted if call.admitted is None else call.admitted
                self._report.first_token(began - call.submitted, time.perf_counter() - call.submitted)
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
        self._last_token = self._busy_from = time.monotonic()
        self._admit()

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
        if asked in done:
            raise self.fail(repr(asked.exception()))
        raise self.fail("its process has ended" if done else f"no answer within {seconds:.0f} s")


def engine_sampling(call: Call) -> Any:
    """In vLLM's terms. A call that goes on elsewhere has a longer prompt: it must not draw the same numbers again."""
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams as EngineSampling  # pyright: ignore[reportMissingImports]

    asked = call.sampling
    return EngineSampling(
        max_tokens=asked.max_tokens - call.before,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        seed=None if asked.seed is None else derive_seed(asked.seed, len(call.prompt) + call.before),
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
