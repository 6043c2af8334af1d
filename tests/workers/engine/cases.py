"""A training run of a few steps on an engine, and the same in plain PyTorch: one process, one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config.sections.actor import FSDPConfig, OptimConfig
from streamrl.single_controller.worker import RankInfo
from streamrl.workers.batch import MicroBatching, Rows
from streamrl.workers.engine import EngineRegistry, EngineSettings, LoRASettings

VOCAB, STEPS, LR, TEMPERATURE = 64, 5, 1e-3, 0.8
OPTIM = OptimConfig(lr=LR, weight_decay=0.01)


def make_models(directory: Path) -> dict[str, Path]:
    """Random causal LMs of two families."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**common, num_key_value_heads=2, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=4, tie_word_embeddings=False)),
    }
    for name, model in made.items():
        model.save_pretrained(directory / name)
    return {name: directory / name for name in made}


@dataclass(frozen=True)
class Case:
    backend: str = "fsdp2"
    ranks: int = 1
    kind: str = "language_model"
    model: str = "qwen2"
    packed: bool = True
    micro: MicroBatching = field(default_factory=lambda: MicroBatching(max_tokens=90))
    sequence_parallel: int = 1
    checkpointing: bool = False
    fsdp: FSDPConfig = field(default_factory=lambda: FSDPConfig(model_dtype="fp64"))
    lora: LoRASettings | None = None
    rows: int = 11

    def settings(self, models: dict[str, Path], **options: Any) -> EngineSettings:
        chosen: dict[str, Any] = {
            "model_path": str(models[self.model]), "gradient_checkpointing": self.checkpointing, "packed": self.packed,
            "optim": OPTIM, "fsdp": self.fsdp, "sequence_parallel": self.sequence_parallel, "entropy_grad": True,
            "lora": self.lora,
        }  # fmt: skip
        return EngineSettings(**chosen | options)

    def start(self, rank: RankInfo, models: dict[str, Path], **options: Any) -> Any:
        engine = EngineRegistry.get(self.kind, self.backend)(rank, self.settings(models, **options))
        engine.initialize()
        return engine

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


def make_rows(count: int, seed: int = 3) -> Rows:
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(2, 9, count), [int(r) for r in rng.integers(3, 40, count)]
    ids = [rng.integers(0, VOCAB, p + r) for p, r in zip(prompts, responses, strict=True)]
    columns = {
        "loss_mask": [(rng.random(r) < 0.8).astype(np.float64) for r in responses],
        "old": [rng.normal(-4.0, 0.3, r) for r in responses],
        "target": [rng.normal(0.0, 1.0, r) for r in responses],
    }
    return Rows(ids, responses, columns)


def mine(rows: Rows, engine: Any) -> list[int]:
    return list(range(len(rows)))[engine.dp_rank :: engine.dp_size]


def loss_of(kind: str, tokens: float) -> Callable[[Any], Any]:
    """Of a language model a surrogate per token, one per row and an entropy bonus; of a value model squared errors."""
    import torch

    def language(out: Any) -> Any:
        mask, target = out.columns["loss_mask"], out.columns["target"]
        log_ratio = (out.log_probs - out.columns["old"]) * mask
        rows = torch.zeros(int(out.row.max()) + 1, dtype=log_ratio.dtype).index_add(0, out.row, log_ratio)
        per_token = -target * log_ratio.exp() - 0.1 * out.entropy - 0.1 * (0.1 * rows[out.row]).exp()
        loss = (per_token * mask).sum() / tokens
        return loss, {"loss": loss.detach(), "tokens": mask.sum(), "rollout_k3_kl": (log_ratio**2).sum().detach()}

    def value(out: Any) -> Any:
        assert out.log_probs is None
        mask, target = out.columns["loss_mask"], out.columns["target"]
        loss = ((out.values - target) ** 2 * mask).sum() / tokens
        return loss, {"loss": loss.detach()}

    return language if kind == "language_model" else value


def train(rank: RankInfo, argument: tuple[Case, dict[str, Path]]) -> dict[str, Any]:
    """Losses and gradient norms of the steps, and what the trained model infers: {index: f[R]} of this rank's rows."""
    case, models = argument
    engine = case.start(rank, models)
    rows = make_rows(case.rows)
    chosen = mine(rows, engine)
    part = rows.take(chosen)
    tokens = float(engine.all_sum(np.array([sum(mask.sum() for mask in part.columns["loss_mask"])]))[0])
    curve, norms, micro_batches = [], [], []
    for _ in range(STEPS):
        step = engine.train_batch(
            part, loss_of(case.kind, tokens), lr=LR, temperature=TEMPERATURE, micro=case.micro
        )  # fmt: skip
        curve.append(float(engine.all_sum(np.array([step.sums.get("loss", 0.0)]))[0]))
        norms.append(step.grad_norm)
        micro_batches.append(step.micro_batches)
    found = engine.infer(part, temperature=TEMPERATURE, micro=case.micro)
    engine.close()
    return {
        "curve": curve, "norms": norms, "micro_batches": micro_batches, "tokens": tokens, "rows": chosen,
        "inferred": {name: dict(zip(chosen, column, strict=True)) for name, column in found.items()},
    }  # fmt: skip


class Reference:
    """Plain PyTorch in float64."""

    def __init__(self, model: Path, kind: str, rows: int = 11) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

        torch.manual_seed(EngineSettings(model_path="").seed)
        auto: Any = AutoModelForCausalLM if kind == "language_model" else AutoModelForTokenClassification
        config = AutoConfig.from_pretrained(model)
        config.num_labels, config.classifier_dropout = 1, 0.0
        self.model = auto.from_pretrained(model, config=config, dtype=torch.float64, attn_implementation="sdpa")
        self.kind, self.rows = kind, make_rows(rows)

    def outputs(self, index: int) -> dict[str, Any]:
        """f[R] each, of one row."""
        import torch

        ids, response = torch.from_numpy(self.rows.input_ids[index])[None], self.rows.responses[index]
        logits = self.model(input_ids=ids, use_cache=False).logits[0, -response - 1 : -1]
        if self.kind == "value_model":
            return {"values": logits[:, 0]}
        logs = torch.log_softmax(logits / TEMPERATURE, -1)
        return {
            "log_probs": logs.gather(1, ids[0, -response:, None])[:, 0], "entropy": -(logs.exp() * logs).sum(-1),
        }  # fmt: skip

    def train(self) -> dict[str, Any]:
        import torch

        from streamrl.workers.engine import TokenOutputs

        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=OPTIM.weight_decay)
        tokens = float(sum(mask.sum() for mask in self.rows.columns["loss_mask"]))
        curve, norms = [], []
        for _ in range(STEPS):
            total = torch.zeros((), dtype=torch.float64)
            for i in range(len(self.rows)):
                columns = {name: torch.from_numpy(column[i]) for name, column in self.rows.columns.items()}
                found: dict[str, Any] = {"log_probs": None, "entropy": None} | self.outputs(i)
                row = torch.zeros(self.rows.responses[i], dtype=torch.int64)
                total = total + loss_of(self.kind, tokens)(TokenOutputs(row=row, columns=columns, **found))[0]
            total.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(total.detach()))
        with torch.no_grad():
            inferred = [self.outputs(i) for i in range(len(self.rows))]
        return {"curve": curve, "norms": norms, "inferred": inferred}
