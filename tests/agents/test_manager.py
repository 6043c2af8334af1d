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
from streamrl.rollout.virtual_clock import run_virtual
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


def test_a_spawner_that_fails_is_the_managers_error() -> None:
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
