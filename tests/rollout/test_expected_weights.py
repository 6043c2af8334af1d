"""What vLLM and SGLang are not to be given."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.rollout.expected_weights import ExpectedWeights
from streamrl.weight_sync import WeightsDamaged


@pytest.mark.parametrize("kind", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_damage_at_once(
    model_dirs: dict[str, str], tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    kind(path := tmp_path / "v00000001.safetensors")
    with pytest.raises(WeightsDamaged, match="v00000001"):
        ExpectedWeights(model_dirs["qwen2"]).check(str(path))
