"""An event loop on a thread of its own, for servers whose methods may be called from any other loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs until `end`; then nothing can be given to it any more."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """From another thread, and wait. Raises TimeoutError after `seconds`."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """From another event loop; cancelling here cancels there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def end(self) -> None:
        """Cancel what is left on it, then end the thread. Ending twice is fine."""
        if self.loop.is_closed():
            return
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_all() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
