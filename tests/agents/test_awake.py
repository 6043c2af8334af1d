"""Time limits stand still while the servers sleep."""

from __future__ import annotations

import asyncio

import pytest

from agent_loop.llm.awake import AwakeTime
from streamrl.rollout.sim.virtual_clock import run_virtual


async def ended(awake: AwakeTime, seconds: float) -> float:
    """How long it took a limit to expire."""
    clock = asyncio.get_running_loop().time
    began = clock()
    limit = awake.limit(seconds)
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.sleep(10_000)
    assert limit.expired()
    return clock() - began


def test_a_limit_without_sleep_is_a_timeout() -> None:
    assert run_virtual(ended(AwakeTime(), 10.0)) == pytest.approx(10.0)


def test_time_asleep_does_not_count_however_often_it_is_told() -> None:
    async def main() -> None:
        awake = AwakeTime()
        early = asyncio.ensure_future(ended(awake, 10.0))
        await asyncio.sleep(4.0)
        awake.tell(True)
        within = asyncio.ensure_future(ended(awake, 10.0))
        await asyncio.sleep(100.0)
        awake.tell(True)
        await asyncio.sleep(100.0)
        awake.tell(False)
        awake.tell(False)
        late = asyncio.ensure_future(ended(awake, 10.0))
        assert [await early, await within, await late] == pytest.approx([210.0, 210.0, 10.0])

    run_virtual(main())


def test_its_clock_counts_the_seconds_awake_alone() -> None:
    async def main() -> None:
        awake = AwakeTime()
        began = awake.now()
        for asleep, seconds in ((False, 3.0), (True, 100.0), (True, 50.0), (False, 4.0), (True, 7.0)):
            awake.tell(asleep)
            await asyncio.sleep(seconds)
        assert awake.now() - began == pytest.approx(7.0)

    run_virtual(main())


def test_what_ends_in_time_asleep_is_not_late_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        awake = AwakeTime()
        awake.tell(True)
        async with awake.limit(1.0) as limit:
            await asyncio.sleep(50.0)
        assert not limit.expired()
        awake.tell(False)
        await asyncio.sleep(5.0)
        with pytest.raises(KeyError):
            async with awake.limit(1.0):
                raise KeyError

    run_virtual(main())


def test_a_limit_that_has_expired_is_not_moved_by_a_sleep_that_comes_before_its_end() -> None:
    async def main() -> None:
        awake = AwakeTime()

        async def slow_to_leave() -> None:
            async with awake.limit(1.0):
                try:
                    await asyncio.sleep(10.0)
                finally:
                    await asyncio.sleep(1.0)

        leaving = asyncio.ensure_future(slow_to_leave())
        await asyncio.sleep(1.5)
        awake.tell(True)
        awake.tell(False)
        with pytest.raises(TimeoutError):
            await leaving

    run_virtual(main())
