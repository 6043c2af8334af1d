"""An event loop on which time passes only when nothing else can happen: hours of simulation in a second of CPU.

    async def run() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    run_virtual(run())   # 3600.0, at once

When no callback is ready the clock jumps to the next timer. So whatever asks the loop for the time (`asyncio.sleep`,
`wait_for`, `loop.call_later`, the sim server) is exact and repeatable; `time.monotonic` and threads are not part of it.
Work in a thread (`asyncio.to_thread`) is waited for in real time only while no timer is pending.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_SECONDS = 10.0
"""Real time to wait for a thread or a socket when no timer is pending; then the simulation is stuck for good."""


class VirtualDeadlock(RuntimeError):
    """Every task waits for something, and no timer, thread or socket is left that could bring it about."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose `time()` starts at 0 and jumps. Invariant: time never goes back, and no timer is late."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._virtual_now

    def _jump(self, seconds: float) -> None:
        self._virtual_now += seconds

    def stuck(self) -> VirtualDeadlock:
        waiting = sorted(str(task.get_coro()) for task in asyncio.all_tasks(self))
        return VirtualDeadlock(
            f"at {self.time():.6f} s of virtual time nothing can happen any more; {len(waiting)} tasks wait: "
            + "; ".join(waiting[:8])
        )


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of sleeping until the next timer, tells the loop that the time has passed."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self._jump(timeout)
            return ready
        ready = super().select(THREAD_SECONDS)
        if not ready:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualClockLoop)
            raise loop.stuck()
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a VirtualClockLoop. Raises VirtualDeadlock when nothing can happen any more."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
