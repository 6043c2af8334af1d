"""Sharded checkpoints without pickle, loadable on any number of ranks.

    shards/shard-0000N-model-*.safetensors   each rank's part of model.*, exp_avg.*, exp_avg_sq.*   (torch DCP, its
                                             safetensors storage: offsets stand in the files' headers)
    rng/<rank>.safetensors                   generator states
    state.json                               format, world size, optimizer step of each parameter, whether it is partial

Of a model of which a part is trained (adapters), only that part is saved: the rest is in the model's directory.
Nothing says which engine wrote it: what `fsdp2` saved, `ddp` loads, and the other way round.

torch's default DCP storage keeps a pickle beside its tensors; this one does not. Scalars are JSON. A directory is
complete when `save` has returned on all ranks; who calls it makes the whole visible at once.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> None:
    """Collective. Overwrites what an unfinished save left in `directory`."""
    shards, rng = directory / "shards", directory / "rng"
    if rank == 0:
        for path in (shards, rng):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
    dist.barrier()
    writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
    state_dict_saver.save(_tensors(model, optimizer), storage_writer=writer)
    save_file(_rng_states(), rng / f"{rank:05d}.safetensors")
    if rank == 0:
        state = {
            "format": FORMAT, "world_size": dist.get_world_size(), "steps": _steps(model, optimizer),
            "partial": _partial(model),
        }  # fmt: skip
        (directory / "state.json").write_text(json.dumps(state))
    dist.barrier()


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> None:
    """Collective. Raises FileNotFoundError, ValueError when `directory` is no checkpoint of this model."""
    path = directory / "state.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no finished actor checkpoint (no state.json)")
    state = json.loads(path.read_text())
    if state.get("format") != FORMAT:
        raise ValueError(f"{path}: format {state.get('format')!r}, this version reads {FORMAT}")
    if state.get("partial", False) != _partial(model):
        raise ValueError(
            f"{path} holds {'adapters only' if state.get('partial') else 'a whole model'}, and this model trains "
            f"{'adapters only' if _partial(model) else 'all its weights'}: model.lora_rank differs"
        )
    if optimizer is not None:
        _ready_optimizer(model, optimizer, state["steps"])
    state_dict_loader.load(
        _tensors(model, optimizer), storage_reader=HuggingFaceStorageReader(str(directory / "shards"))
    )
    own = directory / "rng" / f"{rank:05d}.safetensors"
    if own.is_file():  # a rank that did not exist at the save keeps its seed
        _set_rng_states(load_file(own))
    dist.barrier()


def _partial(model: nn.Module) -> bool:
    trained = [parameter.requires_grad for parameter in model.parameters()]
    return any(trained) and not all(trained)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """One flat dict of (sharded) tensors; loading copies into them in place."""
    tensors: dict[str, Any] = {}
    partial = _partial(model)
    for name, parameter in model.named_parameters():
        if partial and not parameter.requires_grad:
            continue
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS if optimizer and optimizer.state.get(parameter) else ():
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]  # type: ignore[union-attr]
    return tensors


def _ready_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, steps: dict[str, int]) -> None:
    """Room for what will be loaded: the state that AdamW itself makes for a parameter at its first gradient."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if name in steps:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(steps[name]), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """AdamW's step of each parameter that ever had a gradient."""
    if optimizer is None:
        return {}
    states = ((name, optimizer.state.get(parameter)) for name, parameter in model.named_parameters())
    return {name: int(state["step"]) for name, state in states if state}


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def _set_rng_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
