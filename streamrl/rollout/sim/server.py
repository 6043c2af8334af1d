"""The simulated LLM server: slots, lengths, latencies and failures, but no model.

All of a request's future is drawn when it arrives (`sim_script.py`). One timer ends it; an abort, a death or a weight
update only asks how many of its tokens lie in the past. Moments count in *engine time*: the event loop's time less what
pauses and weight updates took. An engine is a process of its own: where a busy event loop fires a timer late, the
request that waits gets the slot from the moment when it was free. With `virtual_clock.run_virtual` a simulation costs
no real time and repeats exactly.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

import numpy as np

from agent_loop.llm.protocol import (
    Generation,
    SamplingParams,
    Scores,
    ServerDied,
    ServerLoad,
    StopReason,
    refuse_images,
)
from streamrl.rollout.events import Reporter, ServerEvents
from streamrl.rollout.noise import Streams
from streamrl.rollout.requests import check_open_ids, check_progress, check_request, check_scored, check_weights
from streamrl.rollout.sim.engine_time import EngineTime, loop_time
from streamrl.rollout.sim.script import Script, SimConfig, draw_script, score_script
from streamrl.weight_sync import WeightsDamaged, WeightStore

__all__ = ["SimConfig", "SimServer"]


UpdateFailure = Literal["refuse", "hang", "die", "break"]


@dataclass(slots=True, eq=False)
class _Run:
    """A request. `times`: the engine time of each token, empty while it waits for a slot. One that `scores` holds a
    slot for the time of one prefill, and makes no tokens."""

    id: str
    script: Script
    future: asyncio.Future[Any]
    submitted: float
    asked: float
    """The engine time of that."""
    scores: bool = False
    version: int | None = None
    """That the request names."""
    admitted: float | None = None
    times: np.ndarray = field(default_factory=lambda: np.empty(0))
    timer: asyncio.TimerHandle | None = None

    def past(self, now: float) -> int:
        """How many tokens it has."""
        return 0 if self.scores else int(np.searchsorted(self.times, now, side="right"))

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class SimServer:
    """Implements `LLMServer` on one event loop; needs no thread.

    Invariants: at most `slots` requests run; a token carries the newest version published before its moment; a request
    is answered exactly once.
    """

    def __init__(
        self,
        sim: SimConfig | None = None,
        *,
        max_num_seqs: int = 64,
        max_model_len: int = 1024,
        seed: int = 0,
        weights_dir: str | None = None,
        server: str = "server-0",
        events: ServerEvents | None = None,
    ) -> None:
        self.sim = sim or SimConfig()
        self._slots, self._max_len = max_num_seqs, max_model_len
        self._streams = Streams(seed)
        self._store = WeightStore(weights_dir) if weights_dir else None
        self._server, self._events = server, events
        self._asked = 0
        self._update_failure: tuple[str, UpdateFailure] | None = None
        self._running: dict[str, _Run] = {}
        self._waiting: dict[str, _Run] = {}
        self._start()

    def _start(self) -> None:
        newest = self._store.latest() if self._store else None
        self._versions: list[tuple[float, int]] = [(-math.inf, newest.version if newest else 0)]  # (since, version)
        self._time = EngineTime()
        self._stands: set[str] = set()
        self._free = [-math.inf] * self._slots
        """A heap: since when each free slot is free."""
        self._untimed: list[_Run] = []
        """Running ones without a timer."""
        self._ended_tokens = self._rows_scored = self._tokens_scored = 0
        self._score_queue_seconds = 0.0
        self._busy_since = 0.0  # engine time from which busy time is not yet reported
        self._death: str | None = None
        self._death_timer: asyncio.TimerHandle | None = None
        self._report = Reporter(self._server, self._events)
        self._report.started()

    def die(self, reason: str = "killed by the simulation") -> None:
        """Fail every open request, and every later call until `restart`, with ServerDied."""
        if self._death is None:
            self._fail(reason)
            self._report.died(reason)

    def _fail(self, reason: str) -> None:
        for run in [*self._running.values(), *self._waiting.values()]:
            self._remove(run)
            if not run.future.done():
                run.future.set_exception(ServerDied(reason))
        self._death = reason
        self._plan()

    def restart(self) -> None:
        """Back in service after a death, with the newest weights of `weights_dir`; counters start again."""
        if self._death is not None:
            self._start()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        """Cancelling it frees its slot. Raises ServerDied, ContextOverflow, ValueError."""
        self._check_alive()
        refuse_images(self, images)
        check_request(request_id, prompt_ids, sampling, max_model_len=self._max_len, vocab_size=self.sim.vocab_size)
        if request_id in self._running or request_id in self._waiting:
            raise ValueError(f"request id {request_id!r} is already open here; ids must be unique per server")
        script = draw_script(self.sim, self._streams.of(sampling.seed), len(prompt_ids), sampling)
        return await self._ended(self._run(request_id, script, version=sampling.weight_version))

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        """What lies in the past."""
        self._check_alive()
        check_progress(have)
        now = self._time.now()
        made: dict[str, Generation] = {}
        for id, known in have.items():
            run = self._running.get(id)
            if run is not None and (count := run.past(now)) > known:
                made[id] = self._made(run, known, count)
        return made

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        """Numbers that depend on the tokens and the temperature alone. Raises ServerDied, ContextOverflow, ValueError.

        Takes a slot for `prefill_seconds`.
        """
        self._check_alive()
        check_scored(prompt_ids, response_ids, temperature, max_model_len=self._max_len, vocab_size=self.sim.vocab_size)
        self._asked += 1
        script = score_script(self.sim, [*prompt_ids, *response_ids], len(response_ids), temperature)
        return await self._ended(self._run(f"score {self._asked}", script, scores=True))

    def _run(self, id: str, script: Script, **more: Any) -> _Run:
        return _Run(id, script, asyncio.get_running_loop().create_future(), loop_time(), self._time.now(), **more)

    async def _ended(self, run: _Run) -> Any:
        self._waiting[run.id] = run
        self._plan()
        try:
            return await run.future
        except asyncio.CancelledError:
            self._remove(run)
            self._plan()
            raise

    async def abort(self, request_ids: list[str] | None = None) -> int:
        self._check_alive()
        check_open_ids(request_ids)
        wanted = None if request_ids is None else set(request_ids)
        runs = [*self._running.values(), *self._waiting.values()]
        gone = [r for r in runs if not r.scores and (wanted is None or r.id in wanted)]
        for run in gone:
            self._end(run, "aborted", run.past(now := self._time.now()), now)
        self._plan()
        return len(gone)

    def fail_updates(self, how: UpdateFailure | None, phase: Literal["prepare", "commit"] = "prepare") -> None:
        """From now on weights are refused, never taken ("hang"), raise what nobody foresaw ("break"), or the server
        dies of them; None: all is well. Commit is also the phase of who has no other."""
        self._update_failure = None if how is None else (phase, how)

    async def _maybe_fail(self, phase: str) -> None:
        if self._update_failure is None or self._update_failure[0] != phase:
            return
        match self._update_failure[1]:
            case "refuse":
                raise WeightsDamaged("the simulation refuses these weights")
            case "hang":
                await asyncio.get_running_loop().create_future()
            case "break":
                raise RuntimeError("the simulation breaks at these weights")
            case "die":
                self.die("the simulation died of new weights")
                self._check_alive()

    async def prepare_weights(self, path: str, version: int) -> str | None:
        """There is no model: `path` is not read, and nothing can be told of it."""
        self._check_alive()
        check_weights(path, version)
        await self._maybe_fail("prepare")
        return None

    async def commit_weights(self, path: str, version: int) -> float:
        began = loop_time()
        await self.update_weights(path, version)
        return loop_time() - began

    async def update_weights(self, path: str, version: int) -> None:
        """Stand still for `update_seconds`; later tokens carry `version`. `path` is not read: there is no model."""
        self._check_alive()
        check_weights(path, version)
        await self._maybe_fail("commit")
        began, engine_time = loop_time(), self._time
        engine_time.stand()
        self._plan()
        try:
            await asyncio.sleep(self.sim.update_seconds)
            if engine_time is not self._time:
                raise ServerDied("the server died and came back during the weight update")
            self._check_alive()
            self._versions.append((self._time.now(), version))
        finally:
            engine_time.go()
            self._plan()
        self._report.weights(began, loop_time(), version)

    async def weights_checksum(self) -> str | None:
        return None  # there is no model

    async def pause(self) -> None:
        self._stand("paused")

    async def resume(self) -> None:
        self._go("paused")

    async def sleep(self) -> None:
        """As pause: there is no cache to give up."""
        self._stand("asleep")

    async def wake_up(self) -> None:
        self._go("asleep")

    def _stand(self, why: str) -> None:
        self._check_alive()
        if why not in self._stands:
            self._stands.add(why)
            self._time.stand()
            self._plan()

    def _go(self, why: str) -> None:
        self._check_alive()
        if why in self._stands:
            self._stands.discard(why)
            self._time.go()
            self._plan()

    async def load(self) -> ServerLoad:
        self._check_alive()
        now, figures = self._time.now(), self._report.figures(loop_time())
        figures["busy_seconds"] += now - self._busy_since if self._running else 0.0
        return ServerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._slots,
            weight_version=self._versions[-1][1],
            tokens_generated=self._ended_tokens + sum(run.past(now) for run in self._running.values()),
            asleep="asleep" in self._stands,
            **figures,
            rows_scored=self._rows_scored,
            tokens_scored=self._tokens_scored,
            score_queue_seconds=self._score_queue_seconds,
        )

    async def close(self) -> None:
        """Open requests fail with ServerDied. Closing twice is fine."""
        if self._death is None:
            self._fail("the server was closed")

    def _check_alive(self) -> None:
        if self._death is not None:
            raise ServerDied(self._death)

    def _plan(self) -> None:
        """Admit what fits, and set the timers that the present state asks for: none while time stands still."""
        alive = self._death is None
        if alive and not self._time.stands:
            self._admit()
        loop = asyncio.get_running_loop()
        if self._time.stands:
            for run in self._running.values():
                run.stop_timer()
            self._untimed = list(self._running.values())
        else:
            for run in self._untimed:
                if self._running.get(run.id) is run:
                    run.timer = loop.call_at(self._time.when(float(run.times[-1])), self._finish, run)
            self._untimed.clear()
        if self._death_timer is not None:
            self._death_timer.cancel()
            self._death_timer = None
        moment = self._death_moment() if alive and not self._time.stands else None
        if moment is not None:
            reason = f"died after {self.sim.die_after_tokens} tokens, as its config says"
            self._death_timer = loop.call_at(self._time.when(moment), self.die, reason)

    def _admit(self) -> None:
        now = self._time.now()
        while self._waiting and len(self._running) < self._slots:
            run = self._waiting.pop(next(iter(self._waiting)))
            begun = min(now, max(heappop(self._free), run.asked))
            if not self._running:
                self._busy_since = begun
            run.admitted = self._time.when(begun)
            run.times = begun + run.script.seconds
            self._running[run.id] = run
            self._untimed.append(run)

    def _death_moment(self) -> float | None:
        """When the running requests, as they are, bring the count to `die_after_tokens`."""
        if self.sim.die_after_tokens is None or not self._running:
            return None
        missing = self.sim.die_after_tokens - self._ended_tokens
        moments = np.concatenate([np.empty(0), *(run.times for run in self._running.values() if not run.scores)])
        return float(np.partition(moments, missing - 1)[missing - 1]) if 0 < missing <= len(moments) else None

    def _finish(self, run: _Run) -> None:
        if run.scores:
            self._end_score(run)
        else:
            self._end(run, "stop" if run.script.stops else "length", len(run.times), float(run.times[-1]))
        self._plan()

    def _end_score(self, run: _Run) -> None:
        moment = float(run.times[-1])
        ended, admitted = self._time.when(moment), run.admitted or run.submitted
        log_probs, version = run.script.log_probs, self._versions[-1][1]
        self._rows_scored += 1
        self._tokens_scored += len(log_probs)
        self._score_queue_seconds += admitted - run.submitted
        self._remove(run, moment)
        if not run.future.done():
            run.future.set_result(Scores(log_probs, version, admitted - run.submitted, ended - admitted))

    def _end(self, run: _Run, reason: StopReason, count: int, moment: float) -> None:
        """With its first `count` tokens, at the engine time `moment`."""
        ended = self._time.when(moment)
        admitted = ended if run.admitted is None else run.admitted
        generation = self._made(run, 0, count)
        generation.stop_reason = reason
        generation.queue_seconds = max(0.0, admitted - run.submitted)
        generation.engine_seconds = max(0.0, ended - admitted)
        self._remove(run, moment, count)
        if count:
            waited = generation.queue_seconds
            self._report.first_token(waited, waited + float(run.script.seconds[0]))
        if not run.future.done():
            run.future.set_result(generation)

    def _made(self, run: _Run, first: int, count: int) -> Generation:
        """Its tokens from `first` up to `count`."""
        named = run.version
        stamps = self._stamps(run.times[first:count]) if named is None else [named] * (count - first)
        return Generation(run.script.token_ids[first:count], run.script.log_probs[first:count], stamps)

    def _stamps(self, times: np.ndarray) -> list[int]:
        """The version of the token at each of these engine times, ascending."""
        if not len(times):
            return []
        at = len(self._versions) - 1
        while self._versions[at][0] >= times[0]:
            at -= 1
        stamps: list[int] = []
        for since, _ in [*self._versions[at + 1 :], (math.inf, 0)]:
            until = int(np.searchsorted(times, since, side="right"))
            stamps += [self._versions[at][1]] * (until - len(stamps))
            at += 1
        return stamps

    def _remove(self, run: _Run, moment: float | None = None, count: int | None = None) -> None:
        """Take a request out at the engine time `moment` (None: now), counting the tokens it made (None: those in the
        past)."""
        run.stop_timer()
        if self._waiting.get(run.id) is run:
            del self._waiting[run.id]
        elif self._running.get(run.id) is run:
            moment = self._time.now() if moment is None else moment
            heappush(self._free, moment)
            self._ended_tokens += run.past(moment) if count is None else count
            until = max(moment, self._busy_since)
            self._report.busy(
                self._time.when(self._busy_since),
                self._time.when(until),
                self._ended_tokens,
                scored=self._tokens_scored,
            )
            self._busy_since = until
            del self._running[run.id]
            if not self._running:
                self._report.idle()
