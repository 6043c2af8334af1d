"""What the shared suite (test_llm_server.py) does not ask of the SGLang server: its HTTP, its process, its options."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.llm.protocol import CannotScore, SamplingParams, ServerDied
from streamrl.rollout.building import build_server
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.sglang.options import SglangOptions, arguments, environment
from streamrl.rollout.sglang.server import SglangServer
from streamrl.weight_sync import WeightsDamaged, WeightsMismatch, WeightsMissing, WeightStore
from tests.rollout.conftest import VOCAB, tiny_model
from tests.rollout.fake_sglang import KEY, FakeSglang, fake_log_prob
from tests.rollout.kept_sglang import local_options, sglang_at

LONG = SamplingParams(max_tokens=400)


@pytest.fixture(params=[True, False], ids=["deltas", "cumulative"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeSglang]:
    fake = FakeSglang(vocab_size=VOCAB, slots=4, context_length=520, incremental=request.param)
    yield fake
    fake.close()


async def until_running(server: SglangServer, tokens: int = 5) -> None:
    while (await server.load()).tokens_generated < tokens:  # noqa: ASYNC110  # a server announces no tokens
        await asyncio.sleep(0.002)


async def test_streams_of_deltas_and_of_all_tokens_so_far_are_read_alike(
    fake: FakeSglang, model_dirs: dict[str, str]
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    got = await server.generate("r", [1, 2], SamplingParams(max_tokens=50, seed=3))
    again = await server.generate("r", [1, 2], SamplingParams(max_tokens=50, seed=3))
    assert len(got.token_ids) == 50
    assert again.token_ids == got.token_ids
    await server.close()


async def test_a_request_that_begins_after_a_swap_shares_no_cache_with_those_before(
    fake: FakeSglang, model_dirs: dict[str, str], other_weights: Any
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    tasks = [asyncio.ensure_future(server.generate(f"r{i}", [1, 2], LONG)) for i in range(6)]
    await until_running(server)
    await server.update_weights(other_weights("qwen2", 7, 7).path, 7)
    await asyncio.gather(*tasks)
    assert len(fake.prefilled) == 6
    for key, version in fake.prefilled:
        assert key.startswith(f"weights {version} ")
    assert {version for _, version in fake.prefilled} == {"0", "7"}
    await server.close()


async def test_tokens_that_are_read_after_a_swap_carry_the_version_that_sampled_them(
    model_dirs: dict[str, str], other_weights: Any
) -> None:
    fake = FakeSglang(vocab_size=VOCAB, slots=4, context_length=520, step_seconds=0.01)
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    task = asyncio.ensure_future(server.generate("r", [1, 2], LONG))
    await until_running(server)
    await fake.hold()
    made = len(fake.running[0].tokens)
    while len(fake.running[0].tokens) < made + 20:  # noqa: ASYNC110  # the fake announces no tokens
        await asyncio.sleep(0.002)
    seen = len((await server.progress({"r": 0}))["r"].token_ids)
    await server.pause()
    await server.update_weights(other_weights("qwen2", 7, 7).path, 7)
    await fake.let_go()
    while not (later := await server.progress({"r": seen})):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    assert later["r"].weight_versions[0] == 0
    await server.resume()
    got = await task
    assert got.weight_versions[seen : seen + len(later["r"].weight_versions)] == later["r"].weight_versions
    assert got.weight_versions[-1] == 7
    await server.close()
    fake.close()


async def test_a_server_does_not_start_with_weights_that_are_not_the_trainers(
    fake: FakeSglang, model_dirs: dict[str, str], other_weights: Any
) -> None:
    info = other_weights("qwen2", 1, 6)
    at = sglang_at(fake.url, KEY, model_dirs["qwen2"])
    config = replace(at, weights_dir=str(Path(info.path).parent))
    await SglangServer(config).close()
    flip_a_bit(info.path)
    with pytest.raises(WeightsDamaged, match=info.digest):
        SglangServer(config)


def flip_a_bit(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 0x40
    Path(path).write_bytes(data)


async def test_a_server_that_overlaps_its_steps_is_told_of(
    model_dirs: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for overlaps in (False, True):
        fake = FakeSglang(
            vocab_size=VOCAB, slots=4, context_length=520, info={"disable_overlap_schedule": not overlaps}
        )
        server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
        assert ("--disable-overlap-schedule" in caplog.text) == overlaps
        await server.close()
        fake.close()


async def test_log_probs_after_cuts_are_those_of_what_is_left(fake: FakeSglang, model_dirs: dict[str, str]) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    got = await server.generate("r", [1, 2], SamplingParams(max_tokens=30, top_k=5, seed=1))
    assert set(got.token_ids) <= set(range(5))
    assert got.log_probs == pytest.approx([-math.log(5)] * 30)
    got = await server.generate("s", [1, 2], SamplingParams(max_tokens=3, top_p=0.9))
    assert got.log_probs == pytest.approx([-math.log(58)] * 3), "of 64 equally likely ones"
    await server.close()


async def test_scores_are_the_servers_own_at_temperature_1_alone(fake: FakeSglang, model_dirs: dict[str, str]) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    scores = await server.score([1, 2], [3, 4, 5])
    assert scores.log_probs == [fake_log_prob(token) for token in (3, 4, 5)]
    with pytest.raises(CannotScore, match=r"temperature 0\.7: SGLang tells log-probs of given tokens at 1 alone"):
        await server.score([1, 2], [3], 0.7)
    await server.close()


async def test_what_is_scored_across_a_swap_is_scored_by_the_new_weights(
    fake: FakeSglang, model_dirs: dict[str, str], other_weights: Any
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    running = [asyncio.ensure_future(server.generate(f"r{i}", [1, 2], LONG)) for i in range(4)]
    await until_running(server)
    asked = asyncio.ensure_future(server.score([1, 2], [3, 4]))
    await asyncio.sleep(0)
    await server.update_weights(other_weights("qwen2", 7, 7).path, 7)
    await server.abort()
    assert (await asked).weight_version == 7
    await asyncio.gather(*running)
    await server.close()


async def test_the_weights_are_shown_as_a_models_directory(
    fake: FakeSglang, model_dirs: dict[str, str], other_weights: Any
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    info = other_weights("qwen2", 3, 3)
    await server.update_weights(info.path, 3)
    look_at(Path(fake.directory), Path(info.path))
    assert await server.weights_checksum() == await server.prepare_weights(info.path, 3)
    await server.close()
    assert not os.path.exists(fake.directory)  # noqa: ASYNC240


def look_at(shown: Path, weights: Path) -> None:
    assert (shown / "model.safetensors").read_bytes() == weights.read_bytes()
    assert (shown / "config.json").is_file()
    assert [file.name for file in shown.glob("*.safetensors*")] == ["model.safetensors"]
    assert shown.stat().st_mode & 0o077 == 0


async def test_weights_that_do_not_fit_leave_the_old_ones(
    fake: FakeSglang, model_dirs: dict[str, str], other_weights: Any, tmp_path: Path
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    with pytest.raises(WeightsMismatch):
        await server.update_weights(other_weights("llama", 1, 1).path, 1)
    with pytest.raises(WeightsMissing):
        await server.update_weights(str(tmp_path / "none.safetensors"), 1)
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsDamaged):
        await server.update_weights(str(tmp_path / "bad.safetensors"), 1)
    assert (await server.load()).weight_version == 0
    assert (await server.generate("r", [1], SamplingParams(max_tokens=3))).weight_versions == [0] * 3
    await server.close()


async def test_a_server_that_begins_loads_the_newest_weights(
    fake: FakeSglang, model_dirs: dict[str, str], tmp_path: Path
) -> None:
    WeightStore(tmp_path / "w").write(tiny_model("qwen2", 5).state_dict(), 12)
    config = sglang_at(fake.url, KEY, model_dirs["qwen2"])
    server = build_server(RolloutServerConfig(**{**_fields(config), "weights_dir": str(tmp_path / "w")}))
    assert (await server.load()).weight_version == 12
    await server.close()


async def test_sleep_gives_the_cache_up_when_nothing_runs_any_more(
    fake: FakeSglang, model_dirs: dict[str, str]
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"], release_memory=True))
    task = asyncio.ensure_future(server.generate("r", [1, 2], LONG))
    await until_running(server)
    await server.sleep()
    assert fake.released
    await server.wake_up()
    assert not fake.released
    got = await task
    assert (len(got.token_ids), got.stop_reason) == (400, "length")
    await server.close()


async def test_a_server_whose_connection_ends_is_dead_and_its_requests_know_it(
    fake: FakeSglang, model_dirs: dict[str, str]
) -> None:
    server = SglangServer(sglang_at(fake.url, KEY, model_dirs["qwen2"]))
    task = asyncio.ensure_future(server.generate("r", [1, 2], LONG))
    await until_running(server)
    made = await server.progress({"r": 0})
    await asyncio.to_thread(fake.close)
    with pytest.raises(ServerDied):
        await task
    with pytest.raises(ServerDied):
        await server.load()
    assert made["r"].token_ids
    await server.close()


async def test_a_wrong_key_is_said_so_and_not_shown(fake: FakeSglang, model_dirs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="does not take our key") as failed:
        SglangServer(sglang_at(fake.url, "not the key", model_dirs["qwen2"]))
    assert "not the key" not in str(failed.value)
    with pytest.raises(ValueError, match="no SGLang server is ready there"):
        SglangServer(sglang_at("http://127.0.0.1:9", KEY, model_dirs["qwen2"]))


def test_options_say_how_sglang_is_reached() -> None:
    for given in ({}, {"python": "x", "url": "y"}):
        with pytest.raises(ValueError, match=r"rollout\.sglang\.python"):
            SglangOptions.of(given)


def test_arguments_are_sglangs_own_and_ours_cannot_be_taken(model_dirs: dict[str, str]) -> None:
    config = RolloutServerConfig("sglang", model_dirs["qwen2"], max_model_len=512)
    options = SglangOptions(python="p", engine_kwargs={"mem_fraction_static": 0.5, "disable_overlap_schedule": True})
    given = arguments(config, options, port=1, key="k")
    assert given[given.index("--mem-fraction-static") + 1] == "0.5"
    assert "--disable-overlap-schedule" in given
    assert "--incremental-streaming-output" in given
    with pytest.raises(ValueError, match=r"engine_kwargs\.api_key"):
        arguments(config, SglangOptions(python="p", engine_kwargs={"api_key": "x"}), port=1, key="k")


def test_the_other_python_inherits_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, model_dirs: dict[str, str]) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    found = environment(RolloutServerConfig("sglang", model_dirs["qwen2"]), SglangOptions(python="p", env={"A": "b"}))
    assert "/ours" not in found.values()
    assert found["A"] == "b"


def test_an_interpreter_without_sglang_says_what_it_lacks(model_dirs: dict[str, str]) -> None:
    config = RolloutServerConfig("sglang", model_dirs["qwen2"], sglang={"python": sys.executable})
    with pytest.raises(ValueError, match="exit code 1") as failed:
        SglangServer(config)
    assert "sglang" in str(failed.value)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_of_its_own_serves_dies_and_ends_with_its_server(model_dirs: dict[str, str]) -> None:
    config = RolloutServerConfig(
        "sglang", model_dirs["qwen2"], max_num_seqs=4, max_model_len=512, sglang=local_options()
    )

    async def lives_and_dies() -> None:
        task = asyncio.ensure_future(server.generate("r", [1, 2], LONG))
        await until_running(server)
        os.killpg(server.pid or 0, signal.SIGKILL)
        with pytest.raises(ServerDied, match="SIGKILL|stream broke"):
            await asyncio.wait_for(task, 10)
        await server.close()

    server = SglangServer(config)
    asyncio.run(lives_and_dies())
    server = SglangServer(config)
    first = psutil.Process(server.pid)
    processes = [first, *first.children(recursive=True)]
    assert len(processes) > 1
    asyncio.run(server.close())
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def _fields(config: RolloutServerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
