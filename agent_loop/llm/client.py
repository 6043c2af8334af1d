"""The LLM client that agent loops get: many servers, of which some may die, behind one `generate`, or one `score`.

Consumes: server handles, and the news of the fleet where there is a manager. Waits for: a place at a server
(waiting.py); an answer, with a heartbeat that brings the tokens so far (beats.py). A server that is out, and only such
a one, is probed by a retry timer with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from agent_loop.llm.answers import (
    REQUESTS_OWN,
    SCORES_OWN,
    OddAnswer,
    ProtocolBroken,
    Sense,
    cancelled_itself,
    result_of,
    trouble,
)
from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.beats import Beats, OpenCall
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.metered import RunStopping
from agent_loop.llm.probes import Probes
from agent_loop.llm.protocol import Generation, LLMServer, SamplingParams, Scores, ServerDied
from agent_loop.llm.retry import Patience, Setbacks, extend
from agent_loop.llm.router import Router, Ticket
from agent_loop.llm.suspicion import PoisonRequest, Suspicion
from agent_loop.llm.waiting import NoServer, WaitingLine

__all__ = ["NoServer", "Patience", "PoisonRequest", "RoutedClient"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RoutedClient:
    """Implements LLMPool and Scorer over several LLMServers.

    - A request whose server died continues elsewhere, from the tokens that were seen of it. A server whose answer no
      server may give (answers.py) counts as one that died, and nothing of that answer is used.
    - An aborted request continues with the prompt plus its tokens; all pieces together never exceed `max_tokens`.
    - Pieces keep the sampling seed: an engine draws by (seed, position), so a continuation continues the stream.
    - A cancelled request is aborted, and ends when the server has said what it had, or `Patience.abort` is over.
    - A request under which server after server dies is tried alone, and then given up (suspicion.py).
    """

    def __init__(
        self, servers: Mapping[str, LLMServer], *, patience: Patience | None = None, router: Router | None = None,
        awake: AwakeTime | None = None, sense: Sense | None = None,
    ) -> None:  # fmt: skip
        """`awake`: what stands still while servers sleep; shared with whoever else has limits. `sense`: what answers
        are held against."""
        self.router = router or Router(servers)
        self._awake = awake or AwakeTime()
        self._sense = sense or Sense()
        self._servers: dict[str, LLMServer] = dict(servers)
        self._patience = patience or Patience()
        self._line = WaitingLine(self.router, self._patience.healthy, self._awake)
        self._beats = Beats(
            self._patience.beat, self._patience.silent, self._sense, self._made_tokens, self._look_after
        )
        self._suspicion = Suspicion(self._patience.poison)
        self._alone = asyncio.Lock()
        """Held by the suspect that is under way and has yet to show a token."""
        self._died_with: dict[str, tuple[int, int]] = {}
        """By server, at its last death: calls that were open beside the first that noticed it; suspects in all."""
        self._probes = Probes(self.router, self._patience, self._awake, self._sense, self._line.pump, self._look_after)
        self._aborts: set[asyncio.Task[Any]] = set()
        self._prefix = secrets.token_hex(4)
        self._requests = 0
        self._closing = False

    @property
    def waiting(self) -> int:
        """Requests that no server may take yet."""
        return len(self._line)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str,
        images: Sequence[bytes] = (),
        so_far: Generation | None = None,
        reserved: bool = False,
    ) -> Generation:
        """Raises ServerDied (retries exhausted, or NoServer), PoisonRequest, ContextOverflow and ImagesNotServed;
        "aborted" only after `close`."""
        done = Generation() if so_far is None else so_far
        setbacks = Setbacks(session, self._patience)
        while True:
            call = await self._let_in(prompt_ids, session, sampling.max_tokens, reserved)
            if call is None:  # the client is closing
                done.stop_reason = "aborted"
                return done
            server, barren = call.ticket.server, False
            done.queue_seconds += call.waited
            try:
                piece = await self._call(call, prompt_ids, sampling, images, done)
            except ServerDied as error:
                extend(done, call.got, sampling)
                self._note_death(call, prompt_ids, error)
                if done.stop_reason == "aborted":  # else its last token was seen
                    self._suspicion.check(Suspicion.key(prompt_ids))
                    setbacks.count_death(error)
            else:
                extend(done, piece, sampling)
                self.router.served(call.ticket)
                if piece.weight_versions:
                    self.router.observe(server, max(piece.weight_versions))
                barren = not piece.token_ids
            finally:
                self._clear(call)
                self._release(call.ticket)
            if done.stop_reason != "aborted":
                if self._suspicion:
                    self._suspicion.ended(Suspicion.key(prompt_ids))
                return done
            if barren:
                self.router.forget(session)
            await setbacks.pause(server, progress=not barren)

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], temperature: float, *, session: str
    ) -> Scores:
        """Raises ServerDied (retries exhausted, NoServer, or the run stops), and what the server says of the tokens."""
        setbacks = Setbacks(session, self._patience)
        while (ticket := await self._line.take(session, len(prompt_ids) + len(response_ids))) is not None:
            try:
                scores = await self._scored(ticket, prompt_ids, response_ids, temperature)
                self.router.served(ticket)
                return scores
            except ServerDied as error:
                self._take_out(ticket, error)
                setbacks.count_death(error)
            finally:
                self._release(ticket)
        raise RunStopping(f"{session}: its tokens were not scored because the run stops")

    def set_servers(self, servers: Mapping[str, LLMServer]) -> None:
        """The servers are now these: new or exchanged handles join after a health check, missing ones leave."""
        for name in set(self._servers) - set(servers):
            self.router.remove(name)
            self._probes.stop(name)
        for name, server in servers.items():
            if _identity(self._servers.get(name)) != _identity(server):
                self.router.remove(name)
                self.router.add(name)
                self._probes.stop(name)
        self._servers = dict(servers)
        for name in self.router.out():
            self._probes.start(name, self._servers[name])
        self._line.pump()

    def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        """A beat of the manager's. The answer: by server, requests and tokens of this client in flight."""
        if news.handles is not None:
            self.set_servers(news.handles)
        for name, reason in news.out.items():
            if self.router.eject(name, reason):
                self._probes.start(name, self._servers[name])
        for name in news.draining:
            self.router.drain(name)
        for name in self.router.draining() - news.draining:
            self.router.undrain(name)
        self._awake.tell(news.asleep)
        self._sense.tell_newest(news.newest)
        if news.newest is not None and self._sense.is_future(self.router.version):
            self.router.version = news.newest
        self.router.hear(news.servers, news.routers)
        self._line.pump()
        return self.router.held()

    def reserve(self, servers: Sequence[str]) -> None:
        """These, and no others, are for requests that ask for a reserved server (a validation)."""
        self.router.reserve(servers)
        self._line.pump()

    async def close(self) -> None:
        """The run stops: waiting requests return what they have as "aborted"; no task stays behind."""
        self._closing = True
        self._line.close()
        tasks = [*self._probes.close(), *self._aborts, *self._beats.stop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _let_in(self, prompt_ids: list[int], session: str, budget: int, reserved: bool) -> OpenCall | None:
        """A call with its place at a server, which the caller gives back; None only when the client is closing."""
        key = Suspicion.key(prompt_ids) if self._suspicion else 0
        if suspect := bool(key) and self._suspicion.suspects(key):
            await self._alone.acquire()
        ticket = None
        try:
            if key:
                self._suspicion.check(key)
            loop = asyncio.get_running_loop()
            came = loop.time()
            ticket = await self._line.take(session, len(prompt_ids) + budget, reserved=reserved)
        finally:
            if ticket is None and suspect:
                self._alone.release()
        if ticket is None:
            return None
        self._requests += 1
        lost = loop.create_future()
        lost.add_done_callback(_looked_at)
        return OpenCall(f"{self._prefix}-{self._requests}", ticket, lost, suspect, loop.time() - came)

    def _made_tokens(self, call: OpenCall) -> None:
        self._clear(call)
        self.router.observe(call.ticket.server, call.got.weight_versions[-1])
        self._line.pump()

    def _clear(self, call: OpenCall) -> None:
        """It is no suspect any more, or gone: the next one may be tried."""
        if call.suspect:
            call.suspect = False
            self._alone.release()

    def _release(self, ticket: Ticket) -> None:
        self.router.release(ticket)
        self._line.pump()

    def _note_death(self, call: OpenCall, prompt_ids: list[int], error: ServerDied) -> None:
        ticket = call.ticket
        if self.router.servers.get(ticket.server) is ticket.state:  # else it was taken from us, and died of that
            if self._take_out(ticket, error):
                others = self._beats.others(call)
                self._died_with[ticket.server] = (len(others), sum(other.suspect for other in others) + call.suspect)
            if isinstance(error, OddAnswer):
                return
            others, suspects = self._died_with.get(ticket.server, (0, 0))
            alone = not others or (call.suspect and suspects == 1)
            key = Suspicion.key(prompt_ids)
            self._suspicion.died(key, ticket.server, ticket.incarnation, str(error), alone=alone)

    async def _call(
        self, call: OpenCall, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes], done: Generation
    ) -> Generation:
        """The next piece after `done`; if this is cancelled, `done` has what was sampled of it."""
        name, server = call.ticket.server, self._server_of(call.ticket)
        call.budget = sampling.max_tokens - len(done.token_ids)
        left, prompt = replace(sampling, max_tokens=call.budget), prompt_ids + done.token_ids
        shown = [images] if images else ()
        try:
            answer = asyncio.ensure_future(server.generate(call.id, prompt, left, *shown))
        except TypeError as error:  # it is no coroutine
            raise trouble(error, name, "generate") from error
        answer.add_done_callback(_looked_at)
        self._beats.open(server, call)
        try:
            async with self._awake.limit(self._patience.answer):
                await asyncio.wait({answer, call.lost}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            piece = await self._aborted(server, call, answer)
            extend(done, call.got if piece is None else piece, sampling)
            raise
        finally:
            self._beats.close(server, call)
        if answer.done():
            piece = result_of(answer, name, "generate", REQUESTS_OWN)
            self._sense.check(piece, name, left=call.budget)
            return piece
        answer.cancel()
        self._abort(server, call)
        if call.lost.done() and not call.lost.cancelled() and (loss := call.lost.exception()) is not None:
            raise loss
        raise ServerDied(f"server {name} gave no answer within {self._patience.answer:g} s")

    async def _aborted(
        self, server: LLMServer, call: OpenCall, answer: asyncio.Future[Generation]
    ) -> Generation | None:
        """What a call whose caller is gone has given; None if its server does not say so in time."""
        try:
            if not answer.done():
                abort = self._abort(server, call)
                await asyncio.wait({abort}, timeout=self._patience.abort)
                if _succeeded(abort) and abort.result():
                    await asyncio.wait({answer}, timeout=self._patience.abort)
            if not _succeeded(answer):
                return None
            self._sense.check(piece := answer.result(), call.ticket.server, left=call.budget)
            return piece
        except OddAnswer as error:
            self._take_out(call.ticket, error)
            return None
        finally:
            answer.cancel()

    def _server_of(self, ticket: Ticket) -> LLMServer:
        """Raises ServerDied if it has left since the ticket was given."""
        if (server := self._servers.get(ticket.server)) is None:
            raise ServerDied(f"server {ticket.server} has left")
        return server

    async def _scored(
        self, ticket: Ticket, prompt_ids: list[int], response_ids: list[int], temperature: float
    ) -> Scores:
        name = ticket.server
        try:
            async with asyncio.timeout(self._patience.answer):
                scores = await self._server_of(ticket).score(prompt_ids, response_ids, temperature)
        except TimeoutError:
            raise ServerDied(f"server {name} gave no scores within {self._patience.answer:g} s") from None
        except SCORES_OWN:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled_itself():
                raise
            raise trouble(error, name, "score") from error
        self._sense.check_scores(scores, name, count=len(response_ids))
        return scores

    def _abort(self, server: LLMServer, call: OpenCall) -> asyncio.Task[int]:
        """Best effort: whoever wanted the tokens is gone, the engine's slot should be free. The answer: whether it was
        there."""

        async def abort() -> int:
            try:
                async with asyncio.timeout(self._patience.probe):
                    return await server.abort([call.id])
            except (ConnectionError, TimeoutError) as error:
                logger.debug("abort of %s: %s", call.id, error)
            except Exception as error:  # noqa: BLE001  # a server of one's own may raise anything
                self._take_out(call.ticket, trouble(error, call.ticket.server, "abort"))
            return 0

        task = self._start(abort(), f"abort-{call.id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    def _take_out(self, ticket: Ticket, error: ServerDied) -> bool:
        """False if it was out already."""
        if not self.router.fail(ticket, str(error), broken=isinstance(error, ProtocolBroken)):
            return False
        logger.warning("LLM server %s is out: %s", ticket.server, error)
        self._probes.start(ticket.server, self._servers[ticket.server])
        return True

    def _start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._look_after(task)
        return task

    def _look_after(self, task: asyncio.Task[Any]) -> None:
        task.add_done_callback(self._note_fault)

    def _note_fault(self, task: asyncio.Task[Any]) -> None:
        """A background task that broke stops the client's users, not only itself."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s broke: %r", task.get_name(), error)
            fault = RuntimeError(f"{task.get_name()}, which looks after an LLM server, broke: {error!r}")
            fault.__cause__ = error
            self._line.fail(fault)


def _identity(server: LLMServer | None) -> object:
    """A handle may come anew with each message; what it stands for is told by its `identity`, if it has one."""
    return None if server is None else getattr(server, "identity", id(server))


def _succeeded(call: asyncio.Future[Any]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def _looked_at(call: asyncio.Future[Any]) -> None:
    """Whoever gave a call up has said why; what it raises later is not an error that nobody saw."""
    _ = call.cancelled() or call.exception()
