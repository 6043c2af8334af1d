"""What a rank does in the tests of weights: adapters, snapshots, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from streamrl.single_controller.worker import RankInfo
from tests.workers.engine.cases import LR, Case, loss_of, make_rows, mine

Job = tuple[Case, dict[str, Path], str]
"""Case, models, directory."""


class Trainer:
    """An engine with this rank's share of the rows."""

    def __init__(self, rank: RankInfo, case: Case, models: dict[str, Path]) -> None:
        self.case, self.engine = case, case.start(rank, models)
        rows = make_rows(case.rows)
        self.rows = rows.take(mine(rows, self.engine))

    def step(self) -> float:
        tokens = self._sum(float(sum(mask.sum() for mask in self.rows.columns["loss_mask"])))
        step = self.engine.train_batch(
            self.rows, loss_of(self.case.kind, tokens), lr=10 * LR, temperature=1.0, micro=self.case.micro
        )
        return self._sum(step.sums.get("loss", 0.0))

    def infer(self, weights: str = "current") -> np.ndarray:
        """f[T] of this rank's rows."""
        found = self.engine.infer(self.rows, temperature=1.0, micro=self.case.micro, weights=weights)
        return np.concatenate(next(iter(found.values())))

    def state(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.engine.full_state()}

    def everything(self) -> dict[str, np.ndarray]:
        """Trained weights and both moments, whole, and AdamW's steps: bytes for bytes. Collective."""
        found: dict[str, np.ndarray] = {}
        for name, parameter in self.engine.module.lm.named_parameters():
            state = self.engine.optimizer.state.get(parameter, {}) if parameter.requires_grad else {}
            for what, tensor in {"weight": parameter.detach(), **state}.items():
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[f"{what} {name}"] = whole.numpy().copy()
        return found

    def _sum(self, value: float) -> float:
        return float(self.engine.all_sum(np.array([value]))[0])


def keep_a_snapshot(rank: RankInfo, job: Job) -> dict[str, Any]:
    trainer = Trainer(rank, job[0], job[1])
    trainer.step()
    before = trainer.infer()
    trainer.engine.snapshot()
    trainer.step()
    after = trainer.infer()
    found = {"before": before, "after": after, "snapshot": trainer.infer("snapshot"), "again": trainer.infer()}
    trainer.step()
    found["later"] = trainer.infer("snapshot")
    trainer.engine.close()
    return found


def train_and_save(rank: RankInfo, job: Job) -> dict[str, Any]:
    """Two steps, saved; then a third."""
    trainer = Trainer(rank, job[0], job[1])
    trainer.step()
    trainer.step()
    trainer.engine.save(job[2])
    found = {"state": trainer.state(), "all": trainer.everything(), "rng": generator(), "next": trainer.step()}
    trainer.engine.close()
    return found


def save_and_train_meanwhile(rank: RankInfo, job: Job) -> dict[str, Any]:
    """Held after two steps, written after a third; and again, so that the same memory serves twice."""
    trainer = Trainer(rank, job[0], job[1])
    found: dict[str, Any] = {}
    for directory in ("first", "second"):
        trainer.step()
        trainer.step()
        found["all"] = trainer.everything()
        write = trainer.engine.hold(f"{job[2]}/{directory}")
        found["next"] = trainer.step()
        write()
    trainer.engine.close()
    return found


def generator() -> bytes:
    import torch

    return torch.get_rng_state().numpy().tobytes()


def load_and_train(rank: RankInfo, job: Job) -> dict[str, Any]:
    trainer = Trainer(rank, job[0], job[1])
    trainer.engine.load(job[2])
    found = {"state": trainer.state(), "all": trainer.everything(), "rng": generator(), "next": trainer.step()}
    trainer.engine.close()
    return found


def train_adapters(rank: RankInfo, job: Job) -> dict[str, Any]:
    trainer = Trainer(rank, job[0], job[1])
    base = trainer.infer("reference")
    curve = [trainer.step() for _ in range(3)]
    found = {
        "base": base, "curve": curve, "reference": trainer.infer("reference"), "current": trainer.infer(),
        "state": trainer.state(), "next": trainer.step(), "rows": trainer.rows,
    }  # fmt: skip
    trainer.engine.close()
    return found
