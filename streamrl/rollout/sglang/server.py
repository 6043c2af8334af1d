"""SGLang as an LLM server: a process in an environment of its own, spoken to over HTTP.

```
 any event loop                 thread "sglang-server"                        process group, another Python
 generate, abort, ... ───────► SglangCalls ── SglangHttp ═══ loopback, key ═══ HTTP server ── scheduler ── workers
      ▲ answer                      │                                             ▲ ends when this process has ended
      └─────────────────────────────┘
```

consumes  token ids; weights as files of a `WeightStore`, shown to SGLang as a model's directory (`WeightsView`)
produces  token ids, log-probs after temperature, the version of the weights of each token as SGLang stamps it
fails     a server that died, hangs, or gives NaN is ServerDied for every open and later call

What it does not do: LoRA, images, log-probs of given tokens (`score`) at a temperature other than 1. Seeds count where
SGLang runs with --enable-deterministic-inference (`SglangOptions.deterministic`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agent_loop.llm.keys import ApiKey
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
from agent_loop.seeds import derive_seed
from streamrl.rollout.events import Reporter, ServerEvents
from streamrl.rollout.expected_weights import ExpectedWeights
from streamrl.rollout.loop_thread import LoopThread
from streamrl.rollout.noise import Streams
from streamrl.rollout.requests import (
    VersionNotServed,
    check_open_ids,
    check_progress,
    check_request,
    check_scored,
    check_weights,
)
from streamrl.rollout.sglang.calls import SglangCalls
from streamrl.rollout.sglang.options import Cuts, SglangOptions
from streamrl.rollout.sglang.process import SglangProcess
from streamrl.rollout.sglang.wire import Refused, SglangHttp
from streamrl.rollout.weights_view import WeightsView
from streamrl.weight_sync import WeightInfo, WeightsDamaged, WeightsMissing, WeightStore
from streamrl.weight_sync.digest import checked_digest, weights_digest
from streamrl.weight_sync.shared_memory import read_weights

if TYPE_CHECKING:
    from streamrl.rollout.server_config import RolloutServerConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SglangServer:
    """Implements `LLMServer`. Methods may be called from any event loop."""

    def __init__(self, config: RolloutServerConfig, events: ServerEvents | None = None) -> None:
        """Start SGLang, or take the one at `config.sglang.url`; then load the newest weights of `config.weights_dir` if
        there are any; ready to serve on return.

        Raises ValueError (SGLang does not start, or cannot do what is asked), KeyMissing, WeightError.
        """
        self._options = SglangOptions.of(config.sglang)
        self._max_len = config.max_model_len
        self._store = WeightStore(config.weights_dir) if config.weights_dir else None
        self._vocab_size = _vocab_size(config.model_path)
        self._expected = ExpectedWeights(config.model_path)
        self._served: str | None = None
        self._streams = Streams(config.seed)
        self._report = Reporter(config.server, events)
        self._closed = threading.Event()
        self._process: SglangProcess | None = None
        self._view = WeightsView(config.model_path)
        self._thread = LoopThread("sglang-server")
        try:
            self._calls = self._thread.run(self._begin(config))
        except BaseException:
            self._end()
            raise
        self._report.started()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        """One call; cancelling it frees its slot. Raises ServerDied, ContextOverflow, ValueError."""
        self._calls.check_alive()
        refuse_images(self, images)
        check_request(request_id, prompt_ids, sampling, max_model_len=self._max_len, vocab_size=self._vocab_size)
        self._cuts.check(sampling)
        if sampling.weight_version is not None:
            raise VersionNotServed("SGLang serves the newest weights; who names a version needs rollout.name=torch")
        seed = derive_seed(*self._streams.of(sampling.seed))
        return await self._on_loop(self._calls.generate(request_id, list(prompt_ids), sampling, seed))

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        """Reads what the server's thread has appended; waits for nothing."""
        self._calls.check_alive()
        check_progress(have)
        open_calls = self._calls.open
        made = {id: call.generation for id in have if (call := open_calls.get(id)) is not None}
        return {id: since(got, have[id]) for id, got in made.items() if len(got.weight_versions) > have[id]}

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        """Raises ServerDied, ContextOverflow, ValueError, FloatingPointError, CannotScore."""
        self._calls.check_alive()
        check_scored(
            prompt_ids, response_ids, temperature, max_model_len=self._max_len, vocab_size=self._vocab_size
        )  # fmt: skip
        if temperature != 1.0:
            raise CannotScore(f"temperature {temperature:g}: SGLang tells log-probs of given tokens at 1 alone")
        return await self._on_loop(self._calls.score(prompt_ids, response_ids))

    async def abort(self, request_ids: list[str] | None = None) -> int:
        check_open_ids(request_ids)
        return await self._on_loop(self._calls.abort(request_ids))

    async def prepare_weights(self, path: str, version: int) -> str | None:
        """Checks the file; its checksum. Nothing is loaded yet. Raises WeightError."""
        self._calls.check_alive()
        check_weights(path, version)
        await asyncio.to_thread(self._expected.check, path)
        return await asyncio.to_thread(lambda: weights_digest(read_weights(path).items()))

    async def commit_weights(self, path: str, version: int) -> float | None:
        return await self._load(path, version)

    async def update_weights(self, path: str, version: int) -> None:
        """Raises WeightError (the old weights stay), ServerDied."""
        await self._load(path, version)

    async def weights_checksum(self) -> str | None:
        """Of the file that was last loaded (weight_sync.digest)."""
        self._calls.check_alive()
        path = self._served
        if path is None:
            return await asyncio.to_thread(self._expected.digest)
        return await asyncio.to_thread(lambda: weights_digest(read_weights(path).items()))

    async def pause(self) -> None:
        await self._on_loop(self._calls.stand("paused"))

    async def resume(self) -> None:
        await self._on_loop(self._calls.go("paused"))

    async def sleep(self) -> None:
        """As pause. With `release_memory` the cache is given up, and computed again by those who were running."""
        await self._on_loop(self._calls.stand("asleep"))

    async def wake_up(self) -> None:
        await self._on_loop(self._calls.go("asleep"))

    async def load(self) -> ServerLoad:
        """Raises ServerDied if the server has failed, is closed, or hangs."""
        return await self._on_loop(self._calls.load())

    async def close(self) -> None:
        """Open requests fail with ServerDied; a process that was started here ends. Closing twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()

        async def close() -> None:
            self._calls.close()
            if self._process is None:  # one at a url goes on without our requests
                await self._quiet(self._calls.http)

        await self._thread.call(close())
        await asyncio.to_thread(self._end)

    @property
    def pid(self) -> int | None:
        """Of SGLang's process group, if it was started here."""
        return self._process.pid if self._process else None

    async def _begin(self, config: RolloutServerConfig) -> SglangCalls:
        options = self._options
        if options.url is None:
            self._process = await SglangProcess.start(replace(config, model_path=self._view.directory), options)
            http = SglangHttp(self._process.url, self._process.key)
        else:
            http = SglangHttp(options.url, ApiKey.find(env=options.key_env, file=options.key_file))
            try:
                ready = await http.is_ready()
            except ServerDied as error:
                raise ValueError(f"rollout.sglang.url {options.url!r}: {error}") from None
            if not ready:
                raise ValueError(f"rollout.sglang.url {options.url!r}: no SGLang server is ready there")
            await self._quiet(http)
        info = await http.info()
        self._cuts = Cuts.of(info, self._vocab_size)
        if not info.get("disable_overlap_schedule"):
            logger.warning(
                "SGLang overlaps its steps: of each request the token under way at a swap of weights is stamped with "
                "the new version; start it with --disable-overlap-schedule"
            )
        calls = SglangCalls(
            http, slots=config.max_num_seqs, version=0, support=self._cuts.support, releases=options.releases(config),
            report=self._report,
        )  # fmt: skip
        if self._process is not None:
            self._watching = asyncio.ensure_future(self._watch(self._process, calls))
        await self._load_newest(calls)
        return calls

    async def _load_newest(self, calls: SglangCalls) -> None:
        while self._store and (newest := self._store.latest()):
            try:
                if newest.digest:
                    await asyncio.to_thread(_check_digest, newest)
                await self._give(calls, newest.path, newest.version)
                return
            except (WeightsMissing, WeightsDamaged):
                if self._store.latest() == newest:  # else it was retired meanwhile, and a newer one is there
                    raise
        if self._process is None:  # whose weights it has is not known
            await calls.update_weights(self._view.directory, 0)

    async def _load(self, path: str, version: int) -> float:
        self._calls.check_alive()
        check_weights(path, version)
        await asyncio.to_thread(self._expected.check, path)
        return await self._on_loop(self._give(self._calls, path, version))

    async def _give(self, calls: SglangCalls, path: str, version: int) -> float:
        self._expected.check(path)
        seconds = await calls.update_weights(self._view.show(path), version)
        self._served = path
        return seconds

    @staticmethod
    async def _quiet(http: SglangHttp) -> None:
        """Without requests, and not paused, whoever used it before."""
        try:
            await http.abort(None)
            await http.resume()
        except (ServerDied, Refused):
            return

    async def _watch(self, process: SglangProcess, calls: SglangCalls) -> None:
        reason = await process.ended()
        if not self._closed.is_set():
            calls.fail(reason)

    def _end(self) -> None:
        async def end() -> None:
            if self._process is not None:
                await self._process.end()
            if hasattr(self, "_calls"):
                await self._calls.http.close()

        self._thread.run(end())
        self._thread.end()
        self._view.remove()

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the server's loop; cancelling here cancels there."""
        if self._closed.is_set():
            work.close()
            self._calls.check_alive()
            raise ServerDied("the server was closed")
        return await self._thread.call(work)


def _check_digest(info: WeightInfo) -> None:
    """Raises WeightError."""
    checked_digest(read_weights(info.path), info)


def _vocab_size(model_path: str) -> int:
    try:
        return int(json.loads(Path(model_path, "config.json").read_text())["vocab_size"])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"model path {model_path!r}: no config.json with a vocab_size there ({error!r})") from error
