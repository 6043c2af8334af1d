"""The forward pass is the model's own, for every kind of head, bias and rotary table it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamrl.rollout.torch.decoder import Decoder, UnsupportedModel, check_supported

ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "one key head, llama3 rope": {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "yarn rope": {"num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": ROPE | {"rope_type": "yarn"}},
    "biases, own head size": {"num_attention_heads": 3, "head_dim": 20, "attention_bias": True, "mlp_bias": True},
    "eight queries per key": {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
}


def model(changes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256, initializer_range=0.2, **changes))
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return made.eval().requires_grad_(False)


def compare(changes: dict[str, Any], device: str) -> float:
    """The largest difference in log-probs: a ragged prefill into rows 2..4, three more tokens each, one by one."""
    reference = model(changes)
    decoder = Decoder(model(changes).to(device), rows=6, max_len=160)
    ids = torch.randint(0, 97, (3, 133))
    lengths = torch.tensor([130, 2, 61])
    with torch.inference_mode():
        wanted = torch.log_softmax(reference(ids).logits, -1)
    start, count = torch.zeros(3, dtype=torch.long, device=device), lengths.to(device)
    worst = 0.0
    for step in range(4):
        if step == 0:
            logits = decoder.forward(2, ids[:, :130].to(device), start, count, 130)
        else:
            at = lengths + step - 1
            token = ids[torch.arange(3), at][:, None]
            logits = decoder.forward(2, token.to(device), at.to(device), None, int(at.max()) + 1)
        difference = torch.log_softmax(logits, -1).cpu() - wanted[torch.arange(3), lengths + step - 1]
        worst = max(worst, float(difference.abs().max()))
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_a_full_forward(variant: str) -> None:
    assert compare(VARIANTS[variant], "cpu") < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_a_full_forward_on_a_gpu(variant: str) -> None:
    assert compare(VARIANTS[variant], "cuda") < 1e-3


def test_a_copied_row_goes_on_like_its_source() -> None:
    decoder = Decoder(model({"num_attention_heads": 4}), rows=4, max_len=32)
    ids, none = torch.randint(0, 97, (1, 9)), torch.zeros(1, dtype=torch.long)
    decoder.forward(0, ids, none, torch.tensor([9]), 9)
    decoder.copy_row(0, 3, 9)
    again = torch.tensor([[5]]), torch.tensor([9]), None, 10
    assert torch.equal(decoder.forward(0, *again), decoder.forward(3, *again))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 16}, "16"),
    ],
)
def test_models_without_a_forward_here_are_refused(change: dict[str, Any], named: str) -> None:
    config = model({"num_attention_heads": 4}).config
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(UnsupportedModel, match=named):
        check_supported(config, 64)
