"""Which ranks share rows: each rank says, per mesh, where it stands, and the group derives who gets what.

    rank         0  1  2  3        ranks 0 and 1 work on the same rows (each on its part of every sequence, say),
    dp_rank      0  0  1  1        as do 2 and 3: the group makes two shares,
    collects     x  .  x  .        and takes the results of ranks 0 and 2

A mesh has a name, since one rank may stand elsewhere in another (the engine's, the rollout's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.single_controller.errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """Of one rank in one mesh: which share it gets, and whether its result is the share's."""

    dp_rank: int
    collects: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Of all ranks in one mesh. Invariant: data-parallel ranks are 0..n-1, and exactly one rank collects for each."""

    dp_ranks: tuple[int, ...]
    """Of each rank."""
    collectors: tuple[int, ...]
    """The rank that collects, for each data-parallel rank."""

    @property
    def dp_size(self) -> int:
        return len(self.collectors)

    @classmethod
    def flat(cls, world_size: int) -> Layout:
        """Every rank has rows of its own, and collects."""
        return cls(tuple(range(world_size)), tuple(range(world_size)))

    @classmethod
    def of(cls, mesh: str, places: Sequence[Mapping[str, MeshPlace]]) -> Layout:
        """From what each rank knows. Raises MeshError if a rank does not know the mesh, or the invariant is broken."""
        for rank, known in enumerate(places):
            if mesh not in known:
                there = ", ".join(sorted(known)) or "none"
                raise MeshError(
                    f"rank {rank} has registered no place in mesh {mesh!r} (meshes it knows: {there}); call the method "
                    "that does so first (init_model), or see Worker._register_dispatch_collect_info"
                )
        here = [known[mesh] for known in places]
        dp_ranks = tuple(place.dp_rank for place in here)
        collectors: list[int] = []
        for dp_rank in range(max(dp_ranks) + 1):
            collecting = [rank for rank, place in enumerate(here) if place.dp_rank == dp_rank and place.collects]
            if len(collecting) != 1:
                raise MeshError(
                    f"mesh {mesh!r}: ranks {collecting} collect for data-parallel rank {dp_rank}; exactly one must. "
                    f"The ranks' data-parallel ranks are {list(dp_ranks)}"
                )
            collectors += collecting
        return cls(dp_ranks, tuple(collectors))
