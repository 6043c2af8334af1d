"""The script that is prepared for a GPU runs line by line on a CPU, and says what it needs where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.rollout import main


def test_every_line_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    for backend in ("shm", "collective"):
        assert rows[f"{backend}: versions whose checksum is not the actor's"]["value"] == 0
        assert rows[f"{backend}: rate"]["unit"] == "bytes/s"
    assert all(row["value"] > 0 for row in rows.values() if row["bar"] is None)
    assert {row["unit"] for row in rows.values()} == {"tokens/s", "bytes/s", "s", "x", "versions"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_how_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "torch sees no GPU here; --device cpu --tiny" in capsys.readouterr().err
