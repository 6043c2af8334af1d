"""Blocking functions of a user beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_loop import threads
from agent_loop.threads import MAX_IDLE, in_daemon_thread


async def test_calls_run_beside_each_other_and_threads_are_used_again() -> None:
    barrier = threading.Barrier(3)

    def meet() -> int:
        barrier.wait(10)
        return threading.get_ident()

    first = await asyncio.gather(*(in_daemon_thread(meet) for _ in range(3)))
    assert len(set(first)) == 3
    async with asyncio.timeout(30):  # a thread is free a moment after its answer
        while not set(await asyncio.gather(*(in_daemon_thread(meet) for _ in range(3)))) & set(first):
            pass


async def test_one_that_hangs_holds_up_nobody() -> None:
    release = threading.Event()
    hanging = asyncio.ensure_future(in_daemon_thread(release.wait))
    for i in range(MAX_IDLE + 2):
        assert await asyncio.wait_for(in_daemon_thread(lambda i=i: i), 10) == i
    assert not hanging.done()
    release.set()
    assert await hanging


async def test_calls_of_a_turn_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 30.0)
    assert len(set(await asyncio.gather(*(in_daemon_thread(threading.get_ident) for _ in range(20))))) == 1


async def test_calls_of_a_turn_go_on_elsewhere_behind_one_that_blocks() -> None:
    release = threading.Event()
    hanging, *others = (asyncio.ensure_future(in_daemon_thread(call)) for call in [release.wait, *[lambda: 1] * 5])
    assert await asyncio.wait_for(asyncio.gather(*others), 10) == [1] * 5
    assert not hanging.done()
    release.set()
    assert await hanging


async def test_errors_arrive_also_those_that_a_future_cannot_carry() -> None:
    def fails(error: BaseException) -> None:
        raise error

    with pytest.raises(ValueError, match="mine"):
        await in_daemon_thread(lambda: fails(ValueError("mine")))
    with pytest.raises(RuntimeError, match="reward raised SystemExit: 3"):
        await in_daemon_thread(lambda: fails(SystemExit(3)), "reward")
    assert await in_daemon_thread(lambda: 1) == 1


async def test_a_thread_has_the_name_of_what_it_runs() -> None:
    for name in ("reward 'a'", "reward 'b'"):
        assert await in_daemon_thread(lambda: threading.current_thread().name, name) == name
