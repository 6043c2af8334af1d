"""Which resources a group's ranks take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """`process_on_nodes[i]` ranks on the i-th node, each with `cpus_per_rank` of Ray's logical CPUs and, with device
    "cuda", one GPU. Logical CPUs only count: 0 lets a group start whatever else the machine runs."""

    process_on_nodes: tuple[int, ...]
    device: Literal["cpu", "cuda"] = "cpu"
    cpus_per_rank: float = 1.0

    def __init__(
        self, process_on_nodes: list[int] | tuple[int, ...], device: Literal["cpu", "cuda"] = "cpu",
        cpus_per_rank: float = 1.0,
    ) -> None:  # fmt: skip
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise ValueError(
                f"ResourcePool: process_on_nodes={list(process_on_nodes)}; each node needs at least one rank"
            )
        object.__setattr__(self, "process_on_nodes", tuple(process_on_nodes))
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "cpus_per_rank", cpus_per_rank)

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def per_rank(self) -> dict[str, float]:
        """Ray resources of one rank; empty if it takes none."""
        wanted = {"CPU": float(self.cpus_per_rank), "GPU": 1.0 if self.device == "cuda" else 0.0}
        return {name: amount for name, amount in wanted.items() if amount}

    @property
    def needed(self) -> dict[str, float]:
        return {name: amount * self.world_size for name, amount in self.per_rank.items()}


def shown(amounts: Mapping[str, float]) -> str:
    """Amounts of Ray's resources, for a message."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in amounts.items())
