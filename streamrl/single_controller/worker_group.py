"""Calling many ranks as one: dispatch, deadline, collection.

A call is on its way as soon as it is made; `Call` waits for it.

    call = group.update_actor(batch)     # every rank has its share
    metrics = await call                 # or call.result() where no event loop runs

What ends a wait: all ranks answered; one rank raised (the others get `GRACE` seconds, since they may hang in a
collective with it, or be the ones that died); the deadline passed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from streamrl.single_controller.decorator import Dispatch, Execute, MethodSpec, registered_methods
from streamrl.single_controller.dispatch import split_batch
from streamrl.single_controller.errors import WorkerDied, WorkerFailed, WorkerGroupError, WorkerTimeout
from streamrl.single_controller.metrics import is_metrics, merge_metrics
from transfer_queue.metadata import KVBatchMeta

GRACE = 2.0
"""Seconds that the other ranks get after one has raised. When a rank is killed, its peers' collectives may break
before the death itself is reported; within this time it is, so that the error names the rank that died."""

Result = concurrent.futures.Future | asyncio.Future
"""What one rank will answer."""


class WorkerGroup:
    """Base: knows the worker class and its registered methods. Subclasses know where the ranks are.

    Invariants: calls reach each rank in the order in which they were made; after a rank died, or left a collective
    half done, every further call raises at once.
    """

    def __init__(self, worker_class: type, world_size: int, *, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.pids = [os.getpid()] * world_size
        self._methods = registered_methods(worker_class)
        self._class_name = worker_class.__name__
        self._broken: WorkerGroupError | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        spec = self.__dict__.get("_methods", {}).get(name)
        if spec is None:
            known = ", ".join(sorted(self.__dict__.get("_methods", {})))
            raise AttributeError(
                f"{name} is no @register'ed method of {self.__dict__.get('_class_name')}; there are: {known}"
            )

        def bound(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            call = self.call(spec, args, kwargs, timeout)
            return call.result() if spec.blocking and not _in_event_loop() else call

        return bound

    def call(self, spec: MethodSpec, args: tuple, kwargs: dict[str, Any], timeout: float | None = None) -> Call:
        """Send each rank its share. Raises at once if the group is broken."""
        if self._broken is not None:
            raise self._broken
        shares = self._shares(spec, args, kwargs)
        ranks = range(1 if spec.execute is Execute.RANK_ZERO else self.world_size)
        results = [self._submit(rank, spec.name, *shares[rank]) for rank in ranks]
        return Call(self, spec, results, self.timeout if timeout is None else timeout)

    async def watch(self) -> NoReturn:
        """Wait for the first death of a rank, also while no call runs; raises WorkerDied."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the ranks. Idempotent."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """`close` where no event loop runs."""
        asyncio.run(self.close())

    def _submit(self, rank: int, method: str, args: tuple, kwargs: dict[str, Any]) -> Result:
        raise NotImplementedError

    def _death(self, rank: int, method: str, error: BaseException) -> WorkerDied | None:
        """WorkerDied if `error` means that the process is gone."""
        return None

    def _shares(self, spec: MethodSpec, args: tuple, kwargs: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]]:
        if spec.dispatch is not Dispatch.DP_COMPUTE:
            return [(args, kwargs)] * self.world_size
        split = [_split(arg, self.world_size) for arg in args]
        split_kwargs = {name: _split(arg, self.world_size) for name, arg in kwargs.items()}
        return [
            (tuple(parts[rank] for parts in split), {name: parts[rank] for name, parts in split_kwargs.items()})
            for rank in range(self.world_size)
        ]


class Call:
    """A method under way on the ranks."""

    def __init__(self, group: WorkerGroup, spec: MethodSpec, results: list[Result], timeout: float) -> None:
        self._group, self._spec, self._results, self._timeout = group, spec, results, timeout

    def __await__(self) -> Generator[Any, None, Any]:
        return self._outcome().__await__()

    def result(self) -> Any:
        """Wait where no event loop runs."""
        if _in_event_loop():
            raise RuntimeError(f"{self._spec.name}: inside an event loop, await the call instead of calling .result()")
        return asyncio.run(self._outcome())

    async def _outcome(self) -> Any:
        waiting = {_settled(result): rank for rank, result in enumerate(self._results)}
        try:
            await self._wait(waiting)
        except asyncio.CancelledError:
            for result in self._results:
                if isinstance(result, asyncio.Future):  # runs in this loop and for this caller only
                    result.cancel()
            raise
        return self._collected([result.result() for result in self._results])

    async def _wait(self, waiting: dict[asyncio.Future, int]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                late = sorted(waiting.values())
                self._fail(WorkerTimeout(self._spec.name, late, [self._group.pids[r] for r in late], self._timeout))
            ranks = [waiting.pop(settled) for settled in done]
            failed = sorted(rank for rank in ranks if self._error(rank) is not None)
            if failed:
                if waiting:
                    _, missing = await asyncio.wait(waiting, timeout=GRACE)
                    ranks = [rank for settled, rank in waiting.items() if settled not in missing]
                    failed += sorted(rank for rank in ranks if self._error(rank) is not None)
                self._raise_failure(failed)

    def _raise_failure(self, failed: list[int]) -> NoReturn:
        """A death explains the other errors; else the rank that raised first does."""
        name, group = self._spec.name, self._group
        for rank in failed:
            error = self._error(rank)
            assert error is not None
            if death := group._death(rank, name, error):
                self._fail(death)
        rank = failed[0]
        error = self._error(rank)
        assert error is not None
        cause = getattr(error, "cause", None) or error
        failure = WorkerFailed(rank, group.pids[rank], name, f"{type(cause).__name__}: {cause}")
        failure.__cause__ = error
        if len(failed) < len(self._results):
            self._fail(failure)  # the others did not stop with it: the ranks are out of step
        raise failure

    def _fail(self, error: WorkerGroupError) -> NoReturn:
        self._group._broken = self._group._broken or error
        raise error

    def _error(self, rank: int) -> BaseException | None:
        """What the rank raised, if it is done."""
        result = self._results[rank]
        if not result.done():
            return None
        return asyncio.CancelledError() if result.cancelled() else result.exception()

    def _collected(self, results: list[Any]) -> Any:
        if self._spec.dispatch is Dispatch.RANK_ZERO or self._spec.execute is Execute.RANK_ZERO:
            return results[0]
        if self._spec.dispatch is Dispatch.DP_COMPUTE and all(is_metrics(result) for result in results):
            return merge_metrics(results)
        return results


def _split(value: Any, parts: int) -> list[Any]:
    return list(split_batch(value, parts)) if isinstance(value, KVBatchMeta) else [value] * parts


def _settled(result: Result) -> asyncio.Future:
    """A future of this loop that is done when `result` is; `result` itself is never cancelled through it."""
    loop = asyncio.get_running_loop()
    settled: asyncio.Future = loop.create_future()

    def settle() -> None:
        if not settled.done():
            settled.set_result(None)

    def from_any_thread(_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    result.add_done_callback(from_any_thread)
    return settled


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None
