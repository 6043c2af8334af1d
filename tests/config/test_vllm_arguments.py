"""Arguments that are passed on to vLLM are compared with its own, without importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config import ConfigError, load_config
from streamrl.rollout.vllm import arguments as of_vllm
from streamrl.rollout.vllm.options import OURS

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"
SOURCE = """
ModelDType = str
class EngineArgs:
    model: str = "m"
    dtype: ModelDType = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    hf_overrides: Thing = field(default_factory=dict)
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/config").mkdir()
    (tmp_path / "vllm/engine/arg_utils.py").write_text(SOURCE)
    (tmp_path / "vllm/config/model.py").write_text('ModelDType = Literal[\n    "auto", "bfloat16",\n    "float32"\n]\n')
    of_vllm.arguments.cache_clear()
    of_vllm._words.cache_clear()
    monkeypatch.setattr(of_vllm, "_home", lambda: tmp_path / "vllm")


@pytest.fixture(autouse=True)
def fresh():
    yield
    of_vllm.arguments.cache_clear()
    of_vllm._words.cache_clear()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nonsense=3", f"{KEY}.nonsense: vLLM has no such argument"),
        ("gpu_memory_utilisation=3", "did you mean actor_rollout_ref.rollout.gpu_memory_utilization?"),
        ("enable_prefix_cachin=true", "did you mean enable_prefix_caching?"),
        ("dtype=float128", f"{KEY}.dtype=float128: vLLM takes one of auto, bfloat16, float32"),
        ("kv_cache_memory_bytes=1.5", f"{KEY}.kv_cache_memory_bytes=1.5: vLLM takes int | None"),
        ("enable_prefix_caching=1", f"{KEY}.enable_prefix_caching=1: vLLM takes bool | None"),
    ],
)
def test_an_argument_that_vllm_does_not_take_is_an_error_before_anything_starts(
    valid: list[str], vllm: None, given: str, says: str
):
    with pytest.raises(ConfigError) as error:
        load_config([*valid, "actor_rollout_ref.rollout.name=vllm", f"{KEY}.{given}"])
    assert says in str(error.value)


def test_what_vllm_takes_passes(valid: list[str], vllm: None):
    given = ["dtype=bfloat16", "kv_cache_memory_bytes=1073741824", "hf_overrides={a:1}"]
    load_config([*valid, "actor_rollout_ref.rollout.name=vllm", *(f"{KEY}.{each}" for each in given)])


@pytest.mark.skipif(of_vllm._home() is None, reason="vLLM is not installed")
def test_the_installed_vllm_has_all_arguments_that_are_set_here_and_is_not_imported():
    assert set(OURS) <= set(of_vllm.arguments())
    assert "bfloat16" in of_vllm._words("ModelDType")
    code = (
        "import sys; from streamrl.rollout.vllm.arguments import arguments; arguments(); print('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
