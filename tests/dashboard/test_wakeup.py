"""Woken by the kernel, and not by a clock."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from streamrl.dashboard.wakeup import Wakeup


async def test_a_file_that_grows_or_comes_wakes(tmp_path: Path) -> None:
    with Wakeup() as wakeup:
        wakeup.watch(tmp_path)
        assert await wakeup.wait(5)  # of what came before the watch
        for data in (b"a", b"ab"):
            waiting = asyncio.create_task(wakeup.wait(10))
            await asyncio.sleep(0.02)
            began = time.monotonic()
            (tmp_path / "file").write_bytes(data)
            assert await waiting
            assert time.monotonic() - began < 5
            while await wakeup.wait(0.05):  # a write is several changes
                pass


async def test_a_wait_ends_with_its_time(tmp_path: Path) -> None:
    with Wakeup() as wakeup:
        wakeup.watch(tmp_path)
        await wakeup.wait(5)
        assert not await wakeup.wait(0.01)


async def test_a_directory_that_is_not_there_yet_is_watched_later(tmp_path: Path) -> None:
    with Wakeup() as wakeup:
        wakeup.watch(tmp_path / "events")
        assert not await wakeup.wait(0.01)
        (tmp_path / "events").mkdir()
        wakeup.watch(tmp_path / "events")
        assert await wakeup.wait(5)
