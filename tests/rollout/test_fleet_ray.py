"""Servers as Ray actors under several clients: a killed one takes at most half a second of tokens with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_loop.llm.client import RoutedClient
from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.replica import start_ray_servers
from streamrl.rollout.server_config import RolloutServerConfig

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    yield
    ray.shutdown()


async def test_requests_of_a_killed_server_go_on_elsewhere_from_the_tokens_that_were_seen(cluster: None) -> None:
    sim = {"token_seconds": 0.02}
    config = RolloutServerConfig("sim", max_num_seqs=8, max_model_len=2048, sim=sim)
    servers = await start_ray_servers({"server-0": config, "server-1": config})
    client = RoutedClient(servers)
    try:
        sampling = SamplingParams(400, seed=1)
        calls = [asyncio.ensure_future(client.generate([1, 2], sampling, session=f"s{i}")) for i in range(4)]
        await asyncio.sleep(4.0)
        os.kill(await servers["server-0"].pid(), signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert all(len(got.token_ids) == 400 and got.token_ids == results[0].token_ids for got in results)
        assert all(got.log_probs == results[0].log_probs for got in results)
        made = (await servers["server-1"].load()).tokens_generated
        assert 800 < made < 1500, "two whole requests, and the rest of two others"
    finally:
        await client.close()
        await asyncio.gather(*(server.close() for server in servers.values()))
