"""Which memory vLLM gives up while training has the devices: only where it serves, on CUDA, in the mode that sleeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamrl.config import StreamRLConfig
from streamrl.config.checks import sleep_level
from streamrl.runtime.settings import rollout_server


def config(level: Any = 1, *, name: Any = "vllm", device: Any = "cuda", mode: Any = "colocate_async") -> StreamRLConfig:
    base = StreamRLConfig()
    parts, trainer = base.actor_rollout_ref, base.trainer
    rollout = replace(parts.rollout, name=name, sleep_level=level)
    trainer = replace(trainer, device=device, v1=replace(trainer.v1, trainer_mode=mode))
    return replace(base, actor_rollout_ref=replace(parts, rollout=rollout), trainer=trainer)


@pytest.mark.parametrize("level", [1, 2])
def test_both_levels_pass_where_servers_sleep(level: int) -> None:
    assert not list(sleep_level(config(level)))


def test_without_a_level_nothing_is_asked() -> None:
    assert not list(sleep_level(config(None, name="torch", device="cpu", mode="sync")))


@pytest.mark.parametrize(("given", "says"), [
    ({"name": "torch"}, "sleep_level is vLLM's; the embedded engine always gives its cache up"),
    ({"device": "cpu"}, "on a CPU vLLM cannot give memory up"),
    ({"mode": "separate_async"}, "does nothing in trainer_mode=separate_async"),
])  # fmt: skip
def test_elsewhere_it_is_an_error(given: dict[str, Any], says: str) -> None:
    [problem] = sleep_level(config(**given))
    assert says in problem


def test_the_server_is_told(tmp_path: Any) -> None:
    from streamrl.runtime.run_dir import RunDirectory

    assert rollout_server(config(2), RunDirectory(tmp_path, False), 0).vllm["sleep_level"] == 2
