"""SGLang for tests: one process for many, each with a server of its own that takes it by its url.

SGLANG_PYTHON names the interpreter of an environment with SGLang, if not the one that `make sglang-env` has made is
taken. Modules that SGLang has no CPU build of are those of `sglang/standins`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from streamrl.rollout.loop_thread import LoopThread
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.sglang.options import SglangOptions
from streamrl.rollout.sglang.process import SglangProcess
from streamrl.rollout.weights_view import WeightsView
from tests.rollout.sglang import environment

KEY_ENV = "STREAMRL_TEST_SGLANG_KEY"
ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 8000,
}


def sglang_at(url: str, key: str, model: str, **more: Any) -> RolloutServerConfig:
    os.environ[KEY_ENV] = key
    return RolloutServerConfig(
        "sglang", model, max_num_seqs=4, max_model_len=512, sglang={"url": url, "key_env": KEY_ENV, **more}
    )


def local_options() -> SglangOptions:
    """Skips the test where there is no SGLang."""
    python = os.environ.get("SGLANG_PYTHON") or environment.python(environment.directory())
    if not python:
        pytest.skip("SGLang is not installed (make sglang-env), and SGLANG_PYTHON names no environment with it")
    return SglangOptions(
        python=str(python),
        engine_kwargs=ON_CPU,
        env={"PYTHONPATH": str(environment.STANDINS)},
        start_seconds=340.0,  # it imports for half a minute, on a machine that is busy with other tests for many
    )


def started(model: str) -> Iterator[tuple[str, str]]:
    """(url, key) of a process that ends with the generator."""
    options, thread = local_options(), LoopThread("sglang-for-tests")
    view = WeightsView(model)
    config = RolloutServerConfig("sglang", view.directory, max_num_seqs=4, max_model_len=512)
    process = thread.run(SglangProcess.start(config, options))
    yield process.url, process.key.value
    thread.run(process.end())
    thread.end()
    view.remove()
