"""Sharded checkpoints without pickle, loadable on any number of ranks.

    shards/shard-0000N-model-*.safetensors   rank N-1's part of model.*, exp_avg.*, exp_avg_sq.*; where it lies in the
                                             whole stands in the header, as torch's DCP reads it
    rng/<rank>.safetensors                   generator states
    state.json                               format, world size, optimizer step of each parameter, whether it is partial

Of a model of which a part is trained (adapters), only that part is saved: the rest is in the model's directory.
Nothing says which engine wrote it: what `fsdp2` saved, `ddp` loads, and the other way round.

    Shards.of(...)  ──hold()──► copies in host memory ──write()──► files
      collective       optional                          alone, in any thread, while the training goes on

torch's default DCP storage keeps a pickle beside its tensors; this one does not. Scalars are JSON. A directory is
complete when `write` has returned on all ranks; who calls it makes the whole visible at once.

A rank that did not exist at the save is seeded with a digest of rank 0's generator and its own number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from streamrl.errors import UserError

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
PLACES = "DCP_SHARDING_INFO"
"""In a shard's header: {tensor: {"saved_offsets": where its part begins in the whole}}, as DCP's reader wants it."""


class ForeignCheckpoint(UserError, ValueError):
    """A checkpoint of another model, or of another state than this one trains. The message names what differs."""


class HostMemory:
    """Buffers that the copies of one save after the other take; pinned for tensors of a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copies(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As they are now, on the CPU. Those of the copies before are overwritten."""
        found = {name: self._room_for(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            found[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = found
        return found

    def _room_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


@dataclass(slots=True)
class Shards:
    """What one rank writes."""

    directory: Path
    rank: int
    tensors: dict[str, torch.Tensor]
    """This rank's part of each tensor of which it has one."""
    places: dict[str, list[int]]
    """Where it begins in the whole."""
    rng: dict[str, torch.Tensor]
    state: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> Shards:
        """Collective. Clears what an unfinished save left in `directory`. The tensors are the model's own."""
        if rank == 0:
            (directory / "state.json").unlink(missing_ok=True)
            for path in (directory / "shards", directory / "rng"):
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
        dist.barrier()
        world = dist.get_world_size()
        places = {name: begin for name, begin in _places(_tensors(model, optimizer), rank, world)}
        parts = {name: _local(tensor) for name, tensor in _tensors(model, optimizer).items() if name in places}
        state = {
            "format": FORMAT, "world_size": world, "steps": _steps(model, optimizer), "partial": _partial(model),
        }  # fmt: skip
        return cls(directory, rank, parts, places, _rng_states(), state)

    def hold(self, memory: HostMemory) -> None:
        """Copy the tensors, so that the model may be trained before `write`."""
        self.tensors = memory.copies(self.tensors)

    def write(self) -> None:
        """This rank's files, on disk when it returns. Not collective."""
        name = self.directory / "shards" / f"shard-{self.rank + 1:05d}-model-00001-of-00001.safetensors"
        header = {PLACES: json.dumps({tensor: {"saved_offsets": begin} for tensor, begin in self.places.items()})}
        _save({tensor: part.cpu().contiguous() for tensor, part in self.tensors.items()}, name, header)
        _save(self.rng, self.directory / "rng" / f"{self.rank:05d}.safetensors", {})
        if self.rank == 0:
            with (self.directory / "state.json").open("w") as file:
                json.dump(self.state, file)
                file.flush()
                os.fsync(file.fileno())


def save(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> None:
    """Collective: all of it, at once."""
    Shards.of(directory, model, optimizer, rank=rank).write()
    dist.barrier()


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> None:
    """Collective. Raises FileNotFoundError, ForeignCheckpoint when `directory` is no checkpoint of this model."""
    path = directory / "state.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no finished actor checkpoint (no state.json)")
    state = json.loads(path.read_text())
    if state.get("format") != FORMAT:
        raise ForeignCheckpoint(f"{path}: format {state.get('format')!r}, this version reads {FORMAT}")
    if state.get("partial", False) != _partial(model):
        raise ForeignCheckpoint(
            f"{path} holds {'adapters only' if state.get('partial') else 'a whole model'}, and this model trains "
            f"{'adapters only' if _partial(model) else 'all its weights'}: model.lora_rank differs"
        )
    if optimizer is not None:
        _ready_optimizer(model, optimizer, state["steps"])
    tensors = _tensors(model, optimizer)
    reader = HuggingFaceStorageReader(str(directory / "shards"))
    _compare(directory, {n: tuple(m.size) for n, m in reader.read_metadata().state_dict_metadata.items()}, tensors)  # type: ignore[union-attr]
    state_dict_loader.load(tensors, storage_reader=reader)
    _restore_generator(directory / "rng", rank)
    dist.barrier()


def _compare(directory: Path, there: dict[str, tuple[int, ...]], here: dict[str, Any]) -> None:
    """Raises ForeignCheckpoint naming the first tensor that only one side has, or has in another shape."""
    for name in sorted(there.keys() | here.keys(), key=lambda name: (not name.startswith("model."), name)):
        own = name.removeprefix("model.")
        if name not in here and own == name:
            continue  # moments that this model has nothing to do with: it is frozen
        if name not in here:
            differs = f"holds {own}, which this model does not have"
        elif name not in there:
            differs = f"does not hold {own}, which this model has"
        elif there[name] != tuple(here[name].shape):
            differs = f"holds {own} as {list(there[name])}, and this model has it as {list(here[name].shape)}"
        else:
            continue
        raise ForeignCheckpoint(
            f"{directory} {differs}: it is of another model (actor_rollout_ref.model.path, model.lora_rank, "
            "critic.model.path)"
        )


def _save(tensors: dict[str, torch.Tensor], path: Path, header: dict[str, str]) -> None:
    """`header`: of one entry, since the library writes several in no order, and equal states are to be equal bytes.
    Raises OSError: the library has an error of its own for a full disk."""
    try:
        save_file(tensors, path, metadata=header)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _places(tensors: dict[str, Any], rank: int, world: int) -> Iterator[tuple[str, list[int]]]:
    """Of what this rank writes. A tensor that all ranks have whole is written by one of them, in turn."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    for i, item in enumerate(planner.create_local_plan().items):
        tensor, part = tensors[item.index.fqn], item.tensor_data
        assert part is not None
        if part.chunk.sizes.numel() and (isinstance(tensor, DTensor) or i % world == rank):
            yield item.index.fqn, list(part.chunk.offsets)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def _restore_generator(directory: Path, rank: int) -> None:
    own = directory / f"{rank:05d}.safetensors"
    if not own.is_file():  # the rank did not exist at the save
        first = load_file(directory / f"{0:05d}.safetensors")["cpu"]
        digest = hashlib.blake2b(first.numpy().tobytes() + rank.to_bytes(4, "little"), digest_size=7)
        torch.manual_seed(int.from_bytes(digest.digest(), "little"))
        return
    states = load_file(own)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
