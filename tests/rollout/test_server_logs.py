"""How long a server may take, and where it writes what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.llm.protocol import ServerDied
from streamrl.config import load_config
from streamrl.rollout.replica import RayServerHandle, start_ray_servers
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.vllm.calls import exits
from streamrl.runtime import settings
from streamrl.runtime.run_dir import RunDirectory

ROOT = str(Path(__file__).parents[2])
ROLLOUT = "actor_rollout_ref.rollout"
PRINTING = """
from streamrl.rollout.sim.server import SimConfig, SimServer

def build(config, events):
    print("hello from my server")
    return SimServer(SimConfig.of(config.sim), max_num_seqs=4, max_model_len=64, server=config.server, events=events)
"""


class Silent:
    """An actor that never answers, and how often it was asked."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())


async def test_a_server_that_does_not_start_in_its_time_names_the_key_and_its_log() -> None:
    config = RolloutServerConfig(log_dir="runs/latest/logs", start_timeout=0.01)
    with pytest.raises(ServerDied, match=r"within 0 s \(.*rollout.start_timeout\); see runs/latest/logs/server-3.log"):
        await RayServerHandle(Silent(), "server-3", config).started()


async def test_a_version_may_take_longer_than_the_start_where_the_configuration_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.rollout.replica.UPDATE_MARGIN", 0.0)
    handle = RayServerHandle(Silent(), "server-0", RolloutServerConfig(start_timeout=0.01, update_timeout=0.2))
    for call in (handle.prepare_weights, handle.commit_weights, handle.update_weights):
        with pytest.raises(TimeoutError):  # of the caller, who is the first to give up
            async with asyncio.timeout(0.1):
                await call("weights", 1)


def test_the_keys_of_start_and_update_reach_every_server(tmp_path: Path) -> None:
    keys = [f"{ROLLOUT}.start_timeout=900", f"{ROLLOUT}.weight_sync.timeout=600", "trainer.start_timeout=700"]
    config, run = load_config(["experiment=calculator", *keys]).config, RunDirectory(tmp_path, resumed=False)
    served = settings.rollout_server(config, run, 1)
    assert (served.start_timeout, served.update_timeout) == (900, 600)
    assert 800 < served.sglang["start_seconds"] < 900
    assert served.log_dir == str(tmp_path / "logs")
    assert config.trainer.start_timeout == 700


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    yield
    ray.shutdown()


@pytest.mark.slow
async def test_what_a_server_of_ones_own_prints_is_in_the_log_of_the_run(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "my_server.py").write_text(PRINTING)
    config = RolloutServerConfig(f"{tmp_path}/my_server.py:build", log_dir=str(tmp_path / "logs"))
    server = (await start_ray_servers({"server-0": config}))["server-0"]
    await server.load()
    await server.close()
    assert "hello from my server" in (tmp_path / "logs" / "server-0.log").read_text()


def test_an_engine_that_was_killed_is_told_by_its_signal() -> None:
    processes = [SimpleNamespace(exitcode=code) for code in (None, 0, -9)]
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=processes)))
    assert exits(SimpleNamespace(engine_core=core)) == " (killed by SIGKILL)"
    assert exits(object()) == "", "another vLLM may keep them elsewhere"
