"""A version reaches every living server; a dead one costs nothing and comes back with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from agent_loop.llm.protocol import SamplingParams, ServerDied
from streamrl.rollout.building import build_server
from streamrl.rollout.manager import LLMServerManager, SyncPolicy
from streamrl.rollout.replica import RayLLMServer
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.weight_sync import WeightInfo, WeightsDamaged, WeightsMismatch, WeightStore

INFO = WeightInfo(version=5, path="unused", bytes=0)


def test_all_servers_load_at_the_same_time() -> None:
    async def main() -> None:
        servers = {f"s{i}": SimServer(SimConfig(update_seconds=2.0)) for i in range(3)}
        manager = LLMServerManager(servers)
        report = await manager.update_weights(INFO)
        assert report.acknowledged == ("s0", "s1", "s2")
        assert report.seconds == pytest.approx(2.0)
        assert {name: load.weight_version for name, load in (await manager.loads()).items()} == dict.fromkeys(
            servers, 5
        )

    run_virtual(main())


def test_a_dead_server_is_not_waited_for_and_a_silent_one_only_until_the_deadline() -> None:
    async def main() -> None:
        servers = {
            "good": SimServer(),
            "dead": SimServer(),
            "slow": SimServer(SimConfig(update_seconds=1000.0)),
        }
        servers["dead"].die("out of memory")
        report = await LLMServerManager(servers).update_weights(INFO, deadline=30.0)
        assert report.acknowledged == ("good",)
        assert set(report.missing) == {"dead", "slow"}
        assert "out of memory" in report.missing["dead"]
        assert report.seconds == pytest.approx(30.0)
        assert set(await LLMServerManager(servers).loads()) == {"good", "slow"}

    run_virtual(main())


@pytest.mark.parametrize("error", [KeyError("a bug"), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("verb", ["sleep", "wake_up", "pause", "resume", "close"])
def test_what_one_server_raises_keeps_no_other_from_being_told(verb: str, error: BaseException) -> None:
    async def main() -> None:
        told: list[str] = []

        class Tells(SimServer):
            async def _tell(self) -> None:
                told.append(verb)

        class Odd(SimServer):
            async def _tell(self) -> None:
                raise error

        for kind in (Tells, Odd):
            setattr(kind, verb, kind._tell)
        await getattr(LLMServerManager({"odd": Odd(), "a": Tells(), "b": Tells()}), verb)()
        assert told == [verb, verb]

    run_virtual(main())


def test_a_server_whose_abort_breaks_keeps_no_other_from_the_version_and_gets_it_on_the_next_beat() -> None:
    class Odd(SimServer):
        async def abort(self, request_ids: list[str] | None = None) -> int:
            raise KeyError("a bug")

    async def main() -> None:
        servers = {"odd": Odd(), "good": SimServer()}
        manager = LLMServerManager(servers, SyncPolicy(requests="abort"))
        report = await manager.update_weights(INFO)
        assert report.acknowledged == ("good",)
        assert "server odd broke the protocol" in report.missing["odd"]
        with pytest.raises(ServerDied, match="odd serves version 0, not 5"):
            await manager.load_of("odd")
        await asyncio.sleep(1)
        assert (await manager.load_of("odd")).weight_version == 5

    run_virtual(main())


def test_updates_do_not_overtake_each_other() -> None:
    async def main() -> None:
        server = SimServer(SimConfig(update_seconds=1.0))
        manager = LLMServerManager({"s": server})
        await asyncio.gather(*(manager.update_weights(WeightInfo(v, "unused", 0)) for v in (1, 2, 3)))
        assert (await server.load()).weight_version == 3

    run_virtual(main())


def test_a_pinned_server_keeps_its_version_until_it_is_unpinned() -> None:
    async def main() -> None:
        servers = {f"s{i}": SimServer(SimConfig(token_seconds=1.0)) for i in range(3)}
        manager = LLMServerManager(servers)

        async def versions() -> dict[str, int]:
            return {name: load.weight_version for name, load in (await manager.loads()).items()}

        await manager.update_weights(WeightInfo(1, "unused", 0))
        busy = asyncio.create_task(servers["s0"].generate("r", [1], SamplingParams(max_tokens=50)))
        await asyncio.sleep(1)
        servers["s2"].die()
        assert await manager.pin(1) == ["s1"], "the one that lives and has the least to do"
        assert "pinned" in (await manager.update_weights(WeightInfo(2, "unused", 0))).missing["s1"]
        servers["s2"].restart()
        await manager.update_weights(WeightInfo(3, "unused", 0))
        assert await versions() == {"s0": 3, "s1": 1, "s2": 3}
        await manager.unpin()
        assert await versions() == {"s0": 3, "s1": 3, "s2": 3}
        assert await manager.pin(3) == [], "one is left for training"
        await manager.update_weights(WeightInfo(4, "unused", 0))
        await manager.unpin()
        assert await versions() == {"s0": 4, "s1": 4, "s2": 4}
        await busy

    run_virtual(main())


def test_a_server_that_catches_up_by_itself_does_not_while_it_keeps_its_weights(tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path)
        store.write({"w": torch.zeros(1)}, 1)
        server = RayLLMServer(RolloutServerConfig("sim", weights_dir=str(tmp_path)))
        store.write({"w": torch.zeros(1)}, 2)
        await server.keep_weights(True)
        assert (await server.load()).weight_version == 1
        await server.keep_weights(False)
        assert (await server.load()).weight_version == 2

    run_virtual(main())


async def test_weights_of_another_model_are_the_runs_mistake(model_dirs: dict[str, str], tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    server = build_server(RolloutServerConfig("torch", model_dirs["qwen2"], str(tmp_path), max_model_len=64))
    manager = LLMServerManager({"s": server})
    with pytest.raises(WeightsMismatch):
        await manager.update_weights(store.write({"other": torch.zeros(1)}, 1))
    got = await server.generate("r", [1], SamplingParams(max_tokens=2))
    assert got.weight_versions == [0, 0]
    await manager.close()


async def test_a_server_starts_with_the_newest_weights(
    model_dirs: dict[str, str], other_weights, tmp_path: Path
) -> None:
    other_weights("qwen2", 1, 9)
    weights = str(tmp_path / "weights")
    for name in ("torch", "sim"):
        server = build_server(RolloutServerConfig(name, model_dirs["qwen2"], weights, max_model_len=64))
        assert (await server.load()).weight_version == 9
        await server.close()


def test_an_unknown_server_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'vlm'.*sim, torch"):
        build_server(RolloutServerConfig("vlm"))


async def test_a_simulated_server_speaks_the_vocabulary_of_its_model(model_dirs: dict[str, str]) -> None:
    server = build_server(RolloutServerConfig("sim", model_dirs["qwen2"], sim={"token_seconds": 0.0}))
    got = await server.generate("r", [1], SamplingParams(max_tokens=500))
    assert max(got.token_ids) < 64
    await server.close()


def damaged(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 0x40
    Path(path).write_bytes(data)


async def test_a_server_does_not_start_with_weights_that_are_not_the_trainers(
    model_dirs: dict[str, str], other_weights, tmp_path: Path
) -> None:
    info = other_weights("qwen2", 1, 6)
    damaged(info.path)
    server = RayLLMServer(
        RolloutServerConfig("torch", model_dirs["qwen2"], str(tmp_path / "weights"), max_model_len=64)
    )
    with pytest.raises(WeightsDamaged, match=info.digest):
        await server.ready()


async def test_a_server_that_catches_up_by_itself_refuses_weights_that_are_not_the_trainers(
    model_dirs: dict[str, str], other_weights, tmp_path: Path
) -> None:
    other_weights("qwen2", 1, 1)
    server = RayLLMServer(
        RolloutServerConfig("torch", model_dirs["qwen2"], str(tmp_path / "weights"), max_model_len=64)
    )
    damaged(other_weights("qwen2", 2, 2).path)
    assert (await server.load()).weight_version == 1
    (tmp_path / "weights" / "LATEST").write_bytes(b"\xff\xfe\x00garbage")
    assert (await server.load()).weight_version == 1
    other_weights("qwen2", 3, 3)
    assert (await server.load()).weight_version == 3
    await server.close()


async def test_a_server_that_joins_refuses_weights_that_are_not_the_trainers(
    model_dirs: dict[str, str], other_weights, tmp_path: Path
) -> None:
    config = RolloutServerConfig("torch", model_dirs["qwen2"], max_model_len=64)
    servers = [build_server(config) for _ in range(2)]
    manager = LLMServerManager({"first": servers[0]})
    info = other_weights("qwen2", 1, 1)
    assert (await manager.update_weights(info)).acknowledged == ("first",)
    damaged(info.path)
    with pytest.raises(WeightsDamaged, match=info.digest):
        await manager.add_server("second", servers[1])
    assert set(manager.servers) == {"first"}
    for server in servers:
        await server.close()
