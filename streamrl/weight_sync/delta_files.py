"""Deltas in a directory beside the full versions they begin at: written by all ranks, read by servers.

    v00000040.safetensors     a full version: every `full_every`, and when there is no base
    v00000041.delta/          MANIFEST.json {version, ranks, chain, tensors}, part-0000.safetensors, ... of each rank
    v00000042.delta/          chain: [v00000040.safetensors, v00000041.delta, v00000042.delta]

A server that has the version before (`chain[-2]`) changes a copy of what it serves; any other reads the chain from its
full version. Either way the checksums of every rank's part of every tensor must be those of the trainer. The directory
of a delta appears by rename, and what a kept version's chain needs is kept.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.weight_sync.layout import MAX_HEADER, WIDTHS, metadata
from streamrl.weight_sync.mapped import GONE, map_tensors, torch_types
from streamrl.weight_sync.plan import source_box
from streamrl.weight_sync.protocol import WeightsDamaged, WeightsMismatch, WeightsMissing
from transfer_queue.storage.private import read_regular

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "MANIFEST.json"
SUFFIX = ".delta"


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    ranks: int
    chain: tuple[str, ...]
    """Names: a full version, the deltas after it, this one."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type by safetensors' name, and shape."""

    @property
    def base(self) -> int:
        return version_of(self.chain[-2])

    def to_json(self) -> str:
        tensors = {name: [dtype, list(shape)] for name, (dtype, shape) in self.tensors.items()}
        return json.dumps(
            {"version": self.version, "ranks": self.ranks, "chain": list(self.chain), "tensors": tensors}
        )  # fmt: skip


def version_of(name: str) -> int:
    """Raises ValueError for what is no name of a version."""
    stem, _, kind = name.partition(".")
    if not (stem[:1] == "v" and stem[1:].isdigit() and kind in ("safetensors", "delta")):
        raise ValueError(f"{name!r} is no version's name")
    return int(stem[1:])


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Raises WeightsMissing, WeightsDamaged."""
    path = Path(directory) / MANIFEST
    try:
        given = json.loads(read_regular(path))
        found = Manifest(
            int(given["version"]), int(given["ranks"]), tuple(map(str, given["chain"])),
            {str(n): (str(dtype), tuple(map(int, shape))) for n, (dtype, shape) in given["tensors"].items()},
        )  # fmt: skip
        numbers = [version_of(name) for name in found.chain]
        if len(numbers) < 2 or numbers[-1] != found.version or found.ranks < 1:
            raise ValueError("its chain does not lead to it")
        if any(dtype not in WIDTHS for dtype, _ in found.tensors.values()):
            raise ValueError("types that are not known")
    except FileNotFoundError as error:
        raise WeightsMissing(GONE.format(directory)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightsDamaged(f"{path} is no manifest of a delta ({error}); publish again") from error
    return found


def part_name(rank: int) -> str:
    return f"part-{rank:04d}.safetensors"


def chain_of(directory: Path, name: str) -> set[str]:
    """The names without which version `name` cannot be read, its own among them."""
    if not name.endswith(SUFFIX):
        return {name}
    try:
        return {name, *read_manifest(directory / name).chain}
    except (WeightsMissing, WeightsDamaged):
        return {name}


def read_chain(path: str) -> dict[str, Tensor]:
    """All tensors of a delta's version, from its full version on. Raises WeightsMissing, WeightsDamaged."""
    directory, manifest = Path(path).parent, read_manifest(path)
    tensors = map_tensors(str(directory / manifest.chain[0]))  # private: what is changed here changes here alone
    for name in manifest.chain[1:]:
        change(directory / name, read_manifest(directory / name), tensors)
    return tensors


def change(directory: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """From the version before, in place. Raises WeightsMissing, WeightsDamaged (also: these were not that version, or
    they are not on a CPU), and then they are half changed."""
    from streamrl.weight_sync import delta

    for rank in range(manifest.ranks):
        parts, checksums = _part(directory, rank)
        for name, flat in _shares(manifest, tensors, rank):
            try:
                delta.apply(name, flat, parts)
            except ValueError as error:
                raise WeightsDamaged(f"{directory / part_name(rank)}: {error}") from error
            if delta.checksum(flat) != checksums.get(name):
                raise WeightsDamaged(
                    f"{directory}: {name}, as rank {rank} trains it, has another checksum after the change"
                )


def changed(directory: Path, manifest: Manifest, served: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are not as in `served`, of the version before: copies, on the CPU. What is served in a wider
    type than travels is that version still, since it was rounded before. Raises WeightsMissing, WeightsDamaged (also:
    `served` is not that version), WeightsMismatch (another shape)."""
    from streamrl.weight_sync import delta

    types = torch_types()
    for name, (dtype, shape) in manifest.tensors.items():
        tensor = served.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            raise WeightsMismatch(f"{name} is not served as {dtype} {shape}")
    names: set[str] = set()
    for rank in range(manifest.ranks):
        parts, _ = _part(directory, rank)
        names |= {name for name in manifest.tensors if delta.changes(name, parts)}
    after = {
        name: served[name].detach().to("cpu", types[dtype], copy=name in names).contiguous()
        for name, (dtype, _) in manifest.tensors.items()
    }  # fmt: skip
    change(directory, manifest, after)
    return {name: after[name] for name in names}


def write_part(path: Path, rank: int, parts: Mapping[str, Tensor], checksums: Mapping[str, str]) -> None:
    """What one rank changes. Raises OSError."""
    import torch

    from streamrl.weight_sync.saving import save

    tensors = dict(parts) or {"none": torch.empty(0)}
    save(tensors, path / part_name(rank), {"checksums": json.dumps(dict(checksums))})


def _part(directory: Path, rank: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    path = directory / part_name(rank)
    parts = map_tensors(str(path))
    try:
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER)
            checksums: Any = json.loads(metadata(file.read(length))["checksums"])
        if not isinstance(checksums, dict):
            raise ValueError("its checksums are no object")
    except (ValueError, KeyError) as error:
        raise WeightsDamaged(f"{path} is no part of a delta ({error}); publish again") from error
    return parts, checksums


def _shares(manifest: Manifest, tensors: Mapping[str, Tensor], rank: int) -> Sequence[tuple[str, Tensor]]:
    """What a rank has of each tensor, flat: views."""
    found: list[tuple[str, Tensor]] = []
    for name, (_, shape) in manifest.tensors.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise WeightsDamaged(f"{name}: the full version has none of shape {shape}")
        rows, inner = source_box(shape, rank, manifest.ranks)[0], math.prod(shape[1:])
        found.append((name, tensors[name].reshape(-1)[rows.start * inner : rows.stop * inner]))
    return found
