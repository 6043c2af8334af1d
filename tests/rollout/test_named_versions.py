"""A request that names a weight version gets it or an error of its own; all others get the newest, before and after."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.replica import LAST_WORDS_SECONDS, RayLLMServer
from streamrl.rollout.requests import VersionNotServed
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.torch.server import TorchServer
from streamrl.weight_sync import WeightInfo, WeightStore
from streamrl.weight_sync.delta_publisher import DeltaPublisher
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.weight_sync.ranks import OneRank
from streamrl.weight_sync.shares import cast, shares_of

MAX_LEN = 300


@pytest.fixture
def published(tmp_path: Path, make_model: Any) -> list[WeightInfo]:
    """Versions 5 and 6, differently seeded."""
    store = WeightStore(tmp_path / "weights", older=1)
    return [store.write(dict(make_model("llama", version).named_parameters()), version) for version in (5, 6)]


@pytest.fixture
async def server(model_dirs: dict[str, str], published: list[WeightInfo]) -> AsyncIterator[TorchServer]:
    weights = str(Path(published[0].path).parent)
    server = TorchServer(model_dirs["llama"], max_num_seqs=4, max_model_len=MAX_LEN, weights_dir=weights)
    yield server
    await server.close()


async def versions(server: TorchServer, name: str, version: int | None = None, tokens: int = 3) -> set[int]:
    got = await server.generate(name, [1, 2, 3], SamplingParams(max_tokens=tokens, weight_version=version))
    return set(got.weight_versions)


def flip(path: Path) -> None:
    """One bit of the last number."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


async def until_running(server: TorchServer) -> None:
    async with asyncio.timeout(20):
        while not (await server.load()).tokens_generated:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_version_that_is_not_kept_is_an_error_of_that_request_and_the_process_goes_on(
    model_dirs: dict[str, str], published: list[WeightInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    weights = str(Path(published[0].path).parent)
    server = RayLLMServer(RolloutServerConfig("torch", model_dirs["llama"], weights, max_model_len=MAX_LEN))
    with pytest.raises(VersionNotServed, match="weight version 3 cannot be served"):
        await server.generate("lost", [1], SamplingParams(max_tokens=2, weight_version=3))
    assert (await server.generate("r", [1], SamplingParams(max_tokens=2))).weight_versions == [6, 6]
    await asyncio.sleep(LAST_WORDS_SECONDS + 0.1)
    assert ended == []
    await server.close()


async def test_after_a_request_that_named_an_older_version_the_newest_is_served_again(
    server: TorchServer, published: list[WeightInfo]
) -> None:
    for turn in range(2):
        assert await versions(server, f"named {turn}", 5) == {5}
        assert (await server.load()).weight_version == 6
        assert await server.weights_checksum() == published[1].digest
        assert await versions(server, f"any {turn}") == {6}


async def test_requests_that_arrive_together_each_get_theirs(server: TorchServer) -> None:
    asked = [5, None, 6, 5, None]
    found = await asyncio.gather(*(versions(server, f"r{i}", version, 20) for i, version in enumerate(asked)))
    assert found == [{5}, {6}, {6}, {5}, {6}]


async def test_one_that_was_aborted_leaves_no_older_weights_behind(
    server: TorchServer, published: list[WeightInfo]
) -> None:
    named = asyncio.create_task(versions(server, "named", 5, 250))
    await until_running(server)
    await server.abort(["named"])
    assert await named == {5}
    assert await server.weights_checksum() == published[1].digest


async def test_rows_are_scored_by_the_newest_weights_also_beside_a_request_that_named_older_ones(
    server: TorchServer,
) -> None:
    named = asyncio.create_task(versions(server, "named", 5, 100))
    await until_running(server)
    assert (await server.score([1, 2], [3, 4])).weight_version == 6
    assert await named == {5}


async def test_an_update_waits_for_a_request_that_named_a_version(
    server: TorchServer, published: list[WeightInfo], make_model: Any
) -> None:
    named = asyncio.create_task(versions(server, "named", 6, 200))
    await until_running(server)
    store = WeightStore(Path(published[0].path).parent, older=1)
    info = store.write(dict(make_model("llama", 7).named_parameters()), 7)
    await server.update_weights(info.path, 7)
    assert await versions(server, "any") == {7}
    assert await named == {6}
    assert await server.weights_checksum() == info.digest


async def test_a_damaged_older_version_is_an_error_of_who_named_it(
    server: TorchServer, published: list[WeightInfo]
) -> None:
    flip(Path(published[0].path))
    with pytest.raises(VersionNotServed, match=published[0].digest):
        await versions(server, "named", 5)
    assert await versions(server, "any") == {6}


async def test_a_delta_that_was_prepared_before_another_version_had_its_turn_is_applied_to_its_own_base(
    model_dirs: dict[str, str], make_model: Any, tmp_path: Path
) -> None:
    model = make_model("llama", 1)
    settings = SyncSettings(backend="delta", keep=4)
    writer = DeltaPublisher(settings, str(tmp_path / "w"), OneRank())

    def publish(version: int) -> WeightInfo:
        changed = (model.lm_head, model.model.embed_tokens)[version % 2]
        changed.weight.data[version] += 1.0
        info = writer.publish(cast(shares_of(model.named_parameters(), 0, 1), None), version)
        assert info is not None
        return info

    publish(5)
    assert publish(6).path.endswith(".delta")
    server = TorchServer(model_dirs["llama"], max_model_len=MAX_LEN, weights_dir=str(tmp_path / "w"))
    try:
        info = publish(7)
        await server.prepare_weights(info.path, 7)
        named = asyncio.create_task(versions(server, "named", 5, 250))
        await until_running(server)
        await server.commit_weights(info.path, 7)
        assert await versions(server, "any") == {7}
        assert await named == {5}
        wanted = TorchServer(model_dirs["llama"], max_model_len=MAX_LEN, weights_dir=str(tmp_path / "w"))
        assert await server.weights_checksum() == await wanted.weights_checksum()
        await wanted.close()
    finally:
        await server.close()
