"""Two FSDP ranks and two torch servers, each a process: every way moves the same bits, and a death nothing half."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.manager import LLMServerManager, SyncPolicy
from streamrl.rollout.replica import RayServerHandle, start_ray_servers
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.single_controller import ClassWithInitArgs, Dispatch, ResourcePool, WorkerGroup, register
from streamrl.weight_sync import WeightInfo, WeightStore
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.weight_sync.ranks import GroupRanks
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import MemoryStore, make_model, settings

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
BACKENDS = ("shm", "disk", "delta", "collective")


class Ranks(ActorWorker):
    """Publishes by a way that the test chooses."""

    def __init__(self, rank: Any, model: str) -> None:
        super().__init__(rank, settings(model), MemoryStore({}))

    @register(Dispatch.RANK_ZERO)
    def publish_by(self, backend: Any, version: int, directory: str) -> WeightInfo | None:
        from streamrl.weight_sync.publisher import publisher

        chosen = SyncSettings(backend=backend, staged=True, bucket_bytes=20_000)
        if self._publishers.keys() != {directory}:
            ranks = GroupRanks(self.rank.rank, self.engine.world_size)
            self._publishers = {directory: publisher(chosen, directory, ranks, self.rank.rendezvous)}
        return self._publishers[directory].publish(self.engine.shares(), version)

    @register(Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        """Some numbers of every parameter change, on every rank others."""
        import torch

        with torch.no_grad():
            for share in self.engine.shares():
                share.local[:: 7 + self.rank.rank].add_(0.01)

    @register(Dispatch.RANK_ZERO)
    def digest(self) -> str:
        return weights_digest(self.engine.full_state())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("sync") / "model")


@pytest.fixture(scope="module")
def ranks(model: str) -> Iterator[WorkerGroup]:
    import ray

    from streamrl.single_controller import RayWorkerGroup

    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    if not ray.is_initialized():
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": root})
    group = RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Ranks, model), timeout=60)
    group.init_model()
    yield group
    group.shutdown()
    ray.shutdown()


async def started(model: str, weights: Path, names: tuple[str, ...], backend: str = "") -> dict[str, RayServerHandle]:
    config = RolloutServerConfig(
        "torch", model, str(weights), backend == "collective", max_num_seqs=4, max_model_len=64
    )
    return await start_ray_servers(dict.fromkeys(names, config))


async def test_every_way_moves_the_same_bits(model: str, ranks: WorkerGroup, tmp_path: Path) -> None:
    servers = await started(model, tmp_path / "shm", ("a", "b"))
    manager = LLMServerManager(servers, SyncPolicy(deadline=60.0))
    manager.broadcast_by(ranks.send_weights)
    version = 0
    for backend in BACKENDS:
        for _ in range(2):
            version += 1
            await ranks.train()
            report = await manager.update_weights(await ranks.publish_by(backend, version, str(tmp_path / backend)))
            assert report.acknowledged == ("a", "b"), (backend, report.missing)
            assert {await server.weights_checksum() for server in servers.values()} == {await ranks.digest()}, backend
    got = await servers["b"].generate("r", [1, 2], SamplingParams(max_tokens=3))
    assert got.weight_versions == [version] * 3
    assert any(path.suffix == ".delta" for path in (tmp_path / "delta").iterdir())
    await manager.close()


@pytest.mark.parametrize("backend", ["shm", "collective"])
async def test_a_server_killed_during_a_sync_leaves_the_others_whole_and_comes_back_with_the_current_weights(
    model: str, ranks: WorkerGroup, tmp_path: Path, backend: str
) -> None:
    weights = tmp_path / "w"
    servers = await started(model, weights, ("a", "b"), backend)
    manager = LLMServerManager(servers, SyncPolicy(deadline=40.0))
    manager.broadcast_by(ranks.send_weights)
    await manager.update_weights(await ranks.publish_by(backend, 1, str(weights)))
    await ranks.train()
    info = await ranks.publish_by(backend, 2, str(weights))
    pid = await servers["b"].pid()
    os.kill(pid, signal.SIGSTOP)  # it takes part, and says nothing
    syncing = asyncio.ensure_future(manager.update_weights(info))
    await asyncio.sleep(1.0)
    assert not syncing.done()
    assert backend == "collective" or WeightStore(weights).latest().version == 1  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    report = await syncing
    assert report.acknowledged == ("a",)
    assert set(report.missing) == {"b"}
    assert await servers["a"].weights_checksum() == await ranks.digest()
    async with asyncio.timeout(60):
        while True:  # the fleet's beat, and an impatient client
            with suppress(ConnectionError):
                got = await servers["b"].generate("r", [1], SamplingParams(max_tokens=1))
                assert backend != "collective" or got.weight_versions == [2]
            try:
                if (await manager.load_of("b")).weight_version == 2:
                    break
            except ConnectionError:
                await asyncio.sleep(0.5)
    assert await servers["b"].weights_checksum() == await ranks.digest()
    await manager.close()
