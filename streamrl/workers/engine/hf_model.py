"""A trained model as a directory that `transformers` opens: config, tokenizer, safetensors weights, under the model's
own names and in its own dtype. Adapters are merged, or written alone as `peft` writes them.

    live ranks ──full_state──┐
    shards of a checkpoint ──┴──► tensors by name ──► base model, its weights replaced ──► save_pretrained
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from streamrl.errors import UserError
from streamrl.workers.engine.checkpoint import FORMAT
from streamrl.workers.engine.lora import ADAPTER
from streamrl.workers.engine.settings import LoRASettings

TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "spiece.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Copied as they are, so that prompts are rendered afterwards as they were in training."""

Named = Mapping[str, torch.Tensor]


class ExportError(UserError):
    """What was asked for holds no model, or not this one."""


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars and load reports."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def read_trained(actor: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint's `actor` directory holds of the model, whole tensors by parameter, from any number of ranks.
    With adapters only those. Raises ExportError."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        state = json.loads((actor / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{actor} is no checkpoint of a model: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ExportError(f"{actor} holds no model (actor.strategy=sim has none), or one of another version")
    reader = HuggingFaceStorageReader(str(actor / "shards"))
    known = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)  # type: ignore[union-attr]
        for name, meta in known.items()
        if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, as it should be
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def write_model(base: str, tokenizer: str, trained: Named, out: Path, lora: LoRASettings | None = None) -> str:
    """The model of `base` with `trained` in place of its weights; its dtype. Adapters among them are merged: `lora`.

    Raises ExportError if `trained` is not of this model.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            base, dtype="auto", local_files_only=True, use_safetensors=True
        )
        weights = dict(model.named_parameters())
        found = dict(_merged(trained, weights, lora)) if lora else dict(trained)
        if wrong := sorted(name for name, tensor in found.items() if _shape(weights.get(name)) != _shape(tensor)):
            raise ExportError(f"{base} is not the model that was trained: {wrong[0]} has no such place in it")
        if not lora and (missing := sorted(weights.keys() - found.keys())):
            raise ExportError(f"{base} is not the model that was trained: nothing was trained for {missing[0]}")
        with torch.no_grad():
            for name, tensor in found.items():
                weights[name].copy_(tensor)
        model.save_pretrained(out)
    copy_tokenizer(Path(tokenizer), out)
    return str(model.dtype).removeprefix("torch.")


def write_adapter(base: str, tokenizer: str, trained: Named, out: Path, lora: LoRASettings) -> str:
    """The adapters alone, which `peft.PeftModel.from_pretrained` lays on the model of `base`; their dtype."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    adapters = {name: tensor for name, tensor in trained.items() if ADAPTER.fullmatch(name)}
    if not adapters:
        raise ExportError("there are no adapters: this model was trained as a whole (model.lora_rank=0)")
    # Named one by one: what "all-linear" means is not the same for every class of model around them.
    modules = sorted({found[1] for name in adapters if (found := ADAPTER.fullmatch(name))})
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=modules, task_type="CAUSAL_LM",  # type: ignore[arg-type]
        base_model_name_or_path=base, inference_mode=True,
    )  # fmt: skip
    config.save_pretrained(str(out))
    named = {f"base_model.model.{name.replace('.default.', '.')}": t.contiguous() for name, t in adapters.items()}
    save_file(named, out / "adapter_model.safetensors", metadata={"format": "pt"})
    copy_tokenizer(Path(tokenizer), out)
    return str(next(iter(adapters.values())).dtype).removeprefix("torch.")


def copy_tokenizer(source: Path, out: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)


def _merged(trained: Named, weights: Named, lora: LoRASettings) -> Iterator[tuple[str, torch.Tensor]]:
    """W + alpha / rank * B A, in the adapters' dtype, under the name of W; anything else as it is."""
    for name, tensor in trained.items():
        adapter = ADAPTER.fullmatch(name)
        if adapter is None:
            yield name, tensor
        elif adapter[2] == "B":
            place = f"{adapter[1]}.weight"
            if place not in weights:
                raise ExportError(f"adapters were trained for {place}, and the model has no such weight")
            a = trained[f"{adapter[1]}.lora_A.default.weight"]
            yield place, weights[place].detach().to(tensor.dtype) + lora.alpha / lora.rank * (tensor @ a)


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
