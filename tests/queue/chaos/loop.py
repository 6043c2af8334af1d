"""An event loop whose whole schedule follows from a seed: virtual time, and ready callbacks in any order.

asyncio runs callbacks in the order in which they became ready. A program must not depend on it further than asyncio
promises, since over sockets each turn is a matter of luck. So this loop picks any of them, by the seed; timers come in
order of time. Threads are replaced by calls that take some virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing can happen any more, or not until the end of time."""


class SeededLoop(asyncio.BaseEventLoop):
    """Invariant: two loops of one seed that are given the same program run it in the same order."""

    def __init__(self, seed: int, *, disorder: float = 1.0, until: float = 1e6, steps: int = 10_000_000) -> None:
        """`disorder`: how often another than the first ready callback is taken. Raises Stuck after `until` (virtual
        seconds) or so many `steps`."""
        super().__init__()
        self.random = random.Random(seed)
        self.steps = 0
        self.schedule = 0  # a number for the order in which callbacks have run
        self._disorder = disorder
        self._until, self._most = until, steps
        self._now = 0.0
        self._clock_resolution = 0.0
        self.owner: Callable[[asyncio.Task[Any]], None] = lambda _: None
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def give_time(self, steps: int = 10_000) -> None:
        """For an end in good order, whatever was used up."""
        self._until, self._most = float("inf"), self.steps + steps

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """It takes some time, and has its effect at its beginning or at its end; none if it is given up before."""
        future = self.create_future()
        takes = self.random.choice([1e-4, 1e-2])
        if self.random.random() < 0.5:
            self._act(future, takes, func, args)
        else:
            self.call_later(takes, self._act, future, 0.0, func, args)
        return future

    def _act(self, future: asyncio.Future[Any], later: float, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        try:
            result = func(*args)
        except BaseException as error:  # noqa: BLE001
            self.call_later(later, _unless_done, future, future.set_exception, error)
        else:
            self.call_later(later, _unless_done, future, future.set_result, result)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        self.owner(task)
        return task

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # pyright: ignore
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Stuck(f"at {self._now:.3f} s nothing can happen any more")
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        self.steps += 1
        if self._now > self._until or self.steps > self._most:
            raise Stuck(f"not done at {self._now:.3f} s, after {self.steps} steps: {_waiting(self)}")
        at = self.random.randrange(len(ready)) if len(ready) > 1 and self.random.random() < self._disorder else 0
        self.schedule = (self.schedule * 1_000_003 + at * 101 + len(ready)) & 0xFFFFFFFFFFFFFFFF
        handle = ready[at]
        del ready[at]
        if not handle._cancelled:
            handle._run()

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_seeded(loop: SeededLoop, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, with what it left running ended. Raises Stuck."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.give_time()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            task._log_destroy_pending = False  # pyright: ignore
        with contextlib.suppress(Stuck):
            loop.run_until_complete(_all_ended(loop))
        asyncio.set_event_loop(None)
        loop.close()


async def _all_ended(loop: asyncio.AbstractEventLoop) -> None:
    await asyncio.wait([*(asyncio.all_tasks(loop) - {asyncio.current_task()}), asyncio.ensure_future(asyncio.sleep(0))])


def _unless_done(future: asyncio.Future[Any], act: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        act(value)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    return "; ".join(sorted(str(task.get_coro()) for task in asyncio.all_tasks(loop))[:12])
