"""LLM servers as Ray actors, which come back when they die.

```
 start_ray_servers({name: config}) ──► {name: RayServerHandle} ── RayLLMServer(config) one process each
```

A server that (re)starts loads what LATEST names before it serves. An engine that fails takes its process with it, so
that Ray starts a new one; the handle says ServerDied meanwhile and works again afterwards. Ray is imported only inside
functions here, and by nobody else in this package.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agent_loop.llm.protocol import CannotScore, Generation, SamplingParams, Scores, ServerDied, ServerLoad
from streamrl.process_log import write_to
from streamrl.rollout.building import build_server
from streamrl.rollout.events import ServerEvents
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.weight_sync import WeightError, WeightInfo, WeightStore
from streamrl.weight_sync.two_phase import take

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_SECONDS = 60.0
"""For abort, pause, resume, load and pid; they wait for one decode step at most."""
CLOSE_SECONDS = 20.0
UPDATE_MARGIN = 60.0
"""Beyond `update_timeout`, within which the manager has given up and said so."""
ANSWER_SECONDS = 86_400.0
"""For a generation or score. Its client gives up long before (agent_loop.llm.client.Patience)."""
LAST_WORDS_SECONDS = 0.2
"""Between the death of an engine and the end of its process: its callers' answers are on their way."""
CALLS_PER_SLOT, OTHER_CALLS = 4, 1000
"""Calls that one actor has open at a time. They must exceed what all agent workers together have in flight (a quarter
more than the slots, or each so much in the first second), or health checks wait for generations to end."""


class RayLLMServer:
    """The actor: one server in a process of its own. Ray restarts it without end; its calls are not retried by Ray.

    An engine that has died takes the process with it, a moment after its callers were told.
    """

    def __init__(self, config: RolloutServerConfig) -> None:
        if config.log_dir:
            write_to(Path(config.log_dir) / f"{config.server}.log")
        self._name, self._closing, self._keeps = config.server, False, False
        self._store = WeightStore(config.weights_dir) if config.weights_dir else None
        self._awaits = config.awaits_weights
        self._seen: WeightInfo | None = None
        """What LATEST named when this server last took weights."""
        try:
            self._server: Any = build_server(config, _event_log(config))
        except (ValueError, OSError, WeightError) as error:  # Ray would lose what it was; `ready` raises it
            self._server = _NotStarted(error)

    async def ready(self) -> int:
        """The process id of a server that serves. Raises what kept it from starting."""
        if isinstance(self._server, _NotStarted):
            raise self._server.error
        return os.getpid()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        self._check_given()
        return await self._watched(
            self._server.generate(request_id, prompt_ids, sampling, *([images] if images else ()))
        )

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        if not hasattr(self._server, "progress"):  # one that was registered, from before this verb
            return {}
        return await self._watched(self._server.progress(have))

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        if not hasattr(self._server, "score"):  # one that was registered, from before this verb
            raise CannotScore(f"{self._name}: {type(self._server).__name__} scores no tokens")
        return await self._watched(self._server.score(prompt_ids, response_ids, temperature))

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self._watched(self._server.abort(request_ids))

    async def update_weights(self, path: str, version: int) -> None:
        self._seen = self._named()
        await self._watched(self._server.update_weights(path, version))
        self._awaits = False

    async def prepare_weights(self, path: str, version: int) -> str | None:
        if not hasattr(self._server, "prepare_weights"):  # one that loads everything at the commit
            return None
        return await self._watched(self._server.prepare_weights(path, version))

    async def commit_weights(self, path: str, version: int) -> float | None:
        self._seen, took = self._named(), None
        if hasattr(self._server, "commit_weights"):
            took = await self._watched(self._server.commit_weights(path, version))
        else:
            await self._watched(self._server.update_weights(path, version))
        self._awaits = False
        return took

    async def weights_checksum(self) -> str | None:
        if not hasattr(self._server, "weights_checksum"):  # a simulation, or one from before this verb
            return None
        return await self._watched(self._server.weights_checksum())

    async def pause(self) -> None:
        await self._watched(self._server.pause())

    async def resume(self) -> None:
        await self._watched(self._server.resume())

    async def sleep(self) -> None:
        given = getattr(self._server, "sleep", self._server.pause)  # one that was registered, from before this verb
        await self._watched(given())

    async def wake_up(self) -> None:
        await self._watched(getattr(self._server, "wake_up", self._server.resume)())

    async def keep_weights(self, keep: bool) -> None:
        """Whether it keeps the version it has, whatever is published; a new process does not."""
        self._keeps = keep

    async def load(self) -> ServerLoad:
        """Also catches up with LATEST: a version published while this process was starting was announced to nobody.
        One that it was given is ahead of LATEST until all have it."""
        load = await self._watched(self._server.load())
        try:
            newest = self._store.latest() if self._store else None
            if newest is None or newest == self._seen or newest.version == load.weight_version or self._keeps:
                return load
            self._seen = newest
            await self._watched(take(self._server, newest))
        except WeightError as error:
            logger.warning("%s stays at version %d: %s", self._name, load.weight_version, error)
        return await self._watched(self._server.load())

    def _check_given(self) -> None:
        if self._awaits:
            raise ServerDied(f"{self._name} has started and was not given the weights in service yet")

    def _named(self) -> WeightInfo | None:
        """What LATEST names, as far as that can be read."""
        with suppress(WeightError):
            return self._store.latest() if self._store else None
        return None

    async def close(self) -> None:
        self._closing = True
        await self._server.close()

    async def _watched(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except ServerDied as error:
            if not self._closing:
                self._closing = True
                logger.error("%s: %s; the process ends and is started again", self._name, error)
                asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, os._exit, 1)
            raise


class _NotStarted:
    """Stands for a server that could not be built: every call is ServerDied with the reason."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def _die(self, *_: object) -> Any:
        raise ServerDied(f"the server could not start: {self.error}")

    generate = progress = score = abort = update_weights = prepare_weights = commit_weights = _die
    weights_checksum = _die
    pause = resume = sleep = wake_up = load = _die

    async def close(self) -> None: ...


def _event_log(config: RolloutServerConfig) -> ServerEvents | None:
    if config.events_dir is None:
        return None
    from streamrl.monitor.events import EventLog

    return EventLog(config.events_dir, config.server)


class RayServerHandle:
    """`LLMServer` over an actor. Holds no state of a loop, so it can be sent to other processes.

    A dead, restarting or unreachable actor is ServerDied; what the server itself raises is raised here as it was.
    """

    def __init__(
        self, actor: Any, server: str, config: RolloutServerConfig | None = None, *,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:  # fmt: skip
        config = config or RolloutServerConfig()
        self._actor, self.server, self._answer_seconds = actor, server, answer_seconds
        self._start_seconds, self._update_seconds = config.start_timeout, config.update_timeout + UPDATE_MARGIN
        self._log = f"{config.log_dir}/{server}.log" if config.log_dir else "its log, among Ray's"

    @property
    def identity(self) -> object:
        """The same for all handles of one server, also those that came by different ways."""
        return self._actor

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        """Cancelling it frees the slot. Raises ServerDied also when there is no answer for `answer_seconds`."""
        try:
            call = self._actor.generate.remote(request_id, prompt_ids, sampling, images)
            return await self._answer("generate", call, self._answer_seconds)
        except asyncio.CancelledError:
            self._actor.abort.remote([request_id])
            raise

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        return await self._answer("progress", self._actor.progress.remote(dict(have)))

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        """Cancelling it costs the server at most one forward pass."""
        call = self._actor.score.remote(prompt_ids, response_ids, temperature)
        return await self._answer("score", call, self._answer_seconds)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self._answer("abort", self._actor.abort.remote(request_ids))

    async def update_weights(self, path: str, version: int) -> None:
        await self._answer("update_weights", self._actor.update_weights.remote(path, version), self._update_seconds)

    async def prepare_weights(self, path: str, version: int) -> str | None:
        call = self._actor.prepare_weights.remote(path, version)
        return await self._answer("prepare_weights", call, self._update_seconds)

    async def commit_weights(self, path: str, version: int) -> float | None:
        call = self._actor.commit_weights.remote(path, version)
        return await self._answer("commit_weights", call, self._update_seconds)

    async def weights_checksum(self) -> str | None:
        return await self._answer("weights_checksum", self._actor.weights_checksum.remote())

    async def pause(self) -> None:
        await self._answer("pause", self._actor.pause.remote())

    async def resume(self) -> None:
        await self._answer("resume", self._actor.resume.remote())

    async def sleep(self) -> None:
        await self._answer("sleep", self._actor.sleep.remote())

    async def wake_up(self) -> None:
        await self._answer("wake_up", self._actor.wake_up.remote())

    async def load(self) -> ServerLoad:
        return await self._answer("load", self._actor.load.remote())

    async def keep_weights(self, keep: bool) -> None:
        """It takes only versions that it is given by `update_weights`, and does not look for newer ones by itself."""
        await self._answer("keep_weights", self._actor.keep_weights.remote(keep))

    async def pid(self) -> int:
        """Of the process as it is now. Raises what kept the server from starting."""
        return await self._answer("pid", self._actor.ready.remote())

    async def close(self) -> None:
        """End the server and its process for good."""
        import ray

        try:
            await self._answer("close", self._actor.close.remote(), CLOSE_SECONDS)
        except ServerDied as error:
            logger.info("%s was gone at close: %s", self.server, error)
        ray.kill(self._actor)

    async def _answer(self, what: str, call: Awaitable[T], seconds: float = CONTROL_SECONDS) -> T:
        from ray.exceptions import RayError, RayTaskError

        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError as error:
            if isinstance(error, RayTaskError):
                raise error.cause from None
            raise ServerDied(
                f"{self.server} gave no answer to {what} within {seconds:.0f} s; see {self._log}"
            ) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise ServerDied(
                f"{self.server} is gone ({type(error).__name__}; see {self._log}); Ray is starting it again"
            ) from error

    async def started(self) -> None:
        """Returns once it serves. Raises what kept it from starting, or ServerDied."""
        from ray.exceptions import RayError, RayTaskError

        try:
            async with asyncio.timeout(self._start_seconds):
                await self._actor.ready.remote()
        except RayTaskError as error:  # what the server raised, a TimeoutError of its own, too
            raise error.cause from None
        except TimeoutError:
            raise ServerDied(
                f"{self.server} did not start within {self._start_seconds:.0f} s "
                f"(actor_rollout_ref.rollout.start_timeout); see {self._log}"
            ) from None
        except RayError as error:
            raise ServerDied(f"{self.server} did not start (see {self._log}): {error}") from error


async def start_ray_servers(
    configs: Mapping[str, RolloutServerConfig], *, env: Mapping[str, str] | None = None
) -> dict[str, RayServerHandle]:
    """One actor per config, all starting at once, ready on return. Ray must be initialised.

    The actors reserve no logical CPUs, and their GPUs where the device is CUDA. `env`: further environment variables
    of their processes. Raises what kept the first server from starting (ValueError, WeightError), or ServerDied.
    """
    import ray

    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **(env or {})}
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": variables},
    }
    actor: Any = ray.remote(RayLLMServer)
    handles: dict[str, RayServerHandle] = {}
    for name, config in configs.items():
        options["num_gpus"] = _devices(config) if config.device.startswith("cuda") else 0
        options["max_concurrency"] = OTHER_CALLS + CALLS_PER_SLOT * config.max_num_seqs
        handles[name] = RayServerHandle(actor.options(**options).remote(replace(config, server=name)), name, config)
    try:
        await asyncio.gather(*(handle.started() for handle in handles.values()))
    except BaseException:
        for handle in handles.values():
            ray.kill(handle._actor)
        raise
    return handles


def _devices(config: RolloutServerConfig) -> int:
    """GPUs of one server."""
    from streamrl.rollout.sglang.options import SglangOptions
    from streamrl.rollout.vllm.options import VllmOptions

    if config.name == "sglang":
        return SglangOptions.of(config.sglang).devices
    return VllmOptions.of(config.vllm).devices if config.name == "vllm" else 1
