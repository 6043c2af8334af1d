"""The LLM client that agent loops get: many servers, of which some may die, behind one `generate`, or one `score`.

Consumes: server handles. Waits for: a healthy server (woken by a re-admission, with a deadline); an answer.
A server that is out, and only such a one, is probed by a retry timer with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from agent_loop.llm.metered import RunStopping
from agent_loop.llm.protocol import Generation, LLMServer, SamplingParams, Scores, ServerDied
from agent_loop.llm.router import Router, Ticket

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the client waits for what, in seconds."""

    healthy: float = 120.0  # for any server to be healthy; also for a server that keeps aborting without a token
    answer: float = 600.0  # for one generation or score; a server that is silent for longer counts as dead
    probe: float = 10.0  # for one health check
    abort: float = 2.0  # for what a cancelled generation had until then; a decode step, or a prefill
    first_pause: float = 0.1  # between health checks, doubling
    longest_pause: float = 5.0
    deaths: int = 8  # servers that may die under one request before it is given up


class NoServer(ServerDied):
    """No server was healthy until the deadline."""


class RoutedClient:
    """Implements LLMPool and Scorer over several LLMServers.

    - A request whose server died continues elsewhere, from the tokens it already has.
    - An aborted request continues with the prompt plus its tokens; all pieces together never exceed `max_tokens`.
    - Pieces keep the sampling seed: an engine draws by (seed, position), so a continuation continues the stream.
    - A cancelled request is aborted, and ends when the server has said what it had, or `Patience.abort` is over.
    """

    def __init__(
        self, servers: Mapping[str, LLMServer], *, patience: Patience | None = None, router: Router | None = None
    ) -> None:
        self.router = router or Router(servers)
        self._servers: dict[str, LLMServer] = dict(servers)
        self._patience = patience or Patience()
        self._changed = asyncio.Event()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[Any]] = set()
        self._prefix = secrets.token_hex(4)
        self._requests = 0
        self._closing = False
        self._fault: BaseException | None = None

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str,
        images: Sequence[bytes] = (),
        so_far: Generation | None = None,
    ) -> Generation:
        """Raises ServerDied (retries exhausted, or NoServer), ContextOverflow and ImagesNotServed; "aborted" only after
        `close`."""
        done = Generation() if so_far is None else so_far
        setbacks = _Setbacks(session, self._patience)
        while (ticket := await self._acquire(session, len(prompt_ids) + sampling.max_tokens)) is not None:
            try:
                piece = await self._call(ticket, prompt_ids, sampling, images, done)
            except ServerDied as error:
                self._take_out(ticket, str(error))
                setbacks.count_death(error)
                continue
            finally:
                self.router.release(ticket)
            _extend(done, piece, sampling, ticket.server)
            if piece.weight_versions:
                self.router.observe(ticket.server, max(piece.weight_versions))
            if done.stop_reason != "aborted":
                return done
            await setbacks.pause(ticket.server, progress=bool(piece.token_ids))
        done.stop_reason = "aborted"
        return done

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], temperature: float, *, session: str
    ) -> Scores:
        """Raises ServerDied (retries exhausted, NoServer, or the run stops), and what the server says of the tokens."""
        setbacks = _Setbacks(session, self._patience)
        while (ticket := await self._acquire(session, len(prompt_ids) + len(response_ids))) is not None:
            try:
                scores = await self._scored(ticket, prompt_ids, response_ids, temperature)
            except ServerDied as error:
                self._take_out(ticket, str(error))
                setbacks.count_death(error)
                continue
            finally:
                self.router.release(ticket)
            if len(scores.log_probs) != len(response_ids):
                raise RuntimeError(
                    f"server {ticket.server} broke the protocol: {len(scores.log_probs)} log-probs of "
                    f"{len(response_ids)} tokens"
                )
            return scores
        raise RunStopping(f"{session}: its tokens were not scored because the run stops")

    def set_servers(self, servers: Mapping[str, LLMServer]) -> None:
        """The servers are now these: new or exchanged handles join after a health check, missing ones leave."""
        for name in set(self._servers) - set(servers):
            self.router.remove(name)
            self._stop_probe(name)
        for name, server in servers.items():
            if self._servers.get(name) is not server:
                self.router.remove(name)
                self.router.add(name)
                self._stop_probe(name)
        self._servers = dict(servers)
        for name in self.router.out():
            self._probe_later(name)

    async def close(self) -> None:
        """The run stops: waiting requests return what they have as "aborted"; no task stays behind."""
        self._closing = True
        self._changed.set()
        tasks = [*self._probes.values(), *self._aborts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _acquire(self, session: str, tokens: int) -> Ticket | None:
        """None only when the client is closing."""
        try:
            async with asyncio.timeout(self._patience.healthy):
                while not self._closing:
                    if self._fault is not None:
                        raise RuntimeError("the health probe of an LLM server broke") from self._fault
                    if (ticket := self.router.acquire(session, tokens)) is not None:
                        return ticket
                    self._changed.clear()
                    await self._changed.wait()
                return None
        except TimeoutError:
            out = "; ".join(f"{name}: {reason}" for name, reason in self.router.out().items()) or "there is no server"
            raise NoServer(
                f"{session} waited {self._patience.healthy:g} s for a healthy LLM server ({out}); see the servers' logs"
            ) from None

    async def _call(
        self, ticket: Ticket, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes], done: Generation
    ) -> Generation:
        """The next piece after `done`; if this is cancelled, `done` has what was sampled of it."""
        self._requests += 1
        request_id, server = f"{self._prefix}-{self._requests}", self._servers[ticket.server]
        left = replace(sampling, max_tokens=sampling.max_tokens - len(done.token_ids))
        shown = [images] if images else ()
        call = asyncio.ensure_future(server.generate(request_id, prompt_ids + done.token_ids, left, *shown))
        call.add_done_callback(_looked_at)
        try:
            await asyncio.wait({call}, timeout=self._patience.answer)
        except asyncio.CancelledError:
            if (piece := await self._aborted(server, request_id, call)) is not None:
                _extend(done, piece, sampling, ticket.server)
            raise
        if call.done():
            return call.result()
        call.cancel()
        self._abort(server, request_id)
        raise ServerDied(f"server {ticket.server} gave no answer within {self._patience.answer:g} s")

    async def _aborted(self, server: LLMServer, request_id: str, call: asyncio.Future[Generation]) -> Generation | None:
        """What a call whose caller is gone has given; None if its server does not say so in time."""
        try:
            if not call.done():
                abort = self._abort(server, request_id)
                await asyncio.wait({abort}, timeout=self._patience.abort)
                if _succeeded(abort) and abort.result():
                    await asyncio.wait({call}, timeout=self._patience.abort)
            return call.result() if _succeeded(call) else None
        finally:
            call.cancel()

    async def _scored(
        self, ticket: Ticket, prompt_ids: list[int], response_ids: list[int], temperature: float
    ) -> Scores:
        try:
            async with asyncio.timeout(self._patience.answer):
                return await self._servers[ticket.server].score(prompt_ids, response_ids, temperature)
        except TimeoutError:
            raise ServerDied(f"server {ticket.server} gave no scores within {self._patience.answer:g} s") from None

    def _abort(self, server: LLMServer, request_id: str) -> asyncio.Task[int]:
        """Best effort: whoever wanted the tokens is gone, the engine's slot should be free. The answer: whether it was
        there."""

        async def abort() -> int:
            try:
                async with asyncio.timeout(self._patience.probe):
                    return await server.abort([request_id])
            except (ConnectionError, TimeoutError) as error:
                logger.debug("abort of %s: %s", request_id, error)
                return 0

        task = self._start(abort(), f"abort-{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    def _take_out(self, ticket: Ticket, reason: str) -> None:
        if self.router.fail(ticket, reason):
            logger.warning("LLM server %s is out: %s", ticket.server, reason)
            self._probe_later(ticket.server)

    def _probe_later(self, name: str) -> None:
        if not self._closing and name not in self._probes:
            self._probes[name] = self._start(self._probe(name, self._servers[name]), f"probe-{name}")

    def _stop_probe(self, name: str) -> None:
        if task := self._probes.pop(name, None):
            task.cancel()

    async def _probe(self, name: str, server: LLMServer) -> None:
        """Ask the server until it is healthy at the version in service."""
        pause = self._patience.first_pause
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._patience.longest_pause)
            try:
                async with asyncio.timeout(self._patience.probe):
                    load = await server.load()
            except (ConnectionError, TimeoutError) as error:
                self.router.servers[name].reason = f"health check: {error or type(error).__name__}"
                continue
            if self.router.readmit(name, load.weight_version):
                logger.info("LLM server %s is back at weight version %d", name, load.weight_version)
                del self._probes[name]
                self._changed.set()
                return

    def _start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._note_fault)
        return task

    def _note_fault(self, task: asyncio.Task[Any]) -> None:
        """A background task that broke stops the client's users, not only itself."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s broke: %r", task.get_name(), error)
            self._fault = error
            self._changed.set()


class _Setbacks:
    """What went wrong with one request, and when that is enough."""

    def __init__(self, session: str, patience: Patience) -> None:
        self._session = session
        self._patience = patience
        self._deaths = 0
        self._barren_since: float | None = None
        self._pause = patience.first_pause

    def count_death(self, error: ServerDied) -> None:
        self._deaths += 1
        if self._deaths >= self._patience.deaths:
            raise ServerDied(
                f"{self._session}: {self._deaths} servers died under this request; the last: {error}"
            ) from error

    async def pause(self, server: str, *, progress: bool) -> None:
        """After an abort: none if it brought tokens, else growing ones, and ServerDied in the end."""
        if progress:
            self._barren_since, self._pause = None, self._patience.first_pause
            return
        now = asyncio.get_running_loop().time()
        self._barren_since = now if self._barren_since is None else self._barren_since
        if now - self._barren_since > self._patience.healthy:
            raise ServerDied(
                f"{self._session}: server {server} kept aborting for {self._patience.healthy:g} s without a token"
            )
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, self._patience.longest_pause)


def _succeeded(call: asyncio.Future[Any]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def _looked_at(call: asyncio.Future[Any]) -> None:
    """Whoever gave a call up has said why; what it raises later is not an error that nobody saw."""
    _ = call.cancelled() or call.exception()


def _extend(done: Generation, piece: Generation, sampling: SamplingParams, server: str) -> None:
    """Append a piece and set the stop reason of the whole. Raises RuntimeError if the server broke the protocol."""
    count = len(piece.token_ids)
    if (
        len(done.token_ids) + count > sampling.max_tokens
        or len(piece.log_probs) != count
        or len(piece.weight_versions) != count
    ):
        raise RuntimeError(
            f"server {server} broke the protocol: {count} tokens with {len(piece.log_probs)} log-probs and "
            f"{len(piece.weight_versions)} versions, after {len(done.token_ids)} of at most {sampling.max_tokens}"
        )
    done.token_ids += piece.token_ids
    done.log_probs += piece.log_probs
    done.weight_versions += piece.weight_versions
    done.queue_seconds += piece.queue_seconds
    done.engine_seconds += piece.engine_seconds
    done.stop_reason = piece.stop_reason
    if piece.stop_reason == "aborted" and count:
        if piece.token_ids[-1] in sampling.stop_token_ids:
            done.stop_reason = "stop"
        elif len(done.token_ids) == sampling.max_tokens:
            done.stop_reason = "length"
