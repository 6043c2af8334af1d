"""Calling many ranks as one: dispatch, deadline, collection.

A call is on its way as soon as it is made; `Call` waits for it.

    call = group.update_actor(batch)     # every rank has its share
    metrics = await call                 # or call.result() where no event loop runs

What ends a wait: all ranks answered; one died; one raised (the others get `GRACE` seconds, since they may hang in a
collective with it, or be the ones that died); the deadline passed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from agent_loop.user_code import told
from streamrl.single_controller.decorator import Dispatch, Execute, MeshDispatch, MethodSpec, registered_methods
from streamrl.single_controller.errors import WorkerDied, WorkerFailed, WorkerGroupError, WorkerTimeout
from streamrl.single_controller.mesh import Layout
from streamrl.single_controller.plan import Plan, make_plan
from streamrl.single_controller.ranks import ONLY, Ranks, Result

log = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds that the other ranks get after one has raised, unless it died. When a rank is killed, its peers' collectives
may break before the death itself is reported; within this time it is, so that the error names the rank that died."""

CLOSE_TIMEOUT = 10.0
"""Seconds that the workers of a role have for their `close`; then their processes are ended anyway. Behind a call that
is still under way, and which nobody waits for any more (an interrupted start loads a model), it is GRACE."""

PLACES = MethodSpec("mesh_places", Dispatch.ONE_TO_ALL, Execute.ALL, blocking=True)


class WorkerGroup:
    """The workers of one role, on all ranks: has the methods that their class registered.

    A group with several roles has none itself; `spawn()` gives one WorkerGroup per role. Views of the same processes:
    a death, a rank left in a collective, and `close` concern them all.
    """

    def __init__(self, ranks: Ranks, role: str = ONLY) -> None:
        self._ranks, self._role = ranks, role
        cls = ranks.classes.get(role)
        self._methods = registered_methods(cls) if cls else {}
        self._layouts: dict[str, Layout] = {}
        self._asking = threading.Lock()

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def pids(self) -> list[int]:
        """Of each rank's process."""
        return self._ranks.pids

    @property
    def failure(self) -> WorkerGroupError | None:
        """Why no call is made any more: the first death, found also while no call ran; or ranks left half-way."""
        return self._ranks.failure

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, WorkerGroup]:
        """One view per role; `prefix_set` narrows them (verl's name)."""
        wanted = list(self._ranks.classes if prefix_set is None else prefix_set)
        if unknown := [role for role in wanted if role not in self._ranks.classes or role == ONLY]:
            roles = ", ".join(filter(None, self._ranks.classes)) or "none: it was given one class, not a dict by role"
            raise ValueError(f"spawn: unknown roles {unknown}; this group's roles are {roles}")
        return {role: WorkerGroup(self._ranks, role) for role in wanted}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods, ranks = self.__dict__.get("_methods", {}), self.__dict__.get("_ranks")
        spec = methods.get(name)
        if spec is None:
            if ranks is not None and self._role not in ranks.classes:
                raise AttributeError(
                    f"{name}: this group holds the roles {', '.join(ranks.classes)}; call spawn()[role].{name}"
                )
            of = ranks.classes[self._role].__name__ if ranks is not None else None
            raise AttributeError(f"{name} is no @register'ed method of {of}; there are: {', '.join(sorted(methods))}")

        def bound(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            call = self.call(spec, args, kwargs, timeout)
            return call.result() if spec.blocking and not _in_event_loop() else call

        return bound

    def call(self, spec: MethodSpec, args: tuple, kwargs: dict[str, Any], timeout: float | None = None) -> Call:
        """Send each rank its share. Raises at once if the group is broken, or if the arguments cannot be split."""
        ranks = self._ranks
        if ranks.failure is not None:
            raise ranks.failure
        seconds = ranks.timeout if timeout is None else timeout
        plan = make_plan(spec, self._layout(spec, seconds), args, kwargs)
        results = [
            ranks.submit(rank, self._role, spec.name, *share, beside=spec.beside)
            for rank, share in enumerate(plan.shares)
        ]
        return Call(ranks, spec.name, plan, results, seconds)

    def _layout(self, spec: MethodSpec, timeout: float) -> Layout:
        """Of the method's mesh: asked for once, at the first call over it, after the calls that are under way.

        That one question blocks, also in an event loop, so that calls keep their order: await `init_model` first.
        """
        if not isinstance(spec.dispatch, MeshDispatch):
            return Layout.flat(self.world_size)
        mesh = spec.dispatch.mesh
        with self._asking:
            if mesh not in self._layouts:
                call = self.call(PLACES, (), {}, timeout)
                with ThreadPoolExecutor(1) as waiting:
                    self._layouts[mesh] = Layout.of(mesh, waiting.submit(call.result).result())
            return self._layouts[mesh]

    async def watch(self) -> NoReturn:
        """Wait for the first death of a rank, also while no call runs; raises WorkerDied."""
        await self._ranks.watch()

    async def close(self) -> None:
        """Close the workers of all roles, then end the ranks. Idempotent."""
        ranks = self._ranks
        if ranks.closing:
            return
        ranks.closing = True
        try:
            for role in ranks.classes:
                view = WorkerGroup(ranks, role)
                if ranks.failure is None and "close" in view._methods:
                    await view.call(view._methods["close"], (), {}, timeout=GRACE if ranks.busy else CLOSE_TIMEOUT)
        except WorkerGroupError as error:
            log.warning("closing: %s", error)
        finally:
            await ranks.end()
            ranks.failure = ranks.failure or WorkerGroupError("this worker group is closed; start another")

    def shutdown(self) -> None:
        """`close` where no event loop runs."""
        asyncio.run(self.close())


class Call:
    """A method under way on the ranks."""

    def __init__(self, ranks: Ranks, method: str, plan: Plan, results: list[Result], timeout: float) -> None:
        self._ranks, self._method, self._plan, self._results, self._timeout = ranks, method, plan, results, timeout

    def __await__(self) -> Generator[Any, None, Any]:
        return self._outcome().__await__()

    def result(self) -> Any:
        """Wait where no event loop runs."""
        if _in_event_loop():
            raise RuntimeError(f"{self._method}: inside an event loop, await the call instead of calling .result()")
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
        return self._plan.collect([result.result() for result in self._results])

    async def _wait(self, waiting: dict[asyncio.Future, int]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                late = sorted(waiting.values())
                self._fail(WorkerTimeout(self._method, late, [self._ranks.pids[r] for r in late], self._timeout))
            ranks = [waiting.pop(settled) for settled in done]
            failed = sorted(rank for rank in ranks if self._error(rank) is not None)
            if failed:
                if waiting and not any(self._death(rank) for rank in failed):
                    _, missing = await asyncio.wait(waiting, timeout=GRACE)
                    ranks = [rank for settled, rank in waiting.items() if settled not in missing]
                    failed += sorted(rank for rank in ranks if self._error(rank) is not None)
                self._raise_failure(failed)

    def _raise_failure(self, failed: list[int]) -> NoReturn:
        """A death explains the other errors; else the rank that raised first does."""
        name, ranks = self._method, self._ranks
        for rank in failed:
            if death := self._death(rank):
                self._fail(death)
        rank = failed[0]
        error = self._error(rank)
        assert error is not None
        cause = getattr(error, "cause", None) or error
        failure = WorkerFailed(rank, ranks.pids[rank], name, told(cause))
        failure.__cause__ = error
        if len(failed) < len(self._results):
            self._fail(failure)  # the others did not stop with it: the ranks are out of step
        raise failure

    def _fail(self, error: WorkerGroupError) -> NoReturn:
        self._ranks.failure = self._ranks.failure or error
        raise error

    def _death(self, rank: int) -> WorkerDied | None:
        error = self._error(rank)
        return None if error is None else self._ranks.death(rank, self._method, error)

    def _error(self, rank: int) -> BaseException | None:
        """What the rank raised, if it is done."""
        result = self._results[rank]
        if not result.done():
            return None
        return asyncio.CancelledError() if result.cancelled() else result.exception()


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
