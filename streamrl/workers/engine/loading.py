"""Models from a directory: weights in the master dtype, heads, adapters, what the layers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from streamrl.workers.engine import attention, lora
from streamrl.workers.engine.sequence_parallel import check_heads
from streamrl.workers.engine.settings import EngineSettings

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def load_model(kind: str, settings: EngineSettings) -> Any:
    """A causal LM, or for "value_model" the same body with one output per token (new unless the directory has one), for
    "reward_model" with one output per row, which the directory must have.

    Equal on all ranks. Raises FileNotFoundError, ValueError, ConfigError saying what is missing.
    """
    from transformers import AutoConfig

    from streamrl.workers.engine.hf_model import quiet

    path = settings.model_path
    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"model.path={path!r}: no config.json there; give a model's directory")
    torch.manual_seed(settings.seed)  # of a new head and of adapters
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _check(config, settings)
    if kind == "value_model":
        config.num_labels, config.classifier_dropout = 1, 0.0
    elif kind == "reward_model" and config.num_labels != 1:
        raise ValueError(f"model.path={path!r}: it has {config.num_labels} labels; a reward model has one, its score")
    with quiet():
        lm, loaded = _auto(kind).from_pretrained(
            path, config=config, dtype=DTYPES[settings.fsdp.model_dtype], attn_implementation="sdpa",
            local_files_only=True, use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    if kind != "value_model" and (missing := sorted(loaded["missing_keys"])):
        raise ValueError(f"model.path={path!r}: its weights lack {len(missing)} tensors, the first {missing[0]}")
    if kind == "reward_model" and not isinstance(getattr(lm, "score", None), torch.nn.Linear):
        raise ValueError(
            f"model.path={path!r}: {type(lm).__name__} has no linear `score` of a row's last token; reward models that "
            "have one are those of decoder families (qwen2, llama, mistral, ...)"
        )
    if settings.optim is None:
        lm.requires_grad_(False)
    elif settings.lora is not None:
        lora.inject(lm, settings.lora)
    if settings.gradient_checkpointing and settings.optim is not None:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lm


def _auto(kind: str) -> Any:
    import transformers

    names = {"value_model": "TokenClassification", "reward_model": "SequenceClassification"}
    return getattr(transformers, f"AutoModelFor{names.get(kind, 'CausalLM')}")


def pack_attention(lm: Any, settings: EngineSettings) -> bool:
    """Whether its rows will be packed: asked for, and its attention can be exchanged."""
    can = bool(getattr(lm, "_supports_attention_backend", False))
    if settings.sequence_parallel > 1 and not can:
        raise ValueError(f"model type {lm.config.model_type} has no exchangeable attention: no sequence parallelism")
    if settings.packed and can:
        attention.register()
        lm.set_attn_implementation(attention.NAME)
    return settings.packed and can


def _check(config: Any, settings: EngineSettings) -> None:
    if settings.sequence_parallel > 1:
        heads = config.num_attention_heads
        check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, settings.sequence_parallel)
