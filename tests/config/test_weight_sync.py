"""How weights travel is chosen by where ranks and servers are; what cannot work is an error before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamrl.config import StreamRLConfig
from streamrl.config.derive import derive
from streamrl.config.weight_sync_checks import weight_sync


def config(*, nodes: int = 1, name: str = "torch", deterministic: bool = False, **sync: Any) -> StreamRLConfig:
    base = StreamRLConfig()
    parts = base.actor_rollout_ref
    rollout = replace(parts.rollout, name=name, weight_sync=replace(parts.rollout.weight_sync, **sync))  # type: ignore[arg-type]
    trainer = replace(base.trainer, nnodes=nodes, deterministic=deterministic)
    return replace(base, actor_rollout_ref=replace(parts, rollout=rollout), trainer=trainer)


@pytest.mark.parametrize(("nodes", "name", "path", "chosen"), [
    (1, "torch", None, "shm"), (1, "vllm", None, "shm"), (1, "torch", "/shared", "disk"),
    (2, "torch", None, "collective"), (2, "torch", "/shared", "disk"), (2, "vllm", None, "disk"),
])  # fmt: skip
def test_auto_is_chosen_by_placement(nodes: int, name: str, path: str | None, chosen: str) -> None:
    found = derive(config(nodes=nodes, name=name, path=path))
    assert found.actor_rollout_ref.rollout.weight_sync.backend == chosen
    assert not list(weight_sync(found))


@pytest.mark.parametrize(("given", "said"), [
    ({"backend": "shm", "nodes": 2}, "backend=shm needs ranks and servers on one node"),
    ({"backend": "shm", "path": "/x"}, "path does nothing with backend=shm"),
    ({"backend": "delta", "name": "vllm"}, "rollout.name=vllm reads full versions"),
    ({"backend": "collective", "deterministic": True}, "set shm or disk"),
])  # fmt: skip
def test_what_cannot_work_says_what_to_set(given: dict[str, Any], said: str) -> None:
    [problem] = weight_sync(config(**given))
    assert said in problem


def test_what_works_says_nothing() -> None:
    assert not list(weight_sync(config(backend="disk")))
    assert not list(weight_sync(config(backend="delta", nodes=2)))
    assert not list(weight_sync(config(backend="collective", nodes=2)))
