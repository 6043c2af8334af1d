"""vLLM's `AsyncLLM` as an LLM server: a thread with an event loop of its own, the engine in processes of its own.

```
 any event loop                 thread "vllm-server"                    processes of vLLM
 generate, abort, ... ───────► VllmCalls (one event loop) ══ AsyncLLM ══ engine core ── workers + WorkerExtension
      ▲ answer                      │                                         ▲ end when this process has ended
      └─────────────────────────────┘
```

consumes  token ids; weights as files of a `WeightStore`
produces  token ids, log-probs after temperature and cuts, the version of the weights of each token
fails     an engine that died, hangs, or gives NaN is ServerDied for every open and later call

What vLLM can and this server does not offer yet: LoRA, images, log-probs of given tokens (`score`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agent_loop.llm.protocol import (
    CannotScore,
    Generation,
    SamplingParams,
    Scores,
    ServerDied,
    ServerLoad,
    refuse_images,
    since,
)
from streamrl.rollout.events import Reporter, ServerEvents
from streamrl.rollout.expected_weights import ExpectedWeights
from streamrl.rollout.requests import VersionNotServed, check_open_ids, check_progress, check_request, check_weights
from streamrl.rollout.vllm.calls import Cache, VllmCalls
from streamrl.rollout.vllm.options import VllmOptions, engine_args, environment
from streamrl.rollout.vllm.request import TEMPERATURES
from streamrl.weight_sync import WeightsDamaged, WeightsMissing, WeightStore
from streamrl.weight_sync.protocol import check_digest

if TYPE_CHECKING:
    from streamrl.rollout.server_config import RolloutServerConfig

T = TypeVar("T")

SHUTDOWN_SECONDS = 2.0
"""For the engine's processes to end by themselves; then they are killed. An interpreter of that size takes 10 s to
clear its heap, which nobody needs."""


class Engine:
    """vLLM's AsyncLLM and the event loop it lives on."""

    def __init__(self, config: RolloutServerConfig) -> None:
        """Start it. Raises ValueError: what vLLM cannot do, with its reason."""
        arguments = engine_args(config)
        self.cache = Cache()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm-server", daemon=True)
        self._thread.start()
        try:
            alone = arguments.tensor_parallel_size * arguments.pipeline_parallel_size == 1
            with environment(config, eager=arguments.enforce_eager, alone=alone):
                self.llm: Any = self.run(_start(arguments, self.cache))
        except Exception as error:  # of many classes
            self._end_loop()
            raise ValueError(f"vLLM does not start: {error!r}; what its processes wrote says more") from error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From another thread than the loop's, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def shutdown(self) -> None:
        """End its processes and the thread."""

        async def shutdown() -> None:
            self.llm.shutdown(timeout=SHUTDOWN_SECONDS)
            await asyncio.sleep(0)  # its tasks are cancelled

        self.run(shutdown())
        self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class VllmServer:
    """Implements `LLMServer`. Methods may be called from any event loop."""

    def __init__(
        self, config: RolloutServerConfig, events: ServerEvents | None = None, *, engine: Engine | None = None
    ) -> None:
        """Start the engine, then load the newest weights of `config.weights_dir` if there are any; ready to serve on
        return. `engine`: one that runs already, started from the same config.

        Raises ValueError (vLLM is missing, or cannot do what is asked), WeightError.
        """
        self._max_len = config.max_model_len
        self._store = WeightStore(config.weights_dir) if config.weights_dir else None
        self._report = Reporter(config.server, events)
        self._engine = engine or Engine(config)
        try:
            self._vocab_size = int(json.loads(Path(config.model_path, "config.json").read_text())["vocab_size"])
            expected = ExpectedWeights(config.model_path)
            self._calls = self._engine.run(self._begin(config, expected))
        except BaseException:
            self._engine.shutdown()
            raise
        self._closed = threading.Event()
        self._report.started()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        """One call; cancelling it frees its slot. Raises ServerDied, ContextOverflow, ValueError."""
        self._calls.check_alive()
        refuse_images(self, images)
        check_request(request_id, prompt_ids, sampling, max_model_len=self._max_len, vocab_size=self._vocab_size)
        low, high = TEMPERATURES
        if sampling.temperature and not low <= sampling.temperature <= high:
            raise ValueError(f"temperature {sampling.temperature:g}: vLLM takes 0, or {low:g} to {high:g}")
        if sampling.weight_version is not None:
            raise VersionNotServed("vLLM serves the newest weights; who names a version needs rollout.name=torch")
        return await self._on_engine(self._calls.generate(request_id, list(prompt_ids), sampling))

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        """Reads what the engine's thread has appended; waits for no step."""
        self._calls.check_alive()
        check_progress(have)
        open_calls = self._calls.open
        made = {id: call.generation for id in have if (call := open_calls.get(id)) is not None}
        return {id: since(got, have[id]) for id, got in made.items() if len(got.weight_versions) > have[id]}

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        self._calls.check_alive()
        raise CannotScore("vLLM servers score no tokens; teacher servers are of the kinds torch and sim")

    async def abort(self, request_ids: list[str] | None = None) -> int:
        check_open_ids(request_ids)
        return await self._on_engine(self._calls.abort(request_ids))

    async def prepare_weights(self, path: str, version: int) -> str | None:
        """Requests go on meanwhile. Raises WeightError, ServerDied."""
        check_weights(path, version)
        return await self._on_engine(self._calls.prepare(path, version))

    async def commit_weights(self, path: str, version: int) -> float | None:
        """Raises WeightError (the old weights stay), ServerDied."""
        check_weights(path, version)
        return await self._on_engine(self._calls.commit(path, version))

    async def update_weights(self, path: str, version: int) -> None:
        """Raises WeightError (the old weights stay), ServerDied."""
        await self.commit_weights(path, version)

    async def weights_checksum(self) -> str | None:
        """Of the tensors that were last loaded, before vLLM packed them (weight_sync.digest)."""
        return await self._on_engine(self._calls.checksum())

    async def pause(self) -> None:
        await self._on_engine(self._calls.stand("paused"))

    async def resume(self) -> None:
        await self._on_engine(self._calls.go("paused"))

    async def sleep(self) -> None:
        """As pause. With `sleep_level` vLLM gives up its memory, and running requests compute their cache again."""
        await self._on_engine(self._calls.sleep())

    async def wake_up(self) -> None:
        await self._on_engine(self._calls.wake_up())

    @property
    def reload_seconds(self) -> float:
        """Of the last swap, vLLM's own part: its reload of tensors that are in memory."""
        return self._calls.weights.reload_seconds

    async def load(self) -> ServerLoad:
        """Raises ServerDied if the engine has failed, is closed, or hangs."""

        async def load() -> ServerLoad:
            return self._calls.load()

        return await self._on_engine(load())

    async def close(self) -> None:
        """Open requests fail with ServerDied; the engine's processes end. Closing twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()

        async def close() -> None:
            self._calls.close()
            await asyncio.sleep(0)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), self._engine.loop))
        await asyncio.to_thread(self._engine.shutdown)

    async def _begin(self, config: RolloutServerConfig, expected: ExpectedWeights) -> VllmCalls:
        """On the engine's loop: the newest weights, and the version of them."""
        calls = VllmCalls(
            self._engine.llm,
            slots=config.max_num_seqs,
            version=0,
            expected=expected,
            report=self._report,
            cache=self._engine.cache,
            sleep_level=VllmOptions.of(config.vllm).sleep_level,
        )
        try:
            await self._load_newest(calls)
        except BaseException:
            calls.close()
            raise
        return calls

    async def _load_newest(self, calls: VllmCalls) -> None:
        await calls.start()
        while self._store and (newest := self._store.latest()):
            try:
                check_digest(await calls.prepare(newest.path, newest.version), newest)
                await calls.commit(newest.path, newest.version)
                return
            except (WeightsMissing, WeightsDamaged):
                if self._store.latest() == newest:  # else it was retired meanwhile, and a newer one is there
                    raise

    async def _on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the engine's loop; cancelling here cancels there."""
        if self._closed.is_set():
            work.close()
            self._calls.check_alive()
            raise ServerDied("the server was closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._engine.loop))


async def _start(arguments: Any, cache: Cache) -> Any:
    """Blocks the loop until the engine is there; nothing else is on it yet."""
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams as EngineSampling  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
    from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

    class CacheWatch(StatLoggerBase):
        """Hears of every step."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                cache.usage = scheduler_stats.kv_cache_usage
                cache.looked_up += scheduler_stats.prefix_cache_stats.queries
                cache.found += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None:
                cache.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None: ...

    with contextlib.suppress(AttributeError):
        del AsyncLLM.__del__  # it raises at the end of an interpreter; `Engine.shutdown` does what it would
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[CacheWatch])
    try:  # a kernel that does not know the model's shape says so now, not to the first request after every restart
        one = EngineSampling(max_tokens=1, ignore_eos=True, detokenize=False)
        async for _ in llm.generate(tokens_input([0]), one, "warm-up"):
            pass
    except BaseException:
        llm.shutdown(timeout=SHUTDOWN_SECONDS)
        raise
    return llm
