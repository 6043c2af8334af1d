"""Workers that die are replaced, and no group is lost or doubled by it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from msgspec.structs import replace

from agent_loop.loop import AGENT_LOOPS, AgentContext
from agent_loop.manager import MAX_RESTARTS_PER_MINUTE, AgentLoopManager, TaskSpawner, TaskWorker, WorkersKeepDying
from agent_loop.trajectory import Trajectory
from agent_loop.worker import AgentLoopWorker
from streamrl.monitor.summary import Groups
from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.farm import TASKS, Farm, farm


def spawner(f: Farm, **changes: Any) -> TaskSpawner:
    async def make(name: str) -> AgentLoopWorker:
        return f.worker(name, **changes)

    return TaskSpawner(make)


def kill(manager: AgentLoopManager, name: str) -> None:
    worker = manager.workers[name]
    assert isinstance(worker, TaskWorker)
    worker.kill()


def test_a_worker_that_dies_is_replaced_under_a_new_name() -> None:
    async def main() -> None:
        restarts: list[tuple[str, str]] = []
        async with farm("= 391", seconds=10.0) as f:
            manager = AgentLoopManager(spawner(f), f.trainer, 2, on_restart=lambda *args: restarts.append(args))
            f.tasks.create_task(manager.run())
            await manager.started.wait()
            assert manager.pids == {"agent-0": None, "agent-1": None}
            await f.admit(["u"])
            await asyncio.sleep(1)
            kill(manager, "agent-0")
            kill(manager, "agent-1")
            group = (await f.settled(1))["u"]
            assert group.state == "ready"
            assert sorted(manager.workers) == ["agent-0-1", "agent-1-1"]
            assert sorted(restarts) == [("agent-0", "cancelled"), ("agent-1", "cancelled")]

    run_virtual(main())


def test_a_group_that_kills_its_worker_every_time_ends_dead_and_the_others_go_on() -> None:
    managers: list[AgentLoopManager] = []

    @AGENT_LOOPS.register("test_killer")
    class Killer:
        async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
            for name in managers[0].workers:
                kill(managers[0], name)
            await ctx.sleep(1e9)
            raise AssertionError("it was to die")

    async def main() -> None:
        async with farm("= 391", seconds=10.0) as f:
            await f.admit(["bad"], agent_name="test_killer")
            await f.admit(["good", "fine"], agent_name="single_turn_agent")
            managers.append(AgentLoopManager(spawner(f), f.trainer, 1))
            f.tasks.create_task(managers[0].run())
            groups = await f.settled(3)
            states = {uid: group.state for uid, group in groups.items()}
            assert states == {"bad": "dead", "good": "ready", "fine": "ready"}
            assert groups["bad"].reason == "its holder 'agent-0-4' died (delivered 3 times)"
            assert managers[0].restarts == 5 < MAX_RESTARTS_PER_MINUTE
            assert Groups.of(await f.trainer.stats()).dead_reasons == {"bad": groups["bad"].reason}

    run_virtual(main())


def test_workers_that_keep_dying_end_the_run_with_the_reason() -> None:
    async def main() -> None:
        async with farm() as f:
            manager = AgentLoopManager(spawner(f), f.trainer, 2, max_restarts_per_minute=3)
            run = asyncio.ensure_future(manager.run())
            while not run.done():
                await asyncio.sleep(1)
                for name in list(manager.workers)[:1]:
                    kill(manager, name)
            with pytest.raises(ExceptionGroup) as caught:
                await run
            (error,) = caught.value.exceptions
            assert isinstance(error, WorkersKeepDying)
            assert "4 agent workers died within a minute" in str(error)
            assert manager.workers == {}

    run_virtual(main())


def test_cancelling_the_manager_leaves_no_worker_and_no_lease() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=10.0) as f:
            manager = AgentLoopManager(spawner(f), f.trainer, 2)
            run = asyncio.ensure_future(manager.run())
            await f.admit([f"u{i}" for i in range(4)])
            await asyncio.sleep(5)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert await f.held() == 0
            assert f.server.running == 0

    run_virtual(main())


class Failing:
    """A spawner whose starts fail as `failures` say, in turn; None is one that does not answer. Then it works."""

    def __init__(self, inner: TaskSpawner, *failures: Exception | None, seconds: float = 0.0) -> None:
        self.failures, self._inner, self._seconds = list(failures), inner, seconds

    async def spawn(self, name: str) -> TaskWorker:
        if not self.failures:
            return await self._inner.spawn(name)
        failure = self.failures.pop(0)
        await asyncio.sleep(1e9 if failure is None else self._seconds)
        assert failure
        raise failure


def test_a_worker_that_dies_while_it_is_started_is_replaced_like_any_other() -> None:
    async def main() -> None:
        restarts: list[tuple[str, str]] = []
        async with farm("= 391") as f:
            failing = Failing(spawner(f), RuntimeError("The actor is dead.\nIts log: …"), TimeoutError("mine"), None)
            manager = AgentLoopManager(
                failing, f.trainer, 1, spawn_timeout=5.0, on_restart=lambda *args: restarts.append(args)
            )
            f.tasks.create_task(manager.run())
            await f.admit(["u"])
            assert (await f.settled(1))["u"].state == "ready"
            assert sorted(manager.workers) == ["agent-0-3"]
            assert [(name, reason.partition(" (/")[0]) for name, reason in restarts] == [
                ("agent-0", "it could not be started: RuntimeError: The actor is dead."),
                ("agent-0-1", "it could not be started: TimeoutError: mine"),
                ("agent-0-2", "it could not be started: TimeoutError: no answer within 5 s; see its log"),
            ]
            assert manager.restarts == 3

    run_virtual(main())


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "7 agent workers died"), (50.0, "7 starts of agent workers")])
def test_starts_that_keep_failing_end_the_run_with_the_reason(seconds: float, told: str) -> None:
    async def main() -> None:
        async with farm() as f:
            failing = Failing(spawner(f), *[OSError("no room")] * 100, seconds=seconds)
            with pytest.raises(ExceptionGroup) as caught:
                await AgentLoopManager(failing, f.trainer, 2).run()
            error = caught.value.exceptions[0]
            assert isinstance(error, WorkersKeepDying)
            assert told in str(error)
            assert f"it could not be started: OSError: no room ({__file__}:" in str(error), "where it was raised"

    run_virtual(main())


def test_cancelling_the_manager_cancels_a_start() -> None:
    async def main() -> None:
        async with farm() as f:
            manager = AgentLoopManager(Failing(spawner(f), None), f.trainer, 1)
            run = asyncio.ensure_future(manager.run())
            await asyncio.sleep(1)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert manager.restarts == 0

    run_virtual(main())


def test_a_name_that_no_worker_can_have_is_in_the_managers_error() -> None:
    async def main() -> None:
        async with farm() as f:
            manager = AgentLoopManager(spawner(f, default_agent_loop="tool_agnt"), f.trainer, 2)
            with pytest.raises(ExceptionGroup) as caught:
                await manager.run()
            assert "did you mean 'tool_agent'" in str(caught.value.exceptions[0])

    run_virtual(main())


@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_finished_once_however_workers_and_servers_die(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with farm(seconds=2.0) as f:
            # So many die here that a group may be alone with a dying worker three times by chance.
            generate, train = TASKS
            await f.trainer.open_partition("train", tasks=[replace(generate, max_deliver=100), train])
            manager = AgentLoopManager(spawner(f, max_sessions=6), f.trainer, 3, max_restarts_per_minute=1000)
            f.tasks.create_task(manager.run())
            uids = [f"u{i}" for i in range(30)]
            await f.admit(uids, n=4)

            async def chaos() -> None:
                while True:
                    await asyncio.sleep(rng.expovariate(1 / 3))
                    if rng.random() < 0.7 and manager.workers:
                        kill(manager, rng.choice(list(manager.workers)))
                    else:
                        f.server.dead = not f.server.dead

            trouble = asyncio.ensure_future(chaos())
            await asyncio.sleep(60)
            trouble.cancel()
            f.server.dead = False
            groups = await f.settled(len(uids))
            assert {uid for uid, group in groups.items() if group.state == "ready"} == set(uids)
            assert all(len({row.key for row in group.rows}) == len(group.rows) == 4 for group in groups.values())

    run_virtual(main())


def test_code_that_cannot_be_imported_ends_the_run_at_once() -> None:
    async def main() -> None:
        async with farm() as f:
            failing = Failing(spawner(f), *[ModuleNotFoundError("No module named 'gsm'")] * 100)
            manager = AgentLoopManager(failing, f.trainer, 1)
            with pytest.raises(ExceptionGroup) as caught:
                await manager.run()
            assert "agent-0 could not be started: ModuleNotFoundError: No module" in str(caught.value.exceptions[0])
            assert manager.restarts == 0

    run_virtual(main())


def test_reserved_servers_are_told_to_every_worker_also_to_those_that_start_later() -> None:
    told: list[tuple[str, list[str]]] = []

    class Told(TaskWorker):
        async def reserve(self, servers: list[str]) -> None:
            told.append((self.name, servers))
            if servers and self.name == "agent-1":
                raise ConnectionError("it does not answer")

    async def main() -> None:
        async with farm() as f:

            class Spawner:
                async def spawn(self, name: str) -> TaskWorker:
                    return Told(f.worker(name))

            manager = AgentLoopManager(Spawner(), f.trainer, 2)
            f.tasks.create_task(manager.run())
            await manager.started.wait()
            await manager.reserve(["llm-0"])
            kill(manager, "agent-0")
            await asyncio.sleep(1)
            assert sorted(told) == [("agent-0", ["llm-0"]), ("agent-0-1", ["llm-0"]), ("agent-1", ["llm-0"])]
            told.clear()
            await manager.reserve([])
            kill(manager, "agent-0-1")
            await asyncio.sleep(1)
            assert sorted(told) == [("agent-0-1", []), ("agent-1", [])]

    run_virtual(main())
