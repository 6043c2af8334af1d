"""The event loop of a client that is called from threads, and from other event loops.

    a thread without a loop   run(work)    drives the loop itself until its work is done: nobody else has to wake up
    code in another loop      arun(work)   hands the work over, and a helper thread drives; what is handed over in one
                                           turn of a loop, and what is done in one, costs one wake-up together
    nobody                                 the helper drives, so that answers and pushes are taken at any time

A caller that comes while the helper drives asks it to leave; the helper comes back when no caller has driven for REST
seconds, or at once if there is work that was handed over.

Ctrl-C may arrive between any two steps of what the main thread does here, also in the middle of somebody else's task
that it drives. So it is put off while a call lasts (`_Interrupts`): the first cancels the call's own work, the second
leaves that to the helper, and KeyboardInterrupt is raised when nothing here is half done.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # signal wraps it; each of its three calls makes enums, a tenth of all
import asyncio
import collections
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from transfer_queue.errors import Disconnected

T = TypeVar("T")

REST = 0.05
"""Seconds without a caller after which the helper drives: what arrives in between waits so long at most."""


class ClientLoop:
    """Invariants: one thread at a time runs the loop; work that was handed over always has somebody who drives it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = weakref.WeakKeyDictionary()
        self._open = 0  # works handed over and begun, not done; only whoever drives changes it
        # What follows belongs to who holds the condition.
        self._changed = threading.Condition(threading.Lock())
        self._inbox: collections.deque[_Work] = collections.deque()
        self._driver: threading.Thread | None = None
        self._leaving = False  # the helper has been asked to leave
        self._callers = 0  # who wait for the helper to leave
        self._helper_sleeps = False  # until it is notified
        self._last = -REST
        self._closed = False
        self._helper = threading.Thread(target=self._help, name=name, daemon=True)
        self._helper.start()

    @property
    def alive(self) -> bool:
        return not self._closed and self._process == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, waited for by the calling thread. Raises Disconnected after `close`, or in a fork."""
        if (
            threading.current_thread() is not threading.main_thread()
            or _signal.getsignal(_signal.SIGINT) is not _signal.default_int_handler
        ):
            return self._run(work, _Interrupts())
        interrupts = _Interrupts()
        _signal.signal(_signal.SIGINT, interrupts.note)
        try:
            return self._run(work, interrupts)
        finally:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            if interrupts.count:
                raise KeyboardInterrupt from None

    def _run(self, work: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        running = asyncio._get_running_loop()
        if running is self.loop:
            work.close()
            raise RuntimeError(f"client {self.name!r} was called from its own event loop, which would wait for itself")
        if running is None:
            try:
                if self._lead(work):
                    return self._drive(work, interrupts)
            finally:
                self._follow()
        ended: queue.SimpleQueue[asyncio.Task[T] | None] = queue.SimpleQueue()  # a signal handler may put to it
        handed = _Work(work, ended.put)
        self._hand_over(handed)
        try:
            interrupts.then(partial(self._leave_to_others, handed, ended, interrupts))
            task = ended.get()
        except BaseException:
            self._cancel(handed)  # out of a signal's handler
            raise
        finally:
            interrupts.then(None)
        if task is None:
            raise KeyboardInterrupt
        if task.cancelled() and self._closed:
            raise Disconnected(f"client {self.name!r} was closed")
        return task.result()

    def _leave_to_others(
        self, handed: _Work, ended: queue.SimpleQueue[asyncio.Task[Any] | None], interrupts: _Interrupts
    ) -> None:
        self._cancel(handed)
        if interrupts.count > 1:
            ended.put(None)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, awaited from any loop. Raises Disconnected after `close`, or in a fork."""
        loop = asyncio.get_running_loop()
        if loop is self.loop:
            return await work
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = _Outbox(loop)
        future = loop.create_future()
        handed = _Work(work, partial(outbox.put, future))
        self._hand_over(handed)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(handed)
            raise

    def close(self) -> None:
        """End: what still runs is cancelled. A second call does nothing, nor one in a fork."""
        with self._changed:
            if self._process != os.getpid():
                return
            self._closed = True
            self._ask_helper()
            self._changed.notify_all()
        self._helper.join()

    # --- handing over ----------------------------------------------------------------------------------------

    def _hand_over(self, handed: _Work) -> None:
        with self._changed:
            self._check(handed.work)
            if not self._inbox:  # first, so that an interrupt in between leaves no work that nobody will take
                self.loop.call_soon_threadsafe(self._take)
            self._inbox.append(handed)
            if self._driver is None:
                self._changed.notify_all()

    def _take(self) -> None:
        with self._changed:
            inbox, self._inbox = self._inbox, collections.deque()
            self._open += len(inbox)
        for handed in inbox:
            handed.task = self.loop.create_task(handed.work)
            handed.task.add_done_callback(partial(self._done, handed))
            if handed.cancelled:
                handed.task.cancel()

    def _done(self, handed: _Work, task: asyncio.Task[Any]) -> None:
        self._open -= 1
        handed.deliver(task)

    def _cancel(self, handed: _Work) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.loop.call_soon_threadsafe(handed.cancel)

    def _check(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            work.close()
            raise Disconnected(f"client {self.name!r} was closed")
        if self._process != os.getpid():
            work.close()
            raise Disconnected(
                f"client {self.name!r} was made in process {self._process}, which forked this one: connect anew here"
            )

    # --- driving ---------------------------------------------------------------------------------------------

    def _lead(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Whether this thread may drive now; if not, another caller does."""
        with self._changed:
            self._check(work)
            if self._driver is self._helper:
                self._ask_helper()
                self._callers += 1
                try:
                    while self._driver is self._helper:
                        self._changed.wait()
                    self._check(work)
                except BaseException:
                    self._changed.notify_all()  # the helper waits for this caller
                    raise
                finally:
                    self._callers -= 1
            if self._driver is not None:
                return False
            self._driver = threading.current_thread()
            return True

    def _drive(self, work: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        """Run the loop until `work` is done, or a second interrupt leaves its end to the helper."""
        task = self.loop.create_task(self._until_done(work))
        interrupts.then(lambda: self.loop.call_soon_threadsafe(self._interrupt, task, interrupts))
        try:
            while not task.done():  # a stop of before may still be under way
                self.loop.run_forever()
                if interrupts.count > 1:
                    raise KeyboardInterrupt
        except BaseException:  # out of some callback too: a signal's, say
            task.cancel()
            raise
        finally:
            interrupts.then(None)
        return task.result()

    def _interrupt(self, task: asyncio.Task[Any], interrupts: _Interrupts) -> None:
        """In the loop, which whoever was interrupted drives."""
        task.cancel()
        task.add_done_callback(lambda _: self.loop.stop())  # one that had not begun ends without its own
        if interrupts.count > 1:
            self.loop.stop()

    async def _until_done(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, at whose end the loop stops in the same turn; run_until_complete takes another one."""
        try:
            return await work
        finally:
            self.loop.stop()

    def _follow(self) -> None:
        with self._changed:
            if self._driver is not threading.current_thread():
                return
            self._driver = None
            self._last = time.monotonic()
            if self._helper_sleeps or self._open or self._inbox or self._closed:
                self._changed.notify_all()

    def _ask_helper(self) -> None:
        if self._driver is self._helper and not self._leaving:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._leaving = True

    def _help(self) -> None:
        while self._may_drive():
            self.loop.run_forever()
            with self._changed:
                self._driver, self._leaving, self._last = None, False, time.monotonic()
                self._changed.notify_all()
        self._take()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(_all_of(tasks))
        self.loop.close()

    def _may_drive(self) -> bool:
        """Wait until the helper is to drive; False: until this loop is to end."""
        with self._changed:
            while True:
                if self._driver is not None or self._callers:
                    self._helper_sleeps = True
                    self._changed.wait()
                    self._helper_sleeps = False
                elif self._closed:
                    return False
                elif self._open or self._inbox or (rest := self._last + REST - time.monotonic()) <= 0:
                    self._driver = self._helper
                    return True
                else:
                    self._changed.wait(rest)


class _Interrupts:
    """Ctrl-C during one call: counted, told to whom it concerns, never raised into what runs at that moment."""

    __slots__ = ("_tell", "count")

    def __init__(self) -> None:
        self.count = 0
        self._tell: Callable[[], object] | None = None

    def note(self, *_: object) -> None:
        """The handler of the signal."""
        self.count += 1
        if self._tell is not None:
            self._tell()

    def then(self, tell: Callable[[], object] | None) -> None:
        """Call `tell` at each interrupt from now on, and now if there was one. None when there is nobody to tell: what
        `tell` refers to, the result too, would else live until the garbage collector finds the cycle."""
        self._tell = tell
        if self.count and tell is not None:
            tell()


class _Work:
    """Work that another thread or loop waits for; `deliver` gets the task when it is done."""

    __slots__ = ("cancelled", "deliver", "task", "work")

    def __init__(self, work: Coroutine[Any, Any, Any], deliver: Callable[[asyncio.Task[Any]], None]) -> None:
        self.work = work
        self.deliver = deliver
        self.task: asyncio.Task[Any] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """In the loop that does the work."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


class _Outbox:
    """What is done and not told yet to the loop that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._done: collections.deque[tuple[asyncio.Future[Any], asyncio.Task[Any]]] = collections.deque()
        self._told = False

    def put(self, future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        self._done.append((future, task))
        loop = self._loop()
        if not self._told and loop is not None:
            self._told = True
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told = False  # before looking: what is put from now on is told again
        while self._done:
            future, task = self._done.popleft()
            if not future.done():
                _settle(future, task)


def _settle(future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


async def _all_of(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
