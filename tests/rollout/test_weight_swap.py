"""A version and many servers: failures on demand, each of which leaves the old version served and published."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from agent_loop.llm.protocol import SamplingParams, ServerDied
from streamrl.rollout.building import build_server
from streamrl.rollout.manager import LLMServerManager, SyncPolicy
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.sim.server import SimConfig, SimServer, UpdateFailure
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.weight_sync import WeightInfo, WeightsDamaged, WeightsMismatch, WeightStore
from streamrl.weight_sync.collective import Sender
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.publisher import SyncSettings, publisher
from streamrl.weight_sync.ranks import OneRank
from streamrl.weight_sync.shares import shares_of

INFO = WeightInfo(5, "unused", 0)
Phase = Literal["prepare", "commit"]


async def versions(servers: dict[str, SimServer]) -> dict[str, int]:
    return {name: (await server.load()).weight_version for name, server in servers.items() if server._death is None}


@pytest.mark.parametrize("phase", ["prepare", "commit"])
@pytest.mark.parametrize("how", ["refuse", "hang", "die"])
def test_one_server_fails_and_the_others_take_the_version(how: UpdateFailure, phase: Phase) -> None:
    async def main() -> None:
        servers = {f"s{i}": SimServer() for i in range(3)}
        servers["s1"].fail_updates(how, phase)
        manager = LLMServerManager(servers, SyncPolicy(deadline=30.0))
        report = await manager.update_weights(INFO)
        assert report.acknowledged == ("s0", "s2")
        assert set(report.missing) == {"s1"}
        assert report.in_service
        assert await versions(servers) == {"s0": 5, "s2": 5} | ({} if how == "die" else {"s1": 0})

    run_virtual(main())


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_where_all_refuse_the_old_version_stays_everywhere_and_it_is_an_error(phase: Phase) -> None:
    async def main() -> None:
        servers = {f"s{i}": SimServer() for i in range(2)}
        for server in servers.values():
            server.fail_updates("refuse", phase)
        with pytest.raises(WeightsDamaged):
            await LLMServerManager(servers).update_weights(INFO)
        assert await versions(servers) == {"s0": 0, "s1": 0}

    run_virtual(main())


def test_where_all_hang_the_version_is_not_in_service(tmp_path: Path) -> None:
    async def main() -> None:
        server = SimServer()
        server.fail_updates("hang")
        report = await LLMServerManager({"s": server}, SyncPolicy(deadline=3.0)).update_weights(INFO)
        assert (report.in_service, report.acknowledged) == (False, ())
        assert report.seconds == pytest.approx(3.0)
        assert (await server.load()).weight_version == 0

    run_virtual(main())


def test_a_server_that_is_behind_serves_nobody_until_it_has_caught_up() -> None:
    async def main() -> None:
        servers = {"a": SimServer(), "b": SimServer()}
        servers["b"].fail_updates("refuse")
        manager = LLMServerManager(servers)
        await manager.update_weights(INFO)
        assert set(manager.behind) == {"b"}
        servers["b"].fail_updates(None)
        with pytest.raises(ServerDied, match="b serves version 0, not 5: the simulation refuses"):
            await manager.load_of("b")
        await asyncio.sleep(1.0)
        assert (await manager.load_of("b")).weight_version == 5
        assert not manager.behind

    run_virtual(main())


def test_rolling_stands_one_server_still_at_a_time() -> None:
    async def main(order: Literal["together", "rolling"]) -> float:
        servers = {f"s{i}": SimServer(SimConfig(update_seconds=2.0)) for i in range(3)}
        report = await LLMServerManager(servers, SyncPolicy(order=order)).update_weights(INFO)
        assert report.stages["pause"] == pytest.approx(2.0)
        return report.seconds

    assert run_virtual(main("together")) == pytest.approx(2.0)
    assert run_virtual(main("rolling")) == pytest.approx(6.0)


@pytest.mark.parametrize("requests", ["keep", "abort"])
def test_requests_in_flight_are_kept_or_end_with_their_tokens(requests: Literal["keep", "abort"]) -> None:
    async def main() -> None:
        server = SimServer(SimConfig(token_seconds=1.0))
        manager = LLMServerManager({"s": server}, SyncPolicy(requests=requests))
        running = asyncio.ensure_future(server.generate("r", [1], SamplingParams(max_tokens=10)))
        await asyncio.sleep(4.5)
        await manager.update_weights(INFO)
        got = await running
        if requests == "abort":
            assert (got.stop_reason, got.weight_versions) == ("aborted", [0] * 4)
        else:
            assert got.weight_versions == [0] * 4 + [5] * 6

    run_virtual(main())


@pytest.fixture
def two_servers(model_dirs: dict[str, str], tmp_path: Path) -> Any:
    weights = str(tmp_path / "w")
    return {
        name: build_server(RolloutServerConfig("torch", model_dirs["qwen2"], weights, max_model_len=64, server=name))
        for name in ("a", "b")
    }


class Rank:
    """One training rank whose parameters are those of a model of another seed."""

    def __init__(self, make_model: Any, directory: Path, backend: Any) -> None:
        self.model = make_model("qwen2", 1)
        settings = SyncSettings(backend=backend, staged=True, bucket_bytes=10_000)
        self.publisher = publisher(settings, str(directory), OneRank())

    def publish(self, version: int) -> WeightInfo:
        with torch.no_grad():
            self.model.get_parameter("model.norm.weight").add_(0.01)
        info = self.publisher.publish(shares_of(self.model.named_parameters(), 0, 1), version)
        assert info is not None
        return info

    def digest(self) -> str:
        return weights_digest(self.model.named_parameters())

    async def send(self, path: str) -> None:
        assert isinstance(self.publisher, Sender)
        await asyncio.to_thread(self.publisher.send, path)


@pytest.mark.parametrize("backend", ["shm", "disk", "delta", "collective"])
async def test_what_servers_serve_is_what_the_trainer_has(
    backend: str, two_servers: Any, make_model: Any, tmp_path: Path
) -> None:
    rank, manager = Rank(make_model, tmp_path / "w", backend), LLMServerManager(two_servers)
    manager.broadcast_by(rank.send)
    for version in (1, 2, 3):
        report = await manager.update_weights(rank.publish(version))
        assert report.acknowledged == ("a", "b")
        assert {await server.weights_checksum() for server in two_servers.values()} == {rank.digest()}
        assert {"apply", "commit", "pause"} <= report.stages.keys()
    got = await two_servers["a"].generate("r", [1], SamplingParams(max_tokens=2))
    assert got.weight_versions == [3, 3]
    latest = WeightStore(tmp_path / "w").latest() if backend != "collective" else None
    assert backend == "collective" or (latest is not None and latest.version == 3)
    await manager.close()


@pytest.mark.parametrize("backend", ["shm", "delta", "collective"])
async def test_who_joins_has_the_current_weights_before_its_first_request(
    backend: str, two_servers: Any, make_model: Any, tmp_path: Path
) -> None:
    rank, manager = Rank(make_model, tmp_path / "w", backend), LLMServerManager({"a": two_servers["a"]})
    manager.broadcast_by(rank.send)
    for version in (1, 2):
        await manager.update_weights(rank.publish(version))
    digest = rank.digest()
    with torch.no_grad():
        rank.model.get_parameter("model.norm.weight").zero_()  # training goes on
    await manager.add_server("b", two_servers["b"])
    assert await two_servers["b"].weights_checksum() == digest
    got = await two_servers["b"].generate("r", [1], SamplingParams(max_tokens=1))
    assert got.weight_versions == [2]
    await manager.close()


async def test_a_broadcast_to_a_dead_server_goes_on_without_it(
    two_servers: Any, make_model: Any, tmp_path: Path
) -> None:
    rank, manager = Rank(make_model, tmp_path / "w", "collective"), LLMServerManager(two_servers)
    manager.broadcast_by(rank.send)
    await manager.update_weights(rank.publish(1))
    await two_servers["b"].close()
    report = await manager.update_weights(rank.publish(2), deadline=8.0)
    assert report.acknowledged == ("a",)
    assert "closed" in report.missing["b"]
    assert await two_servers["a"].weights_checksum() == rank.digest()
    await two_servers["a"].close()


async def test_a_file_that_is_damaged_is_refused_by_all_and_nothing_changes(
    two_servers: Any, make_model: Any, tmp_path: Path
) -> None:
    rank, manager = Rank(make_model, tmp_path / "w", "shm"), LLMServerManager(two_servers)
    await manager.update_weights(rank.publish(1))
    digest, info = rank.digest(), rank.publish(2)
    flip_a_bit(Path(info.path))
    with pytest.raises(WeightsDamaged, match="checksum"):
        await manager.update_weights(info)
    assert {await server.weights_checksum() for server in two_servers.values()} == {digest}
    latest = WeightStore(tmp_path / "w").latest()
    assert latest is not None
    assert latest.version == 1
    await manager.close()


async def test_weights_of_another_model_change_nothing(two_servers: Any, tmp_path: Path) -> None:
    manager = LLMServerManager(two_servers)
    before = [await server.weights_checksum() for server in two_servers.values()]
    info = staged_info(tmp_path / "w", {"other": torch.zeros(3)})
    with pytest.raises(WeightsMismatch):
        await manager.update_weights(info)
    assert [await server.weights_checksum() for server in two_servers.values()] == before
    assert WeightStore(tmp_path / "w").latest() is None
    await manager.close()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def staged_info(directory: Path, tensors: dict[str, torch.Tensor]) -> WeightInfo:
    info = publisher(SyncSettings(staged=True), str(directory), OneRank()).publish(shares_of(tensors.items(), 0, 1), 1)
    assert info is not None
    return info
