"""docs/engines.md is executed: its skeleton, filled with a plain model, learns as every engine does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from streamrl.errors import ConfigError
from streamrl.single_controller.worker import RankInfo
from streamrl.workers.engine import Engine, EngineRegistry, EngineSettings
from tests.workers.engine.cases import LR, OPTIM, STEPS, TEMPERATURE, Case, Reference, loss_of, make_rows

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page defines; its entry leaves the registry with the test."""
    monkeypatch.setattr(EngineRegistry, "_engines", dict(EngineRegistry._engines))
    names: dict[str, Any] = {"__name__": "docs.engines"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)  # noqa: S102 - our own page
    return names


def plain_engine(skeleton: Any) -> Any:
    class Plain(skeleton):
        def initialize(self) -> None:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(self.settings.model_path, dtype=torch.float64)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=OPTIM.weight_decay)

        def forward(self, packed: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
            rows = torch.from_numpy(packed.input_ids[0]).split(list(packed.lengths))
            logits = torch.cat([self.model(input_ids=row[None]).logits[0] for row in rows])
            logs = torch.log_softmax(logits[torch.from_numpy(packed.positions)] / temperature, -1)
            targets = torch.from_numpy(packed.targets)
            return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)

        def step(self, lr: float) -> tuple[float, bool]:
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
            self.optimizer.step()
            self.optimizer.zero_grad()
            return norm, True

    return Plain


def test_the_skeleton_of_the_page_learns_the_same_curve(page: dict[str, Any], models: dict[str, Path]) -> None:
    case, rows = Case(), make_rows(11)
    engine: Engine = plain_engine(page["ForeignEngine"])(RankInfo(), case.settings(models))
    engine.initialize()
    tokens = float(engine.all_sum(np.array([sum(mask.sum() for mask in rows.columns["loss_mask"])]))[0])
    options: dict[str, Any] = {"lr": LR, "temperature": TEMPERATURE, "micro": case.micro}
    steps = [engine.train_batch(rows, loss_of(case.kind, tokens), **options) for _ in range(STEPS)]
    expected = Reference(models["qwen2"], case.kind).train()
    np.testing.assert_allclose([step.sums["loss"] for step in steps], expected["curve"], atol=1e-6)
    found = engine.infer(rows, temperature=TEMPERATURE, micro=case.micro)
    for index, row in enumerate(expected["inferred"]):
        np.testing.assert_allclose(found["log_probs"][index], row["log_probs"].numpy(), atol=1e-6)


def test_the_entry_of_the_page_is_found_and_says_what_it_needs(page: dict[str, Any]) -> None:
    engine = EngineRegistry.get("language_model", "megatron")(RankInfo(), EngineSettings(model_path="model"))
    with pytest.raises(ConfigError, match="needs megatron-core"):
        engine.initialize()


def test_the_page_names_every_method_of_an_engine() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in ("initialize", "infer", "train_batch", "all_sum", "snapshot", "full_state", "save", "load", "close"):
        assert hasattr(Engine, name)
        assert f"`{name}" in text
