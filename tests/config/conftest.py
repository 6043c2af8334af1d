"""A complete small configuration whose files exist, as arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

CALCULATOR = Path(__file__).parents[2] / "examples/calculator/model"


@pytest.fixture
def valid(tmp_path: Path) -> list[str]:
    """Arguments of a run that passes every check, all files in tmp_path."""
    rows = [
        {"prompt": f"{i} + 1 = ?", "data_source": "sum", "reward_model": {"ground_truth": i + 1}} for i in range(40)
    ]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for file in CALCULATOR.glob("*token*"):
        shutil.copy(file, model)
    shutil.copy(CALCULATOR / "chat_template.jinja", model)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    return [
        f"data.train_files={tmp_path}/train.jsonl",
        f"data.val_files={tmp_path}/val.jsonl",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        f"trainer.runs_dir={tmp_path}/runs",
    ]
