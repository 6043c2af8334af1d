"""FLOPs of a model by its config: against numbers worked out by hand, and against torch's own count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.workers.actor import ActorWorker
from streamrl.workers.flops import FlopCounter, ModelFlops, peak_tflops
from tests.workers.tiny import make_model, make_rows, settings

SMALL = {
    "model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip


def known(config: dict[str, Any], head: int | None = None) -> ModelFlops:
    found = ModelFlops.of(config, head=head)
    assert found is not None
    return found


def test_flops_of_a_small_model_by_hand() -> None:
    model = known(SMALL)
    # A layer: q and o 8·8 each, k and v 8·4 each, the MLP three times 8·16. The head: 8·32.
    assert model.weights == 2 * (64 + 64 + 32 + 32 + 384) + 256 == 1408
    assert model.attention == 2 * 2 * 4
    assert model.forward([3, 5]) == 2 * 1408 * 8 + 4 * 16 * (9 + 25) == 24_704
    assert model.training([3, 5]) == 6 * 1408 * 8 + 12 * 16 * (9 + 25) == 74_112
    assert model.training([3, 5], adapters=True) == 4 * 1408 * 8 + 12 * 16 * (9 + 25)
    assert known(SMALL, head=1).weights == 1408 - 256 + 8, "a value model has one output"


def test_only_the_experts_that_a_token_takes_count() -> None:
    config = {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
    }
    assert known(config).weights == 2 * (192 + 8 * 16 + 3 * 8 * 4 * 2) + 256
    shared = {**config, "shared_expert_intermediate_size": 32}
    assert known(shared).weights - known(config).weights == 2 * 3 * 8 * 32


def test_a_published_model_has_its_parameters_less_the_input_embeddings() -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    norms = (2 * 32 + 1) * 4096
    assert known(config).weights == 8_030_261_248 - 128256 * 4096 - norms  # Llama 3 8B: its model card's 8.03 B


def test_a_family_that_is_not_known_has_no_flops(tmp_path: Path) -> None:
    assert ModelFlops.of({"model_type": "gpt2", "n_embd": 8}) is None
    assert ModelFlops.at(str(tmp_path)) is None
    assert FlopCounter(None, 1e12).take(1.0) is None
    assert FlopCounter(known(SMALL), None).take(1.0) is None


def test_torch_counts_the_same(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    path = make_model(tmp_path, hidden=64)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 40, dtype=torch.long))
    flops = ModelFlops.at(path)
    assert flops is not None
    assert counter.get_total_flops() == pytest.approx(flops.forward([40]), rel=0.01)  # torch's has the rotary angles


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312),
     ("NVIDIA H20", 148), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA RTX A4000", None)],
)  # fmt: skip
def test_the_peak_is_that_of_the_data_sheet(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_utilisation_is_of_all_rows_that_were_computed_over_the_promised_peak(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    batch, store = make_rows(prompts=4, n=2)
    assert batch.extra_info is not None
    batch.extra_info["advantages"][batch.keys[0]] = 0.0  # it has no gradient, and is left out

    def metrics(peak: float | None) -> dict[str, float]:
        chosen = replace(settings(path, bypass=False, ppo_epochs=2), peak_tflops=peak)
        group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, chosen, store))
        group.init_model()
        try:
            return {**group.compute_log_prob(batch), **group.update_actor(batch)}
        finally:
            asyncio.run(group.close())

    found = metrics(1e-3)
    flops = ModelFlops.at(path)
    assert flops is not None
    lengths = [int(tag["seq_len"]) for tag in batch.tags]
    promised = 1e9 * found["actor/seconds/compute"]
    assert found["perf/mfu/actor"] == pytest.approx(2 * flops.training(lengths[1:]) / promised)
    at_least = flops.forward(lengths) / (1e9 * found["timing_s/old_log_prob"])  # which reads and writes rows, too
    assert at_least < found["perf/mfu/actor_infer"] < 10 * at_least
    assert not any(name.startswith("perf/mfu") for name in metrics(None)), "a CPU promises nothing"
