"""A user's blocking function beside the event loop, in a thread that nothing waits for.

`asyncio.to_thread` runs it in a pool whose threads are joined at exit: one function that hangs keeps the process for
ever. Here every call has a daemon thread to itself, so one that hangs neither holds up the others nor the exit. Threads
that are done wait for the next call: starting one takes longer than most functions.
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

T = TypeVar("T")

MAX_IDLE = 64
"""Threads that wait for the next call; further ones end. As many as sessions may end at nearly the same time: one that
waits costs a few pages, one that is started more than most functions."""


class _Thread:
    """A daemon thread that runs one function after the other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], str]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, function: Callable[[], None], name: str) -> None:
        self._work.put((function, name))

    def _run(self) -> None:
        while True:
            function, self._thread.name = self._work.get()
            function()
            del function  # and what it holds
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


_idle: deque[_Thread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # threads stay behind


async def in_daemon_thread(function: Callable[[], T], name: str = "user code") -> T:
    """What `function` returns, or raises. Cancelling gives up the answer; the thread runs on.

    Raises RuntimeError for what a future cannot carry (StopIteration) or would end the loop (SystemExit and its like).
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_it: Callable[[], None]) -> None:
        if not answer.done():
            set_it()

    def deliver(set_it: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(settle, set_it)

    def run() -> None:
        try:
            result = context.run(function)
        except BaseException as caught:  # noqa: BLE001 (handed to whoever awaits)
            error: BaseException = caught
            if isinstance(caught, StopIteration) or not isinstance(caught, Exception):
                error = RuntimeError(f"{name} raised {type(caught).__name__}: {caught}")
                error.__cause__ = caught
            deliver(lambda: answer.set_exception(error))
        else:
            deliver(lambda: answer.set_result(result))

    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.give(run, name)
    return await answer
