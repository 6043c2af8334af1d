"""Servers as Ray actors: killed mid-request, they are ServerDied, and then served again with the latest weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_loop.llm.client import RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import ContextOverflow, SamplingParams, Scores, ServerDied
from streamrl.monitor.events import read_events
from streamrl.rollout.fleet import Fleet
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.replica import RayServerHandle, start_ray_servers
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.weight_sync import WeightInfo, WeightStore

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
ROOT = str(Path(__file__).parents[2])
LONG = SamplingParams(max_tokens=450)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    yield
    ray.shutdown()


@dataclass
class Served:
    """One server for all tests here; each of them publishes higher versions than the last."""

    server: RayServerHandle
    store: WeightStore
    run_dir: Path
    make_model: Any

    def publish(self, *, broken: bool = False) -> WeightInfo:
        import torch

        newest = self.store.latest()
        version = newest.version + 1 if newest else 1
        state = dict(self.make_model("qwen2", version).named_parameters())
        return self.store.write(
            {k: torch.full_like(v, torch.nan) for k, v in state.items()} if broken else state, version
        )


@pytest.fixture(scope="module")
def served(
    cluster: None, model_dirs: dict[str, str], make_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    run_dir = tmp_path_factory.mktemp("run")
    weights, events = str(run_dir / "weights"), str(run_dir / "events")
    config = RolloutServerConfig("torch", model_dirs["qwen2"], weights, max_model_len=512, events_dir=events)
    server = asyncio.run(start_ray_servers({"server-0": config}))["server-0"]
    yield Served(server, WeightStore(weights), run_dir, make_model)
    asyncio.run(server.close())


async def until_served(server: RayServerHandle, seconds: float = 60.0) -> int:
    """The weight version once the server answers again; as the router does it, by health checks with pauses."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return (await server.load()).weight_version
            except ServerDied:
                await asyncio.sleep(0.1)


async def test_a_killed_server_is_dead_for_its_requests_and_comes_back_with_the_latest_weights(served: Served) -> None:
    server, manager = served.server, LLMServerManager({"server-0": served.server})
    got = await server.generate("first", [1, 2], SamplingParams(max_tokens=5))
    assert got.weight_versions == [0] * 5
    with pytest.raises(ContextOverflow):
        await server.generate("long", [1] * 500, SamplingParams(max_tokens=100))
    assert (await manager.update_weights(served.publish())).acknowledged == ("server-0",)

    pid = await server.pid()
    open_calls = [asyncio.ensure_future(server.generate(f"r{i}", [1, 2], LONG)) for i in range(8)]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*open_calls, return_exceptions=True), 30)
    assert all(isinstance(result, ServerDied) for result in results), results
    await manager.update_weights(served.publish(), deadline=30)

    assert await until_served(server) == 2
    assert await server.pid() != pid
    got = await server.generate("again", [1, 2], SamplingParams(max_tokens=5))
    assert got.weight_versions == [2] * 5
    states = [event.value for event in read_events(served.run_dir) if event.name == "server"]
    assert states == ["started", "started"]


async def test_more_calls_than_a_large_server_has_slots_hold_up_no_health_check(cluster: None) -> None:
    config = RolloutServerConfig("sim", max_num_seqs=1000, sim={"token_seconds": 30.0})
    server = (await start_ray_servers({"server-0": config}))["server-0"]
    asking = [asyncio.ensure_future(server.generate(f"r{i}", [1], SamplingParams(max_tokens=9))) for i in range(1250)]
    async with asyncio.timeout(30):
        while (load := await server.load()).running + load.waiting < len(asking):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert await server.abort() == len(asking)
    await asyncio.gather(*asking)
    await server.close()


async def test_a_version_nobody_announced_is_caught_up_by_the_health_check(served: Served) -> None:
    info = served.publish()
    assert (await served.server.load()).weight_version == info.version


async def test_a_cancelled_call_frees_its_slot_in_the_actor(served: Served) -> None:
    call = asyncio.ensure_future(served.server.generate("r", [1, 2], LONG))
    await asyncio.sleep(0.05)
    call.cancel()
    async with asyncio.timeout(20):
        while (await served.server.load()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_tokens_are_scored_in_the_actor_and_a_killed_one_is_dead_for_them(served: Served) -> None:
    server = served.server
    got = await server.generate("sampled", [1, 2], SamplingParams(max_tokens=9))
    scores = await server.score([1, 2], got.token_ids)
    assert scores.log_probs == pytest.approx(got.log_probs, abs=1e-4)
    with pytest.raises(ContextOverflow):
        await server.score([1] * 500, [2] * 100)
    asked = [asyncio.ensure_future(server.score([1] * 100, [2] * 400)) for _ in range(60)]
    await asyncio.sleep(0.02)
    os.kill(await server.pid(), signal.SIGKILL)
    found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
    assert {type(result) for result in found} <= {ServerDied, Scores}
    assert ServerDied in {type(result) for result in found}
    await until_served(server)


async def test_an_engine_that_died_takes_its_process_with_it_and_is_started_again(served: Served) -> None:
    server, info, pid = served.server, served.publish(broken=True), await served.server.pid()
    await server.update_weights(info.path, info.version)
    whole = served.publish()
    with pytest.raises(ServerDied, match="NaN"):
        await server.generate("r", [1], SamplingParams(max_tokens=3))
    await asyncio.sleep(0.5)
    assert await until_served(server) == whole.version
    assert await server.pid() != pid


async def test_a_server_that_cannot_start_says_why(cluster: None) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        await start_ray_servers({"s": RolloutServerConfig("torch", "/nowhere")})


async def test_a_pinned_server_does_not_look_for_newer_weights(served: Served) -> None:
    server = served.server
    before = (await server.load()).weight_version
    await server.keep_weights(True)
    newest = served.publish()
    assert (await server.load()).weight_version == before
    await server.keep_weights(False)
    assert (await server.load()).weight_version == newest.version


async def test_a_server_that_is_killed_asleep_comes_back_asleep_and_its_requests_end_after_it_wakes_up(
    served: Served,
) -> None:
    class Worker:
        async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
            return client.hear(news)

    server: RayServerHandle = served.server
    client, manager = RoutedClient({"server-0": server}), LLMServerManager({"server-0": server})
    beating = asyncio.ensure_future(Fleet(manager, lambda: {"agent-0": Worker()}).run())
    running = asyncio.ensure_future(client.generate([1, 2, 3], LONG, session="s"))
    try:
        while not (await server.load()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await manager.sleep()
        os.kill(pid := await server.pid(), signal.SIGKILL)
        late = asyncio.ensure_future(client.generate([4, 5], SamplingParams(max_tokens=3), session="late"))
        async with asyncio.timeout(90):
            await until_served(server)
            while not (await server.load()).asleep:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await server.pid() != pid
        await asyncio.sleep(2)
        assert not running.done()
        assert not late.done()
        await manager.wake_up()
        async with asyncio.timeout(60):
            assert (await running).stop_reason == "length"
            assert len((await late).token_ids) == 3
        assert len(running.result().token_ids) == LONG.max_tokens
    finally:
        beating.cancel()
        await client.close()
