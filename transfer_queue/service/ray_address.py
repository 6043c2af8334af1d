"""How processes of one Ray cluster find the queue: an actor without a CPU that only knows its address.

It is named as TransferQueue's controller is, so that all processes of a cluster share a queue as they do there, and it
dies with the process that started the queue. A RayQueue is found without it, by the name of its own actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from transfer_queue.errors import Disconnected, Invalid
from transfer_queue.service.ray_queue import HEAD, NAMESPACE

NAME = "TransferQueueController"

WAIT = 60.0
"""Seconds that a process waits for another one, which has begun to start a queue, to have started it."""


class _AddressBook:
    """The actor: the first address that is published stays."""

    def __init__(self) -> None:
        self._address: dict[str, str] | None = None
        self._known = asyncio.Event()

    async def publish(self, address: dict[str, str]) -> dict[str, str]:
        """The address that holds: this one, or the one that came before."""
        if self._address is None:
            self._address = address
            self._known.set()
        return self._address

    async def address(self, wait: float) -> dict[str, str] | None:
        """The address, once somebody has published one; None if nobody did in time."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._known.wait(), wait)
        return self._address


class RayAddress:
    """A handle on the actor. Every method is for a process in which Ray is initialised; `find` and `offer` tell."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def find(cls, directory: str | None = None) -> dict[str, str] | None:
        """The address that was published in this Ray cluster, else that of its RayQueue (with `directory`, of the one
        there); None without Ray, or if nobody has started a queue.

        Raises Disconnected if somebody began to and did not come to an end, Invalid for several RayQueues.
        """
        ray = _ray()
        if ray is None:
            return None
        try:
            actor = ray.get_actor(NAME, namespace=NAMESPACE)
            address = ray.get(actor.address.remote(WAIT), timeout=2 * WAIT)
        except (ValueError, ray.exceptions.RayActorError):  # there is none, or it died with who made it
            return _of_ray_queue(ray, directory)
        if address is None:
            raise Disconnected(
                f"another process has begun to start a queue and did not in {WAIT:.0f} s; look at its log"
            )
        return address

    @classmethod
    def offer(cls) -> RayAddress | None:
        """The actor, made if need be, without waiting for it; None without Ray."""
        ray = _ray()
        if ray is None:
            return None
        options = {"name": NAME, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
        return cls(ray.remote(_AddressBook).options(**options).remote())

    def publish(self, address: dict[str, str]) -> dict[str, str]:
        """The address that holds for this cluster: this one unless another process was quicker."""
        ray = _ray()
        return ray.get(self._actor.publish.remote(address), timeout=2 * WAIT)

    def withdraw(self) -> None:
        """The queue ends: whoever comes now starts another."""
        ray = _ray()
        if ray is not None:
            ray.kill(self._actor)


def _of_ray_queue(ray: Any, directory: str | None) -> dict[str, str] | None:
    """The address of the RayQueue that runs in this cluster, and in `directory`."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    heads = [one["name"] for one in actors if one["namespace"] == NAMESPACE and HEAD in one["name"]]
    found: dict[str, dict[str, str]] = {}
    for name in heads:
        try:
            address = ray.get(ray.get_actor(name, namespace=NAMESPACE).address.remote(), timeout=WAIT)
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError):  # it ended, or never began
            continue
        except ray.exceptions.GetTimeoutError:
            raise Disconnected(
                f"the queue of Ray actor {name!r} did not start in {WAIT:.0f} s; look at its log"
            ) from None
        found[str(Path(address["key_file"]).parent)] = address
    if directory is not None:
        return found.get(str(Path(directory).absolute()))
    if len(found) > 1:
        there = ", ".join(f"{address['run']} in {place}" for place, address in sorted(found.items()))
        raise Invalid(
            f"init: this Ray cluster has {len(found)} queues: {there}; give the `directory` or `address` of one"
        )
    return next(iter(found.values()), None)


def spans_nodes() -> bool:
    """Whether this process has Ray, on a cluster of more than one node."""
    ray = _ray()
    return ray is not None and sum(node["Alive"] for node in ray.nodes()) > 1


def _ray() -> Any:
    """Ray, if this process has initialised it."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
