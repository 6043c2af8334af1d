"""The queue on a Ray cluster: the controller on this node, storage units on every node.

    queue = RayQueue("runs/1/queue")
    address = await queue.astart()      # for QueueClient.connect, on any node
    await queue.astop()

    QueueHead   actor on this node      controller and the units of this node (a QueueService)
    UnitNode    actor on each other     the units there (a UnitService)

The actors only start and supervise plain processes. A killed QueueHead is started again by Ray and goes on from the
journal; the units of other nodes meanwhile serve reads. A node that is gone takes its rows with it: they are given up
after `unit_lost_after` seconds and their groups issued again. A node that joins gets units within NODES_EVERY.

Names of actors and storage directories begin with the run's name, so several runs share a cluster. The key goes to
other nodes as an argument of an actor's method (Ray's authenticated RPC) and lies there in a file of mode 0600, at the
same path.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from pathlib import Path
from typing import Any

from transfer_queue.errors import DeadlineExceeded, Invalid, QueueError
from transfer_queue.net.loop import LoopThread
from transfer_queue.net.transport import read_key
from transfer_queue.service.node import UnitService, read_node
from transfer_queue.service.queue_service import QueueService, read_run
from transfer_queue.storage.private import private_directory, text_if_there
from transfer_queue.storage.unit_files import replace_file

log = logging.getLogger(__name__)

NODES_EVERY = 5.0
"""Seconds between two looks at the list of nodes, one small request to Ray each: it lets nobody but its own dashboard
wait for a node that joins. Nothing hangs on it but how soon that node has units: of deaths the controller knows."""

NAMESPACE = "transfer_queue"

HEAD = "-head-"
"""What stands in the names of QueueHeads alone, between their run and a token."""

ACTOR_TIMEOUT = 60.0
"""Seconds that an actor's start may take, Ray's own part included."""


class QueueHead:
    """The actor on the controller's node. Restarted by Ray, it goes on from the journal in `directory`."""

    def __init__(self, directory: str, network: bool, settings: dict[str, Any]) -> None:
        self._failure: QueueError | None = None
        try:
            self._service = QueueService(directory, bind=_node_ip() if network else None, **settings)
            self._service.start()
        except QueueError as error:  # an actor whose constructor raises would only say that it died
            self._failure = error

    async def address(self) -> dict[str, str]:
        """Raises the QueueError that kept the queue from starting."""
        if self._failure is not None:
            raise self._failure
        return self._service.address

    async def pids(self) -> dict[str, int]:
        return self._service.pids()

    async def stop(self, clean: bool) -> None:
        if self._failure is None:
            await self._service.astop(clean=clean)


class UnitNode:
    """The actor on another node. Restarted by Ray, it starts again what it had started before."""

    def __init__(self, directory: str, address: dict[str, str], settings: dict[str, Any]) -> None:
        self._directory, self._address, self._settings = Path(directory), address, settings
        self._service: UnitService | None = None
        if _was_restarted() and (known := read_node(self._directory)):
            self._start(known["units"])

    async def known(self) -> list[int]:
        """Numbers of the units whose bytes are here."""
        return _units_here(self._directory)

    async def start(self, key: str, units: list[int]) -> None:
        """Raises the QueueError that keeps the units from starting."""
        _keep_key(Path(self._address["key_file"]), key)
        await asyncio.to_thread(self._start, units)

    async def pids(self) -> dict[str, int]:
        return self._service.pids() if self._service is not None else {}

    async def stop(self, clean: bool) -> None:
        if self._service is not None:
            await self._service.astop(clean=clean)

    def _start(self, units: list[int]) -> None:
        if self._service is None:
            service = UnitService(self._directory, self._address, units=units, bind=_node_ip(), **self._settings)
            service.start()
            self._service = service


class RayQueue:
    """See the module. Belongs to the event loop that starts it (`start` has one of its own), in a process where Ray is
    initialised: a driver or an actor, with which the queue's actors end (its directory stays, and another RayQueue goes
    on from there)."""

    def __init__(
        self, directory: str | Path, *, units_per_node: int = 1, network: bool | None = None,
        storage_dir: str | Path | None = None, unit_budget_bytes: int | None = None, segment_bytes: int = 8 << 20,
        spill_dir: str | Path | None = None, spill_budget_bytes: int | None = None, encrypt_bulk: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        """`network`: whether other nodes can reach it (default: if there are any now). Directories, budgets and segment
        size hold on every node; `settings` are further ones of QueueService."""
        if units_per_node < 1:
            raise Invalid(f"units_per_node={units_per_node}; expected at least 1")
        self.directory = Path(directory).absolute()
        self.run = read_run(self.directory).get("run") or secrets.token_hex(6)
        self._per_node = units_per_node
        self._network = network
        shared = {"unit_budget_bytes": unit_budget_bytes, "segment_bytes": segment_bytes, "encrypt_bulk": encrypt_bulk}
        shared |= {"spill_budget_bytes": spill_budget_bytes}
        places = {"storage_dir": storage_dir, "spill_dir": spill_dir}
        self._units = shared | {name: None if place is None else str(place) for name, place in places.items()}
        self._head_settings = self._units | settings | {"units": units_per_node, "run": self.run}
        self._head: Any = None
        self._nodes: dict[str, Any] = {}  # Ray's node id -> UnitNode
        self._places: dict[str, str] = {}  # Ray's node id -> name of its directory
        self._watching: asyncio.Task[None] | None = None
        self._thread: LoopThread | None = None
        self._token = secrets.token_hex(3)  # actors of a driver that has just died may not be gone yet

    def start(self) -> dict[str, str]:
        """`astart` for callers without an event loop; end it by `stop`."""
        self._thread = LoopThread("queue-cluster")
        try:
            return self._thread.run(self.astart())
        except BaseException:
            self.stop(clean=True)
            raise

    def stop(self, *, clean: bool = False) -> None:
        """`astop` of what `start` started."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self.astop(clean=clean))
            finally:
                thread.close()

    async def astart(self) -> dict[str, str]:
        """The address, once the controller and the units of all nodes serve. Raises QueueError."""
        import ray

        network = self._network if self._network is not None else len(_alive()) > 1
        self._head = _actor(
            QueueHead, f"tq-{self.run}{HEAD}{self._token}", ray.get_runtime_context().get_node_id()
        ).remote(str(self.directory), network, self._head_settings)
        self.address: dict[str, str] = await _within(self._head.address.remote(), "the queue's actor")
        await self.look_at_nodes()
        self._watching = asyncio.create_task(self._watch())
        return self.address

    async def astop(self, *, clean: bool = False) -> None:
        """End all processes; with `clean` the stored bytes go too."""
        if self._watching is not None:
            self._watching.cancel()
        stops = [node.stop.remote(clean) for node in self._nodes.values()]
        await asyncio.gather(*stops, return_exceptions=True)  # a node may be gone
        if self._head is not None:
            await self._head.stop.remote(clean)
        _kill([*self._nodes.values(), self._head])
        self._nodes.clear()
        self._head = None

    async def __aenter__(self) -> RayQueue:
        await self.astart()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.astop(clean=True)

    def __enter__(self) -> RayQueue:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(clean=True)

    async def pids(self) -> dict[str, int]:
        """Process ids by name, of all nodes."""
        actors = [self._head, *self._nodes.values()]
        found = await asyncio.gather(*(actor.pids.remote() for actor in actors), return_exceptions=True)
        return {name: pid for one in found if isinstance(one, dict) for name, pid in one.items()}

    async def look_at_nodes(self) -> None:
        """Give units to nodes that have none, and forget nodes that are gone."""
        alive = _alive()
        here = _node_id()
        for node in [node for node in self._nodes if node not in alive]:
            log.warning("node %s of run %s is gone; so are its rows, unless it is back soon", node[:8], self.run)
            _kill([self._nodes.pop(node)])
            del self._places[node]
        new = [node for node in alive if node != here and node not in self._nodes]
        if new and "network" not in self.address:
            log.warning("%d nodes joined, but this queue serves one node alone: give network=True", len(new))
            return
        for node in new:
            await self._join(node, alive[node])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(NODES_EVERY)
            try:
                await self.look_at_nodes()
            except Exception:  # a node that just went; the next look tells
                log.exception("run %s: a node could not be given units", self.run)

    async def _join(self, node: str, ip: str) -> None:
        place = next(p for p in (f"{ip}-{i}" for i in range(10_000)) if p not in self._places.values())
        name = f"tq-{self.run}-{place}-{node[:8]}-{self._token}"
        actor = _actor(UnitNode, name, node).remote(str(self.directory / "nodes" / place), self.address, self._units)
        self._nodes[node], self._places[node] = actor, place
        try:
            what = f"the storage units' actor on node {node[:8]} ({ip})"
            units = await _within(actor.known.remote(), what) or self._new_units()
            await _within(actor.start.remote(read_key(self.address["key_file"]), units), what)
        except BaseException:
            _kill([self._nodes.pop(node)])
            del self._places[node]
            raise
        log.info("units %s of run %s serve on node %s (%s)", units, self.run, node[:8], ip)

    def _new_units(self) -> list[int]:
        """Numbers that no unit of this run ever had: a segment's id begins with its unit's, and never comes twice."""
        path = self.directory / "units.json"
        known = text_if_there(path)
        first = json.loads(known)["next"] if known is not None else self._per_node
        replace_file(path, json.dumps({"next": first + self._per_node}))
        return list(range(first, first + self._per_node))


def _actor(cls: type, name: str, node: str) -> Any:
    """A restartable actor on that node, without a CPU of its own."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return ray.remote(cls).options(
        name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )  # fmt: skip


async def _within(answer: Any, what: str) -> Any:
    """The answer of an actor. Raises DeadlineExceeded if it does not come, else what it raises."""
    try:
        return await asyncio.wait_for(answer, ACTOR_TIMEOUT)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what} did not answer for {ACTOR_TIMEOUT:.0f} s: look at Ray's logs of that node, and whether it has room"
        ) from None


def _kill(actors: list[Any]) -> None:
    import ray

    for actor in actors:
        if actor is not None:
            ray.kill(actor)


def _alive() -> dict[str, str]:
    """IP by id of the nodes that are there."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _node_ip() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _was_restarted() -> bool:
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _units_here(directory: Path) -> list[int]:
    known = read_node(directory)
    return known["units"] if known and Path(known["storage"]).is_dir() else []


def _keep_key(file: Path, key: str) -> None:
    """On a node that does not share the directory, the key is kept at the same path."""
    if not file.exists():
        private_directory(file.parent)
        replace_file(file, key)
