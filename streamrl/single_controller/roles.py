"""Which roles there are, and on which pool of ranks each lives. Roles of one pool share its processes.

manager = ResourcePoolManager({"main": [4], "critic": [2]}, {Role.ActorRolloutRef: "main", Role.Critic: "critic"})
manager.check(nodes_of_ray())                       # PlacementError before anything starts
group = RayWorkerGroup(manager.get_resource_pool(Role.Critic), ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from streamrl.single_controller.errors import PlacementError
from streamrl.single_controller.pool import ResourcePool, shown


class Role(Enum):
    """What a worker is for. The value is its name in a group of several roles."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "rm"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class ResourcePoolManager:
    """`resource_pool_spec`: ranks per node, by the pool's name; `mapping`: the pool of each role that there is.

    Raises PlacementError when a role is mapped to a pool that is not specified, or no role to one that is.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Role, str]
    device: Literal["cpu", "cuda"] = "cpu"
    cpus_per_rank: float = 1.0

    def __post_init__(self) -> None:
        names = ", ".join(sorted(self.resource_pool_spec)) or "none"
        for role, name in self.mapping.items():
            if not isinstance(role, Role):
                raise TypeError(f"mapping: {role!r} is no Role; there are: {', '.join(r.name for r in Role)}")
            if name not in self.resource_pool_spec:
                raise PlacementError(f"role {role.name} is mapped to pool {name!r}; the pools specified are: {names}")
        if idle := sorted(set(self.resource_pool_spec) - set(self.mapping.values())):
            raise PlacementError(f"pools {idle} have no role; map one to them, or leave them out of resource_pool_spec")
        for name in self.resource_pool_spec:
            self._pool(name)

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role. Raises PlacementError if the role has none."""
        if role not in self.mapping:
            mapped = ", ".join(known.name for known in self.mapping)
            raise PlacementError(f"role {role.name} is mapped to no pool; the roles mapped are: {mapped}")
        return self._pool(self.mapping[role])

    def roles_of(self, pool: str) -> list[Role]:
        """The roles that share the processes of a pool."""
        return [role for role, name in self.mapping.items() if name == pool]

    def check(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Raises PlacementError if the pools cannot all be placed at the same time on nodes with these resources.

        Looks at what all pools need together, at how many nodes each wants, and at the largest share of a node; what
        does not fit although these do is found when the ranks are placed.
        """
        pools = {name: self._pool(name) for name in self.resource_pool_spec}
        needed: dict[str, float] = {}
        for pool in pools.values():
            for kind, amount in pool.needed.items():
                needed[kind] = needed.get(kind, 0.0) + amount
        there = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in needed}
        if short := {kind: amount for kind, amount in needed.items() if amount > there[kind]}:
            raise PlacementError(
                f"pools {', '.join(f'{name} ({pool.world_size} ranks)' for name, pool in pools.items())} need "
                f"{shown(short)}; the cluster has {shown({kind: there[kind] for kind in short})}. Start fewer ranks, "
                "map roles to one pool, or tell Ray of more logical CPUs (ray_kwargs.ray_init.num_cpus)"
            )
        for name, pool in pools.items():
            if len(pool.process_on_nodes) > len(nodes):
                raise PlacementError(f"pool {name} is for {len(pool.process_on_nodes)} nodes; there are {len(nodes)}")
            for kind, amount in pool.per_rank.items():
                most, largest = max(pool.process_on_nodes) * amount, max(node.get(kind, 0.0) for node in nodes)
                if most > largest:
                    raise PlacementError(
                        f"pool {name}: {max(pool.process_on_nodes)} ranks on one node need {shown({kind: most})}; the "
                        f"largest node has {shown({kind: largest})}. Spread the pool over more nodes"
                    )

    def _pool(self, name: str) -> ResourcePool:
        return ResourcePool(list(self.resource_pool_spec[name]), self.device, self.cpus_per_rank)


def nodes_of_ray() -> list[dict[str, float]]:
    """The resources of each node that is alive, as Ray was told. Ray must be initialised."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
