"""An event loop in a thread of its own, for what must go on whoever calls: supervision of processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one loop in a daemon thread, until `close`. The thread lives as long as the loop: processes
    that are started in it end with it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # a Ctrl-C while it waits for the thread, which nobody could end then
            self.loop.call_soon_threadsafe(self.loop.stop)
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, waited for by the calling thread."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError(f"the loop thread {self._thread.name!r} was closed")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt of the caller ends the work too
            raise

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            _cancel_all(self.loop)
        finally:
            self.loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
