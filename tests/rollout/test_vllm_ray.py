"""vLLM in a Ray actor: swapped, aborted and killed, with no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent_loop.llm.protocol import ContextOverflow, SamplingParams, ServerDied
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.replica import RayServerHandle, start_ray_servers
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.weight_sync import WeightStore
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.shared_memory import read_weights
from tests.rollout.conftest import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]
ROOT = str(Path(__file__).parents[2])
LONG = SamplingParams(max_tokens=450)


@pytest.fixture
def cluster() -> Iterator[None]:
    import ray

    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    yield
    ray.shutdown()


def engine_of(pid: int) -> psutil.Process:
    """The engine's process below the server's."""
    [engine] = [child for child in psutil.Process(pid).children() if "EngineCore" in child.name()]
    return engine


async def until_served(server: RayServerHandle, seconds: float = 150.0) -> int:
    async with asyncio.timeout(seconds):
        while True:
            try:
                return (await server.load()).weight_version
            except ServerDied:
                await asyncio.sleep(0.2)


async def open_calls_that_die(server: RayServerHandle, victim: int) -> None:
    calls = [asyncio.ensure_future(server.generate(f"r{i}", [1, 2], LONG)) for i in range(8)]
    await asyncio.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert all(isinstance(result, ServerDied) for result in results), results


async def test_a_server_under_ray_is_swapped_and_comes_back_from_every_death_with_the_latest_weights(
    cluster: None, model_dirs: dict[str, str], tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    options = {"engine_kwargs": {"kv_cache_memory_bytes": 64 << 20}}
    config = RolloutServerConfig(
        "vllm", model_dirs["wide"], str(store.directory), max_num_seqs=4, max_model_len=512, vllm=options
    )
    server = (await start_ray_servers({"server-0": config}))["server-0"]
    manager = LLMServerManager({"server-0": server})
    got = await server.generate("first", [1, 2], SamplingParams(max_tokens=5))
    assert got.weight_versions == [0] * 5
    with pytest.raises(ContextOverflow):
        await server.generate("long", [1] * 500, SamplingParams(max_tokens=100))

    running = asyncio.ensure_future(server.generate("running", [1, 2], LONG))
    while not await server.progress({"running": 0}):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    info = store.write(tiny_model("wide", 1).state_dict(), 1)
    assert (await manager.update_weights(info)).acknowledged == ("server-0",)
    assert await server.weights_checksum() == weights_digest(read_weights(info.path).items())
    assert set((await running).weight_versions) == {0, 1}

    aborted = asyncio.ensure_future(server.generate("aborted", [1, 2], LONG))
    cancelled = asyncio.ensure_future(server.generate("cancelled", [1, 2], LONG))
    while len(await server.progress({"aborted": 0, "cancelled": 0})) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    cancelled.cancel()
    assert await server.abort(["aborted"]) == 1
    assert 0 < len((await aborted).token_ids) < 450
    async with asyncio.timeout(20):
        while (await server.load()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    first = await server.pid()
    engine = engine_of(first)
    await open_calls_that_die(server, engine.pid)
    store.write(tiny_model("wide", 2).state_dict(), 2)
    assert await until_served(server) == 2
    second = await server.pid()
    assert second != first

    engine = engine_of(second)
    await open_calls_that_die(server, second)
    assert not psutil.wait_procs([engine], timeout=10)[1], "the engine outlived its server"
    assert await until_served(server) == 2
    got = await server.generate("again", [1, 2], SamplingParams(max_tokens=5))
    assert got.weight_versions == [2] * 5

    last = engine_of(await server.pid())
    await server.close()
    assert not psutil.wait_procs([last], timeout=10)[1]
