"""One leased prompt group: run the sessions that are still missing, write each the moment it is finished.

Consumes: a lease. Produces: one put per session, with its close. Waits for: slots, sessions, the queue.
Ends: all sessions closed (the lease ends by itself); lease lost (what is not written is forgotten); or given back
because infrastructure failed, after the sessions that could finish have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from agent_loop.loop import AgentLoop
from agent_loop.plugins import PluginError
from agent_loop.rows import PROMPT_FIELDS, Prompt, SessionRows
from agent_loop.session import Failed, Interrupted, SessionRunner, first_cause
from transfer_queue.client import QueueClient
from transfer_queue.errors import (
    Conflict,
    Corrupt,
    DeadlineExceeded,
    Disconnected,
    Fenced,
    Invalid,
    NotFound,
    QueueFull,
    SegmentGone,
)  # fmt: skip
from transfer_queue.net.messages import Group, SessionClose, Token

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 50
"""Attempts after which a group is taken for what stops its workers without killing them (the queue finds those that
kill): given back as poison, it ends. An outage of all LLM servers costs an attempt per patience of the client (120 s),
and an hour of it should not cost groups."""

Ending = Literal["closed", "lost", "returned"]


@dataclass(slots=True, kw_only=True)
class GroupRun:
    """Invariant: every session is written at most once per lease, with the lease's token; nothing is written after
    the lease was found lost."""

    queue: QueueClient
    runner: SessionRunner
    find_loop: Callable[[str | None], AgentLoop]
    slots: asyncio.Semaphore
    partition: str
    group: Group
    token: Token
    ttl: float
    counts: Counter[str] = field(default_factory=Counter)
    on_session_end: Callable[[], None] = lambda: None
    """Called once per session that this lease has to run, as it ends or is given up."""
    returned: deque[str] = field(default_factory=lambda: deque(maxlen=1))
    """Why the last group of this worker went back; shared by all."""
    _unfinished: str = ""
    _open: int = 0
    """Sessions that this lease has still to close."""
    _to_end: int = field(init=False)

    def __post_init__(self) -> None:
        self._to_end = self.group.n - len(self.group.sessions)

    async def run(self) -> Ending:
        """Raises only what is a bug."""
        if self.group.attempt >= MAX_ATTEMPTS:
            why = self.returned[0] if self.returned else "workers died, or leases ran out"
            await self.give_back(
                f"{self.group.attempt} attempts ended without all sessions closed; the last that is known: {why}",
                poison=True,
            )
            return "returned"
        self._open = self.group.n - len(self.group.sessions)
        lost = broken = None
        try:
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._keep_lease())
                await self._sessions()
                renewing.cancel()
        except* (Fenced, Conflict) as errors:
            lost = first_cause(errors)
        except* Corrupt as errors:
            broken = first_cause(errors)
        except* (Disconnected, DeadlineExceeded, NotFound, QueueFull, SegmentGone) as errors:
            self._unfinished = str(first_cause(errors))
        if lost and self._open:  # a renewal that crossed with the last close is no loss
            logger.info("group %s of %s is no longer ours: %s", self.group.uid, self.partition, lost)
            return "lost"
        if broken:
            await self.give_back(f"the prompt cannot be read: {broken}", poison=True)
            return "returned"
        if self._unfinished:
            self.returned.append(self._unfinished)
            await self.give_back(self._unfinished)
            return "returned"
        if self._open:
            await self.give_back(f"{self._open} of {self.group.n} sessions ended without being closed")
            return "returned"
        return "closed"

    async def give_back(self, reason: str, *, poison: bool = False) -> None:
        """Another worker may have the group. If the queue cannot be told, the lease just runs out."""
        logger.warning("group %s of %s goes back: %s", self.group.uid, self.partition, reason)
        try:
            await self.queue.nack(self.partition, self.token, [self.group.uid], reason=reason, poison=poison)
        except (Fenced, Conflict, NotFound):
            pass  # it is not ours any more, which is what we wanted
        except (Disconnected, DeadlineExceeded) as error:
            logger.warning("group %s could not be given back, its lease will run out: %s", self.group.uid, error)

    async def _keep_lease(self) -> None:
        while self.ttl > 0:
            await asyncio.sleep(self.ttl / 3)
            try:
                await self.queue.renew(self.partition, self.token)
            except (Disconnected, DeadlineExceeded) as error:
                logger.warning("lease of group %s not renewed: %s", self.group.uid, error)

    async def _sessions(self) -> None:
        uid = self.group.uid
        columns = await self.queue.get(self.partition, [uid], list(PROMPT_FIELDS))
        prompt = Prompt(columns)
        running: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            for session in range(self.group.n):
                if session not in self.group.sessions:
                    name = f"{self.partition}/{uid}_{session}"
                    running[session] = tasks.create_task(self._session(prompt, session), name=name)
                    running[session].add_done_callback(self._session_ended)
        for session, task in running.items():
            if task.cancelled():  # not by us: that would have ended this task too
                await self._close_failed(session, "CancelledError: the agent's code cancelled its own session")

    def _session_ended(self, _: asyncio.Task[None]) -> None:
        self._to_end -= 1
        self.on_session_end()

    def end(self) -> None:
        """Nothing more comes of it: sessions that never began end, too."""
        while self._to_end > 0:
            self._to_end -= 1
            self.on_session_end()

    async def _session(self, prompt: Prompt, session: int) -> None:
        try:
            await self.slots.acquire()
        except asyncio.CancelledError:
            self.runner.never_ran(partition=self.partition, uid=self.group.uid, session=session)
            raise
        try:
            outcome = await self._run(prompt, session)
            match outcome:
                case SessionRows():
                    await self._write(session, outcome)
                case Failed(reason):
                    await self._close_failed(session, reason)
                case Interrupted(reason):
                    self.counts["sessions_interrupted"] += 1
                    self._unfinished = reason
        finally:
            self.slots.release()

    async def _run(self, prompt: Prompt, session: int) -> SessionRows | Failed | Interrupted:
        try:
            loop = self.find_loop(prompt["agent_name"])
        except PluginError as error:
            return Failed(f"PluginError: {error}")
        return await self.runner.run(
            loop, prompt, self.group.tag, partition=self.partition, uid=self.group.uid, session=session
        )

    async def _write(self, session: int, rows: SessionRows) -> None:
        close = SessionClose(self.group.uid, session, rows.keys)
        try:
            await self.queue.put(
                self.partition, rows.keys, rows.columns, tags=rows.tags, token=self.token, closes=[close]
            )
        except (TypeError, Invalid) as error:  # a column that the queue cannot store
            await self._close_failed(session, f"{type(error).__name__}: {error}")
            return
        self._open -= 1
        self.counts["sessions_finished"] += 1
        self.counts["rows"] += len(rows.keys)

    async def _close_failed(self, session: int, reason: str) -> None:
        close = SessionClose(self.group.uid, session, [], failed=reason)
        await self.queue.put(self.partition, [], {}, token=self.token, closes=[close])
        self._open -= 1
        self.counts["sessions_failed"] += 1
