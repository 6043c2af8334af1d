"""Time that jumps: exact, in order, and loud when nothing can happen."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamrl.rollout.sim import virtual_clock
from streamrl.rollout.sim.virtual_clock import VirtualDeadlock, run_virtual


def test_hours_pass_at_once_and_timers_are_exact() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        at: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            at.append(loop.time())

        await asyncio.gather(*(sleeper(s) for s in (7200.0, 0.5, 3600.25, 1e-6)))
        return at

    began = time.monotonic()
    assert run_virtual(main()) == pytest.approx([1e-6, 0.5, 3600.25, 7200.0], abs=1e-9)
    assert time.monotonic() - began < 2


def test_deadlines_are_virtual_too() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1000)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1000)


def test_long_chains_of_short_sleeps_do_not_drift() -> None:
    async def main() -> float:
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1000, abs=1e-6)


def test_a_wait_nobody_can_end_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_clock, "THREAD_SECONDS", 0.05)

    async def forgotten() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock, match="forgotten"):
        run_virtual(forgotten())


def test_threads_are_waited_for_when_no_timer_is_pending() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: time.sleep(0.05) or 3)

    assert run_virtual(main()) == 3
