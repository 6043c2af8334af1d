"""The same protocol in this process, with one rank: for `runtime=local`, debuggers, tests and virtual clocks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from streamrl.single_controller.ranks import Ranks, Result, by_role, classes_of
from streamrl.single_controller.worker import ClassWithInitArgs, RankInfo, loaded
from streamrl.single_controller.worker_group import WorkerGroup


class LocalWorkerGroup(WorkerGroup):
    """World size 1. Methods run one after the other in a thread of the group, so that the caller's loop stays free.

    `inline=True`: in the caller's thread, at the call; then methods may be coroutines and run in the caller's loop (and
    on its clock), and the deadline holds for those only.
    """

    def __init__(
        self, worker: ClassWithInitArgs | Mapping[str, ClassWithInitArgs], *, device: str = "cpu",
        inline: bool = False, timeout: float = 600.0,
    ) -> None:  # fmt: skip
        super().__init__(LocalRank(by_role(worker), device, inline=inline, timeout=timeout))


class LocalRank(Ranks):
    """Rank 0 of 1: the workers themselves."""

    def __init__(self, workers: dict[str, ClassWithInitArgs], device: str, *, inline: bool, timeout: float) -> None:
        super().__init__(classes_of(workers), 1, timeout=timeout)
        info = RankInfo(device=device, timeout=timeout)  # type: ignore[arg-type]
        self._workers = {role: worker.construct(info) for role, worker in workers.items()}
        self._thread = None if inline else InOrder("LocalRank")
        self._beside = None if inline else InOrder("LocalRank beside")

    def submit(
        self, rank: int, role: str, method: str, args: tuple, kwargs: dict[str, Any], *, beside: bool = False
    ) -> Result:
        function = getattr(self._workers[role], method)
        if thread := self._beside if beside else self._thread:
            return thread.submit(lambda: function(*loaded(args), **kwargs))
        if inspect.iscoroutinefunction(function):
            return asyncio.ensure_future(function(*loaded(args), **kwargs))
        done: concurrent.futures.Future = concurrent.futures.Future()
        try:
            done.set_result(function(*loaded(args), **kwargs))
        except Exception as error:  # noqa: BLE001 - the rank's failure channel, as in any other group
            done.set_exception(error)
        return done

    async def watch(self) -> NoReturn:
        """This process does not outlive itself: waits until cancelled."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def end(self) -> None:
        for thread in filter(None, (self._thread, self._beside)):
            thread.stop()


class InOrder:
    """One thread that calls what it is given. A call that never returns does not keep the process from ending, as a
    ThreadPoolExecutor's would: whoever waited for it has been told at its deadline."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        done: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((done, function))
        return done

    def last(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """The last call: the thread ends with it."""
        done = self.submit(function)
        self.stop()
        return done

    def stop(self) -> None:
        """After the calls under way."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            done, function = call
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the rank's failure channel, as in any other group
                done.set_exception(error)
