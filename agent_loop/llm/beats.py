"""The tokens of open calls, read while they are made: what a server's death would take with it.

consumes  `LLMServer.progress` of each server that has open calls here, every `beat` seconds
produces  the tokens that each call has until then (`OpenCall.got`); a loss (`OpenCall.lost`) when a server is silent
woken by  the first call that is opened on a server; ends when its last one is closed

One question per server and beat, whatever the number of its requests: a message per token or per request would cost
the agent worker more than the sessions do. It is the heartbeat, too: a server that hangs is noticed after `silent`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_loop.llm.answers import Sense, cancelled_itself, odd, trouble
from agent_loop.llm.protocol import Generation, LLMServer, ServerDied
from agent_loop.llm.router import Ticket


@dataclass(slots=True, eq=False)
class OpenCall:
    """One `generate` under way."""

    id: str
    ticket: Ticket
    lost: asyncio.Future[None]
    """Fails with ServerDied when the server is found to be gone."""
    suspect: bool = False
    """Servers died under its prompt, and it has yet to show a token."""
    waited: float = 0.0
    """Seconds in the line."""
    budget: int = 0
    """Tokens that it may make."""
    got: Generation = field(default_factory=lambda: Generation(stop_reason="aborted"))


@dataclass(slots=True, eq=False)
class _Line:
    server: LLMServer
    calls: dict[str, OpenCall] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Beats:
    """Invariant: a call's `got` is a prefix of what its server answers in the end."""

    def __init__(
        self, beat: float, silent: float, sense: Sense, on_tokens: Callable[[OpenCall], None],
        on_task: Callable[[asyncio.Task[None]], None],
    ) -> None:  # fmt: skip
        """`on_tokens(call)` after new tokens; `on_task(task)` for each that was started, so that it is looked after."""
        self._beat, self._silent, self._sense = beat, silent, sense
        self._on_tokens, self._on_task = on_tokens, on_task
        self._lines: dict[str, _Line] = {}

    def open(self, server: LLMServer, call: OpenCall) -> None:
        name = call.ticket.server
        line = self._lines.get(name)
        if line is None or line.server is not server:  # an exchanged one's line ends with its calls
            line = self._lines[name] = _Line(server)
        line.calls[call.id] = call
        if (line.task is None or line.task.done()) and hasattr(server, "progress"):
            line.task = asyncio.get_running_loop().create_task(self._listen(name, line), name=f"beats-{name}")
            self._on_task(line.task)

    def close(self, server: LLMServer, call: OpenCall) -> None:
        line = self._lines.get(call.ticket.server)
        if line is not None and line.server is server:
            line.calls.pop(call.id, None)
        call.lost.cancel()

    def others(self, call: OpenCall) -> list[OpenCall]:
        """That are open beside it on its server."""
        line = self._lines.get(call.ticket.server)
        return [] if line is None else [other for other in line.calls.values() if other is not call]

    def stop(self) -> list[asyncio.Task[None]]:
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _listen(self, name: str, line: _Line) -> None:
        while True:
            await asyncio.sleep(self._beat)
            have = {id: len(call.got.token_ids) for id, call in line.calls.items() if not call.lost.done()}
            if not line.calls:
                return
            try:
                async with asyncio.timeout(self._silent):
                    news = await line.server.progress(have)
                if not isinstance(news, dict):
                    raise odd(name, f"progress answered {type(news).__name__}, which is no dict")
                self._take(name, line, news, have)
            except TimeoutError:
                self._lose(line, ServerDied(f"server {name} has not answered a heartbeat for {self._silent:g} s"))
            except ConnectionError as error:
                self._lose(line, ServerDied(str(error) or type(error).__name__))
            except Exception as error:  # noqa: BLE001  # a server of one's own may raise anything
                self._lose(line, trouble(error, name, "progress"))
            except asyncio.CancelledError as error:
                if cancelled_itself():
                    raise
                self._lose(line, trouble(error, name, "progress"))

    def _take(self, name: str, line: _Line, news: dict[str, Generation], have: dict[str, int]) -> None:
        for id, piece in news.items():
            call = line.calls.get(id)
            if call is None or not piece.token_ids or len(call.got.token_ids) != have.get(id):
                continue
            self._sense.check(piece, name, left=call.budget - len(call.got.token_ids))
            call.got.token_ids += piece.token_ids
            call.got.log_probs += piece.log_probs
            call.got.weight_versions += piece.weight_versions
            self._on_tokens(call)

    def _lose(self, line: _Line, error: ServerDied) -> None:
        for call in line.calls.values():
            if not call.lost.done():
                call.lost.set_exception(error)
