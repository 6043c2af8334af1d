"""The same protocol in this process, with one rank: for `runtime=local`, debuggers, tests and virtual clocks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from typing import Any, NoReturn

from streamrl.single_controller.worker import ClassWithInitArgs, RankInfo
from streamrl.single_controller.worker_group import Result, WorkerGroup


class LocalWorkerGroup(WorkerGroup):
    """World size 1. Methods run one after the other in a thread of the group, so that the caller's loop stays free.

    `inline=True`: in the caller's thread, at the call; then methods may be coroutines and run in the caller's loop (and
    on its clock), and the deadline holds for those only.
    """

    def __init__(
        self, worker: ClassWithInitArgs, *, device: str = "cpu", inline: bool = False, timeout: float = 600.0
    ) -> None:
        super().__init__(_class_of(worker), 1, timeout=timeout)
        self._worker = worker.construct(RankInfo(device=device, timeout=timeout))  # type: ignore[arg-type]
        self._thread = None if inline else concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=self._class_name)
        self._closed = False

    async def watch(self) -> NoReturn:
        """This process does not outlive itself: waits until cancelled."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if "close" in self._methods:
            await self.call(self._methods["close"], (), {})
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _submit(self, rank: int, method: str, args: tuple, kwargs: dict[str, Any]) -> Result:
        function = getattr(self._worker, method)
        if self._thread is not None:
            return self._thread.submit(function, *args, **kwargs)
        if inspect.iscoroutinefunction(function):
            return asyncio.ensure_future(function(*args, **kwargs))
        done: concurrent.futures.Future = concurrent.futures.Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the rank's failure channel, as in any other group
            done.set_exception(error)
        return done


def _class_of(worker: ClassWithInitArgs) -> type:
    if not isinstance(worker.cls, type):
        raise TypeError(f"a worker group needs a class, not {worker.cls!r}")
    return worker.cls
