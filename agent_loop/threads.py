"""A user's blocking function beside the event loop, in a thread that nothing waits for.

`asyncio.to_thread` runs it in a pool whose threads are joined at exit: one function that hangs keeps the process for
ever. Here threads are daemons, and one that hangs holds up neither the exit nor, for long, another call.

    calls of one turn of the loop ──► a thread, one after the other ──► their answers, together
                                        │ not begun after PATIENCE
                                        └────► a thread each

Waking a thread, and being woken by it, costs more than most functions; so the calls of a turn, and answers that come
before the loop has taken the last ones, share it. Threads that are done wait for the next call: starting one costs even
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

Work = tuple[Callable[[], None], str]
"""What a thread runs, and its name meanwhile."""

PATIENCE = 0.02
"""Seconds that a call waits behind others of its turn; then it gets a thread to itself."""

MAX_IDLE = 64
"""Threads that wait for the next call; further ones end."""


class _Thread:
    """A daemon thread that runs one function after the other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[deque[Work]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, calls: deque[Work]) -> None:
        """Those that are left when their turn comes: others may take from `calls`, too."""
        self._work.put(calls)

    def _run(self) -> None:
        while True:
            calls = self._work.get()
            with contextlib.suppress(IndexError):
                while True:
                    function, self._thread.name = calls.popleft()
                    function()
                    del function  # and what it holds
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


_idle: deque[_Thread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # threads stay behind


def _run_in_thread(calls: deque[Work]) -> None:
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.give(calls)


class _Calls:
    """Of one event loop. Invariant: while there are answers, the loop has been told to take them, or is being told."""

    def __init__(self) -> None:
        self._turn: deque[Work] | None = None
        self._answers: deque[Callable[[], None]] = deque()
        self._told = False

    def run(self, loop: asyncio.AbstractEventLoop, work: Work) -> None:
        if self._turn is None:
            self._turn = deque()
            loop.call_soon(self._begin, loop)
        self._turn.append(work)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        calls, self._turn = self._turn, None
        assert calls is not None
        if len(calls) > 1:
            loop.call_later(PATIENCE, self._spread, calls)
        _run_in_thread(calls)

    def _spread(self, calls: deque[Work]) -> None:
        with contextlib.suppress(IndexError):
            while True:
                _run_in_thread(deque([calls.popleft()]))

    def answer(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        """From a thread: `settle` is to be called in the loop."""
        self._answers.append(settle)
        if not self._told:
            self._told = True
            try:
                loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed: nobody asks any more
                self._answers.clear()

    def _take(self) -> None:
        self._told = False  # before looking: what comes from now on tells anew
        while self._answers:
            self._answers.popleft()()


_calls: WeakKeyDictionary[asyncio.AbstractEventLoop, _Calls] = WeakKeyDictionary()


async def in_daemon_thread(function: Callable[[], T], name: str = "user code") -> T:
    """What `function` returns, or raises. Cancelling gives up the answer; the thread runs on.

    Raises RuntimeError for what a future cannot carry (StopIteration) or would end the loop (SystemExit and its like).
    """
    loop = asyncio.get_running_loop()
    if (calls := _calls.get(loop)) is None:
        calls = _calls[loop] = _Calls()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function)
        except BaseException as caught:  # noqa: BLE001 (handed to whoever awaits)
            error: BaseException = caught
            if isinstance(caught, StopIteration) or not isinstance(caught, Exception):
                error = RuntimeError(f"{name} raised {type(caught).__name__}: {caught}")
                error.__cause__ = caught
            calls.answer(loop, lambda: None if answer.done() else answer.set_exception(error))
        else:
            calls.answer(loop, lambda: None if answer.done() else answer.set_result(result))

    calls.run(loop, (run, name))
    return await answer
