"""The embedded LLM server: a `transformers` model, continuous batching, one engine thread.

```
 asyncio loop(s)                            engine thread
 generate ──► Request ─┐                    ┌─► commands (abort, update_weights, pause) between two decode steps
 score ─► ScoreRequest ┤                    │   scores.step(): one forward pass over whole rows
 abort, update, pause ─┴─► inbox ──wakes──► │   engine.step(): admit, one token for every running request
          future ◄────call_soon_threadsafe──┴── requests that ended
```

The engine thread owns the model, the cache and every request between submission and its end. Whatever is raised in it
is the end of the engine: all open requests fail with ServerDied, and so does every later call, `load` (the health
check) included. The thread waits for its inbox and is woken by it; it never polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from agent_loop.llm.protocol import Generation, SamplingParams, Scores, ServerDied, ServerLoad, refuse_images, since
from streamrl.rollout.events import Reporter, ServerEvents
from streamrl.rollout.noise import Streams, uniforms
from streamrl.rollout.requests import (
    VersionNotServed,
    check_open_ids,
    check_progress,
    check_request,
    check_scored,
    check_weights,
)
from streamrl.rollout.torch.batch_engine import BatchEngine, Request
from streamrl.rollout.torch.loading import load_model
from streamrl.rollout.torch.scoring import SCORE_TOKENS, ScoreQueue, ScoreRequest
from streamrl.weight_sync import WeightError, WeightInfo, WeightsMissing, WeightStore
from streamrl.weight_sync.address import is_broadcast
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.load import Staged, copy_into, load_into, stage
from streamrl.weight_sync.protocol import check_digest

if TYPE_CHECKING:
    from streamrl.weight_sync.collective import Receiver

logger = logging.getLogger(__name__)
T = TypeVar("T")

STALL_SECONDS = 120.0
"""A running engine that finishes no step for so long is taken for hung; a prefill of a large model takes seconds."""
CLOSE_SECONDS = 30.0
"""How long `close` waits for the step under way."""


@dataclass(slots=True)
class _Command:
    """Something to do between two steps. The answer goes to the loop that asked."""

    run: Callable[[], Any]
    future: asyncio.Future[Any] | None


_Item = Request | ScoreRequest | _Command


class TorchServer:
    """Implements `LLMServer`. Methods may be called from any event loop."""

    def __init__(
        self,
        model_path: str,
        *,
        max_num_seqs: int = 64,
        max_model_len: int = 1024,
        max_score_tokens: int = SCORE_TOKENS,
        device: str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
        weights_dir: str | None = None,
        server: str = "server-0",
        events: ServerEvents | None = None,
        invariant: bool = False,
    ) -> None:
        """Load the model, then the newest weights of `weights_dir` if there are any; ready to serve on return.

        A request that names a weight version gets it, in its turn, from `weights_dir`; all others get the newest.
        `invariant`: a request's tokens do not depend on the batch (invariant.py). Raises ValueError (path, dtype,
        limits), UnsupportedModel, WeightError, NotInvariant.
        """
        model = load_model(model_path, device=device, dtype=dtype, max_model_len=max_model_len)
        self._store = WeightStore(weights_dir) if weights_dir else None
        newest = self._store.read_latest() if self._store else None
        if newest:
            load_into(model, newest[1])
        self._newest = newest[0] if newest else WeightInfo(0, "", 0)
        self._later: Staged | None = None
        """The newest, while another version has its turn; None: it is in a file."""
        self._staged: Staged | None = None
        self._receiver: Receiver | None = None
        self._report = Reporter(server, events)
        self._engine = BatchEngine(
            model, slots=max_num_seqs, max_len=max_model_len, version=self._newest.version, invariant=invariant,
            on_first_token=self._report.first_token,
        )  # fmt: skip
        self._scores = ScoreQueue(model, max_tokens=max_score_tokens)
        self._streams = Streams(seed)
        self._inbox: deque[_Item] = deque()
        self._wake = threading.Condition()
        self._open: dict[str, Request] = {}
        self._forgetting = threading.Lock()
        self._scoring: set[ScoreRequest] = set()
        self._paused = self._asleep = self._closing = False
        self._failure: BaseException | None = None
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._report.started()
        self._thread.start()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        """One call; cancelling it frees its slot. Raises ServerDied, ContextOverflow, VersionNotServed, ValueError."""
        self._check_alive()
        refuse_images(self, images)
        engine = self._engine
        check_request(
            request_id, prompt_ids, sampling, max_model_len=engine.max_len, vocab_size=engine.decoder.vocab_size
        )
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is already open here; ids must be unique per server")
        seed, stream = self._streams.of(sampling.seed)
        noise = uniforms(seed, stream, len(prompt_ids), sampling.max_tokens)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        request = Request(request_id, list(prompt_ids), sampling, noise, owner=future)
        self._open[request_id] = request
        self._post(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._forget(request)  # its id is free at once: commands and requests are taken in order
            self._post(_Command(lambda: self._abort([request_id]), None))
            raise

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        """Reads what the engine's thread has appended; waits for no step."""
        self._check_alive()
        check_progress(have)
        made = {id: self._open[id].generation for id in have if id in self._open}
        return {id: since(got, have[id]) for id, got in made.items() if len(got.weight_versions) > have[id]}

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        """Raises ServerDied, ContextOverflow, ValueError, FloatingPointError."""
        self._check_alive()
        engine = self._engine
        check_scored(
            prompt_ids, response_ids, temperature, max_model_len=engine.max_len, vocab_size=engine.decoder.vocab_size
        )
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        request = ScoreRequest(list(prompt_ids), list(response_ids), temperature, future)
        self._scoring.add(request)
        try:
            self._post(request)
            return await future
        finally:
            self._scoring.discard(request)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        check_open_ids(request_ids)
        return await self._between_steps(lambda: self._abort(request_ids))

    async def update_weights(self, path: str, version: int) -> None:
        """Raises WeightError (the old weights stay), ServerDied."""
        await self.commit_weights(path, version)

    async def prepare_weights(self, path: str, version: int) -> str | None:
        """Requests go on meanwhile. Raises WeightError, ServerDied."""
        self._check_alive()
        check_weights(path, version)
        self._staged = None
        engine, receiver = self._engine, self._broadcasts() if is_broadcast(path) else None
        serves = None if engine.invariant else engine.version
        self._staged = staged = await asyncio.to_thread(
            stage, engine.model, path, version, serves=serves, receiver=receiver
        )
        return staged.digest or None

    def _broadcasts(self) -> Receiver:
        if self._receiver is None:
            from streamrl.weight_sync.collective import Receiver

            self._receiver = Receiver(next(self._engine.model.parameters()).device)
        return self._receiver

    async def commit_weights(self, path: str, version: int) -> float:
        """Raises WeightError (the old weights stay), ServerDied."""
        check_weights(path, version)
        if self._staged is None or not self._staged.is_of(path, version):
            if is_broadcast(path):
                raise WeightsMissing(f"version {version} was not received, and nobody sends it any more")
            await self.prepare_weights(path, version)
        staged, self._staged = self._staged, None
        assert staged is not None
        return await self._between_steps(lambda: self._update(staged))

    async def weights_checksum(self) -> str | None:
        """Of the parameters as they are, tied ones under their first name."""
        return await self._between_steps(lambda: weights_digest(self._engine.model.named_parameters()))

    async def pause(self) -> None:
        await self._between_steps(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._between_steps(lambda: self._set_paused(False))

    async def sleep(self) -> None:
        """The cache's memory is given back; running requests compute theirs again when they go on."""
        await self._between_steps(lambda: self._set_asleep(True))

    async def wake_up(self) -> None:
        await self._between_steps(lambda: self._set_asleep(False))

    async def load(self) -> ServerLoad:
        """Raises ServerDied if the engine has failed, is closed, or hangs."""
        self._check_alive()
        silent = time.monotonic() - self._last_step
        engine = self._engine
        if self._has_work and not self._stands and silent > STALL_SECONDS:
            raise ServerDied(
                f"the engine finished no step for {silent:.0f} s with {len(engine.running)} requests running and "
                f"{len(self._scoring)} to score"
            )
        return ServerLoad(
            running=len(engine.running),
            waiting=max(0, len(self._open) - len(engine.running)) + len(self._scoring),
            slots=engine.slots,
            weight_version=engine.newest,
            tokens_generated=engine.tokens_generated,
            prompt_tokens=engine.tokens_prefilled + engine.tokens_reused,
            cached_tokens=engine.tokens_reused,
            asleep=self._asleep,
            **self._report.figures(time.monotonic()),
            rows_scored=self._scores.rows_scored,
            tokens_scored=self._scores.tokens_scored,
            score_queue_seconds=self._scores.queue_seconds,
        )

    async def close(self) -> None:
        """Stop after the step under way; open requests fail with ServerDied. Closing twice is fine."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._receiver = None  # whoever broadcasts to it notices
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {CLOSE_SECONDS:.0f} s of close; kill the process")

    # On the engine thread.

    def _run(self) -> None:
        try:
            while self._receive():
                began = time.monotonic()
                self._take_turn()
                current = self._engine.version == self._engine.newest
                scored = self._scores.step(self._engine.version) if current else []
                ended = self._engine.step() if self._engine.has_work else []
                self._last_step = time.monotonic()
                self._report.busy(
                    began, self._last_step, self._engine.tokens_generated, scored=self._scores.tokens_scored
                )
                self._answer(ended)
                for request in scored:
                    _settle(request.owner, request.scores, request.error)
        except BaseException as error:  # the root of the thread: feeds the failure channel
            logger.exception("the engine thread failed")
            self._failure = error
            self._report.died(repr(error))
        finally:
            self._report.idle()
            self._fail_open()

    def _receive(self) -> bool:
        """Do what the inbox holds; wait while there is nothing to step. False once closing."""
        while True:
            if self._engine.version != self._engine.newest and not (self._has_work or self._engine.invariant):
                self._serve_newest()  # a deterministic run names a version with each request, and waits for that
            with self._wake:
                if not self._closing and not self._inbox and (self._stands or not self._has_work):
                    self._report.idle()
                    self._wake.wait_for(lambda: self._inbox or self._closing)
                    self._last_step = time.monotonic()
                if self._closing:
                    return False
                arrived = list(self._inbox)
                self._inbox.clear()
            for item in arrived:
                match item:
                    case Request():
                        self._engine.submit(item)
                    case ScoreRequest():
                        self._scores.submit(item)
                    case _:
                        self._obey(item)
            if self._has_work and not self._stands:
                return True

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work or bool(self._scores.waiting)

    def _obey(self, command: _Command) -> None:
        try:
            answer = command.run()
        except WeightError as error:  # the caller's; checked before anything was overwritten
            _settle(command.future, error=error)
        except BaseException as error:
            _settle(command.future, error=ServerDied(f"the engine failed: {error!r}"))
            raise
        else:
            _settle(command.future, answer)

    def _answer(self, ended: list[Request]) -> None:
        for request in ended:
            self._forget(request)
            _settle(request.owner, request.generation)

    def _forget(self, request: Request) -> None:
        """From either thread. Another one may have its id already."""
        with self._forgetting:
            if self._open.get(request.id) is request:
                del self._open[request.id]

    def _abort(self, ids: list[str] | None) -> int:
        gone = self._engine.abort(ids)
        self._answer(gone)
        return len(gone)

    def _update(self, staged: Staged) -> float:
        engine = self._engine
        if staged.base not in (None, engine.version):  # another version has had its turn since it was prepared
            staged = stage(engine.model, staged.path, staged.version)
        self._newest, self._later = WeightInfo(staged.version, staged.path, 0, digest=staged.digest), staged
        engine.newest = staged.version
        if engine.has_work if engine.invariant else any(r.sampling.weight_version is not None for r in engine.running):
            return 0.0  # it is loaded in its turn
        return self._serve_newest()

    def _serve_newest(self) -> float:
        """What goes wrong here, but for an update, is the end of the engine: it could serve nobody."""
        staged, self._later = self._later, None
        if staged is None or staged.base not in (None, self._engine.version):
            staged = self._read(self._newest)
        return self._serve(staged.tensors, staged.version)

    def _serve_older(self, version: int) -> None:
        """For those that name it. Raises WeightError."""
        if self._store is None:
            raise WeightsMissing("this server has no weights_dir from which it could load another version")
        if not self._newest.path or is_broadcast(self._newest.path):
            raise WeightsMissing("the newest weights are in no file, from which it could load them again afterwards")
        path = str(self._store.path(version))
        staged = self._read(WeightInfo(version, path, 0, digest=self._store.digest_of(path)))
        self._serve(staged.tensors, version)

    def _read(self, info: WeightInfo) -> Staged:
        """All of it, if its checksum is what it was. Raises WeightError."""
        staged = stage(self._engine.model, info.path, info.version)
        check_digest(staged.digest, info)
        return staged

    def _serve(self, tensors: Mapping[str, Tensor], version: int) -> float:
        began = time.monotonic()
        copy_into(self._engine.model, tensors)
        self._engine.version = version
        ended = time.monotonic()
        self._report.weights(began, ended, version)
        return ended - began

    def _take_turn(self) -> None:
        """Once no request runs, load the version that waits to be served; who names one that is not kept is told."""
        engine = self._engine
        while not engine.running and (turn := self._turn) is not None and turn != engine.version:
            if turn == engine.newest:
                self._serve_newest()
                return
            try:
                self._serve_older(turn)
                return
            except WeightError as error:
                refused = [r for r in engine.waiting if r.sampling.weight_version == turn]
                engine.abort([r.id for r in refused])
                for request in refused:
                    self._forget(request)
                    _settle(request.owner, error=VersionNotServed(f"weight version {turn} cannot be served: {error}"))

    @property
    def _turn(self) -> int | None:
        """The version whose turn it is; rows are scored by the newest."""
        turn = self._engine.turn
        return self._engine.newest if turn is None and self._scores.waiting else turn

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _set_asleep(self, asleep: bool) -> None:
        if asleep != self._asleep:
            self._asleep = asleep
            self._engine.sleep() if asleep else self._engine.wake_up()

    @property
    def _stands(self) -> bool:
        return self._paused or self._asleep

    def _fail_open(self) -> None:
        with self._wake:
            self._closing = True
            left = list(self._inbox)
            self._inbox.clear()
        for item in left:
            if isinstance(item, _Command):
                _settle(item.future, error=self._death())
        for request in list(self._open.values()):
            _settle(request.owner, error=self._death())
        self._open.clear()
        for scoring in list(self._scoring):
            _settle(scoring.owner, error=self._death())

    # On the caller's loop.

    async def _between_steps(self, run: Callable[[], T]) -> T:
        self._check_alive()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(_Command(run, future))
        return await future

    def _post(self, item: _Item) -> None:
        with self._wake:
            if not self._closing:
                self._inbox.append(item)
                self._wake.notify()
                return
        if isinstance(item, Request):
            self._forget(item)
        _settle(item.future if isinstance(item, _Command) else item.owner, error=self._death())

    def _death(self) -> ServerDied:
        return ServerDied(f"the engine failed: {self._failure!r}" if self._failure else "the server was closed")

    def _check_alive(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise self._death()


def _settle(future: asyncio.Future[Any] | None, answer: Any = None, error: Exception | None = None) -> None:
    """Resolve a future from another thread; whoever waited may have been cancelled, and its loop closed."""

    if future is None:
        return

    def settle() -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(answer)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settle)
