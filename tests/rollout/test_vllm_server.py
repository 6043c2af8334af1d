"""What vLLM samples is what the model of that version says, also around a swap; and what it cannot do, it says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_loop.llm.protocol import CannotScore, SamplingParams, ServerDied
from streamrl.rollout.building import build_server
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.torch.sampling import Knobs, _cut
from streamrl.rollout.vllm.options import check_engine_kwargs
from streamrl.rollout.vllm.request import Call, engine_sampling
from streamrl.rollout.vllm.server import VllmServer
from streamrl.weight_sync import WeightInfo, WeightsDamaged, WeightsMismatch, WeightsMissing
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.publisher import SyncSettings, publisher
from streamrl.weight_sync.shared_memory import read_weights
from streamrl.weight_sync.shares import shares_of
from tests.rollout.conftest import tiny_model
from tests.weight_sync.ranks import ThreadRanks, on_all, rank_threads

CLOSE = 1e-3


def on(engine: Any, test: Callable[[VllmServer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = engine.server()
        try:
            await asyncio.wait_for(test(server), 60)
        finally:
            await server.close()

    asyncio.run(main())


def log_probs(seed: int, prompt: list[int], response: list[int], sampling: SamplingParams) -> list[float]:
    """By transformers, in float32, of the model with this seed: temperature and cuts applied."""
    with torch.no_grad():
        logits = tiny_model("wide", seed)(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    knobs = Knobs.of([sampling] * len(response), logits.shape[-1], logits.device)
    cut = _cut(logits / knobs.temperature, knobs.top_k, knobs.top_p)
    return cut.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.6}, {"temperature": 0.0}]
)
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_log_probs_are_those_of_the_model_after_temperature_and_cuts(vllm_engine: Any, asked: dict[str, Any]) -> None:
    async def test(server: VllmServer) -> None:
        sampling = SamplingParams(max_tokens=60, seed=1, **asked)
        got = await server.generate("r", [1, 2, 3], sampling)
        wanted = log_probs(0, [1, 2, 3], got.token_ids, sampling)
        assert got.log_probs == pytest.approx(wanted, abs=CLOSE)

    on(vllm_engine, test)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_around_a_swap_tokens_have_the_log_probs_of_their_version_and_no_old_prefix_is_found(
    vllm_engine: Any, other_weights: Any
) -> None:
    async def test(server: VllmServer) -> None:
        long = [(7 * i) % 64 for i in range(200)]  # several blocks of the cache
        sampling = SamplingParams(max_tokens=20, seed=1)
        straddling = asyncio.ensure_future(server.generate("straddles", [4, 5], SamplingParams(max_tokens=480)))
        before = await server.generate("before", long, sampling)
        again = await server.generate("again", long, sampling)
        assert again.token_ids == before.token_ids
        await server.update_weights(other_weights("wide", 1, 1).path, 1)
        after = await server.generate("after", long, sampling)
        assert (set(before.weight_versions), set(after.weight_versions)) == ({0}, {1})
        assert before.log_probs == pytest.approx(log_probs(0, long, before.token_ids, sampling), abs=CLOSE)
        assert after.log_probs == pytest.approx(log_probs(1, long, after.token_ids, sampling), abs=CLOSE)
        got = await straddling
        old = got.weight_versions.count(0)
        assert 0 < old < 480
        assert got.weight_versions == [0] * old + [1] * (480 - old)
        wanted = log_probs(0, [4, 5], got.token_ids[:old], sampling)
        assert got.log_probs[:old] == pytest.approx(wanted, abs=CLOSE)

    on(vllm_engine, test)


async def test_a_call_that_goes_on_with_its_seed_does_not_draw_the_same_numbers_again() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")

    def seed(prompt: list[int]) -> int:
        slot = asyncio.get_running_loop().create_future()
        return engine_sampling(Call("r", prompt, SamplingParams(max_tokens=4, seed=5), slot)).seed

    assert seed([1, 2, 3]) == seed([4, 5, 6]) != seed([1, 2, 3, 4])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_of_another_model_or_damaged_ones_are_refused_and_the_old_ones_stay(
    vllm_engine: Any, other_weights: Any, tmp_path: Path
) -> None:
    async def test(server: VllmServer) -> None:
        base = await server.weights_checksum()
        running = asyncio.ensure_future(server.generate("running", [1], SamplingParams(max_tokens=300)))
        other = other_weights("llama", 1, 1).path
        with pytest.raises(WeightsMismatch, match="nothing was overwritten"):
            await server.update_weights(other, 1)
        with pytest.raises(WeightsMissing, match="not there"):
            await server.update_weights(str(tmp_path / "gone.safetensors"), 1)
        good = other_weights("wide", 1, 2).path
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(Path(good).read_bytes()[:5000])  # noqa: ASYNC240
        with pytest.raises(WeightsDamaged, match="publish again"):
            await server.update_weights(str(cut), 2)
        assert set((await running).weight_versions) == {0}
        assert await server.weights_checksum() == base
        await server.update_weights(good, 2)
        assert await server.weights_checksum() == weights_digest(read_weights(good).items()) != base

    on(vllm_engine, test)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_file_that_is_not_what_the_trainer_wrote_changes_nothing(vllm_engine: Any, tmp_path: Path) -> None:
    async def test(server: VllmServer) -> None:
        manager, base = LLMServerManager({"server": server}), await server.weights_checksum()
        written = by_two_ranks(1, 1, tmp_path / "good")
        damaged = by_two_ranks(2, 2, tmp_path / "bad")
        data = bytearray(Path(damaged.path).read_bytes())  # noqa: ASYNC240
        data[-1] ^= 1
        Path(damaged.path).write_bytes(data)  # noqa: ASYNC240
        with pytest.raises(WeightsDamaged, match="checksum"):
            await manager.update_weights(damaged)
        assert ((await server.load()).weight_version, await server.weights_checksum()) == (0, base)
        assert (await manager.update_weights(written)).checksums == {"server": written.digest}
        assert await server.weights_checksum() == written.digest

    on(vllm_engine, test)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_does_not_start_with_weights_that_are_not_the_trainers(
    vllm_engine: Any, model_dirs: dict[str, str], other_weights: Any
) -> None:
    info = other_weights("wide", 1, 6)
    config = RolloutServerConfig(
        "vllm", model_dirs["wide"], str(Path(info.path).parent), max_num_seqs=4, max_model_len=512
    )
    asyncio.run(VllmServer(config, engine=vllm_engine).close())
    data = bytearray(Path(info.path).read_bytes())
    data[-1] ^= 1
    Path(info.path).write_bytes(data)
    with pytest.raises(WeightsDamaged, match=info.digest):
        VllmServer(config, engine=vllm_engine)


def by_two_ranks(seed: int, version: int, directory: Path) -> WeightInfo:
    """Two training ranks publish by shm, each its rows."""
    named = list(tiny_model("wide", seed).named_parameters())

    def publish(ranks: ThreadRanks) -> WeightInfo | None:
        writer = publisher(SyncSettings(backend="shm", staged=True), str(directory), ranks)
        return writer.publish(shares_of(named, ranks.rank, ranks.world_size), version)

    info, other = on_all(rank_threads(2), publish)
    assert isinstance(info, WeightInfo)
    assert other is None
    return info


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_tensor_parallel_workers_take_what_two_training_ranks_have(
    model_dirs: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")
    options = {"tensor_model_parallel_size": 2, "engine_kwargs": {"kv_cache_memory_bytes": 64 << 20}}
    server = build_server(
        RolloutServerConfig("vllm", model_dirs["wide"], max_num_seqs=4, max_model_len=512, vllm=options)
    )

    async def main() -> None:
        try:
            info = by_two_ranks(1, 1, tmp_path / "w")
            running = asyncio.ensure_future(server.generate("running", [1, 2], SamplingParams(max_tokens=450)))
            while not await server.progress({"running": 0}):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            report = await LLMServerManager({"server": server}).update_weights(info)
            assert report.acknowledged == ("server",)
            assert set((await running).weight_versions) == {0, 1}
            trained = weights_digest(tiny_model("wide", 1).named_parameters())
            assert await server.weights_checksum() == info.digest == trained
            sampling = SamplingParams(max_tokens=30, seed=1)
            got = await server.generate("after", [1, 2, 3], sampling)
            assert got.log_probs == pytest.approx(log_probs(1, [1, 2, 3], got.token_ids, sampling), abs=CLOSE)
        finally:
            await server.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_that_give_nan_are_the_end_of_the_server(vllm_engine: Any, tmp_path: Path) -> None:
    from streamrl.weight_sync import WeightStore

    async def test(server: VllmServer) -> None:
        state = {name: torch.full_like(value, torch.nan) for name, value in tiny_model("wide").named_parameters()}
        broken = WeightStore(tmp_path / "broken").write(state, 3)
        open_call = asyncio.ensure_future(server.generate("open", [1], SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.05)
        await server.update_weights(broken.path, 3)
        with pytest.raises(ServerDied, match="NaN at weight version 3"):
            await open_call
        with pytest.raises(ServerDied, match="NaN"):
            await server.load()

    on(vllm_engine, test)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_it_does_not_do_is_an_error_of_the_caller(vllm_engine: Any) -> None:
    async def test(server: VllmServer) -> None:
        with pytest.raises(CannotScore):
            await server.score([1], [2])
        with pytest.raises(ValueError, match=r"0, or a finite number >= 0\.01"):
            await server.generate("cold", [1], SamplingParams(max_tokens=1, temperature=0.001))
        with pytest.raises(ValueError, match=r"takes 0, or 0\.01 to 2"):
            await server.generate("hot", [1], SamplingParams(max_tokens=1, temperature=3.0))
        with pytest.raises(ValueError, match="names a version"):
            await server.generate("named", [1], SamplingParams(max_tokens=1, weight_version=0))

    on(vllm_engine, test)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_requests_in_a_pause_are_aborted_at_once(vllm_engine: Any) -> None:
    async def test(server: VllmServer) -> None:
        await server.pause()
        nine = SamplingParams(max_tokens=9)
        calls = [asyncio.ensure_future(server.generate(f"r{i}", [1], nine)) for i in range(1000)]
        await asyncio.sleep(0)
        while (await server.load()).waiting < 1000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await server.abort() == 1000
        assert {got.stop_reason for got in await asyncio.wait_for(asyncio.gather(*calls), 10)} == {"aborted"}
        await server.resume()

    on(vllm_engine, test)


def test_without_vllm_the_server_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.rollout.vllm.options.installed", lambda: False)
    with pytest.raises(ValueError, match="make vllm"):
        build_server(RolloutServerConfig("vllm", "examples/calculator/model"))


def test_arguments_that_are_ours_or_unknown_to_vllm_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"vllm\.seed is set by this package"):
        check_engine_kwargs({"seed": 1})
    with pytest.raises(ValueError, match="no such argument; did you mean block_size"):
        check_engine_kwargs({"blok_size": 1}, ["block_size", "dtype"])
    check_engine_kwargs({"block_size": 16}, ["block_size"])


def test_a_deterministic_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.rollout.vllm.options.installed", lambda: True)
    with pytest.raises(ValueError, match="depend on the batch"):
        build_server(RolloutServerConfig("vllm", "examples/calculator/model", invariant=True))


def test_a_process_ends_with_the_one_it_follows() -> None:
    follower = "import os, time, streamrl.rollout.vllm.worker as w; w.end_with(int(os.environ['FOLLOWED']))"
    followed = subprocess.Popen(["sleep", "60"])
    child = subprocess.Popen(
        [sys.executable, "-c", f"{follower}; print('follows', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        env=os.environ | {"FOLLOWED": str(followed.pid)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"follows\n"
    assert child.poll() is None
    followed.kill()
    followed.wait()
    assert child.wait(10) == -9
