"""A causal language model for inference, from the directory where it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_model(path: str, *, device: str, dtype: str, max_model_len: int) -> Any:
    """A causal LM for inference. Raises ValueError with what to do."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a server writes nothing over the terminal view
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model path {path!r}: no config.json there; give the directory of a saved Hugging Face model")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is no torch floating point type; use float32, bfloat16 or float16")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
    model = model.to(device).eval().requires_grad_(False)
    limit = getattr(model.config, "max_position_embeddings", max_model_len)
    if max_model_len > limit:
        raise ValueError(f"max_model_len {max_model_len} > the model's max_position_embeddings {limit}; lower it")
    return model
