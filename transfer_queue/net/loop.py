"""An event loop in a thread of its own, for callers that have none (or another one)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one loop in a daemon thread, until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, waited for by the calling thread."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt of the caller ends the work too
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, awaited from any other loop."""
        return await asyncio.wrap_future(self.submit(work))

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError(f"the loop thread {self._thread.name!r} was closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

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
