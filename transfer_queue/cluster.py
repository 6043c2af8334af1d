"""The ways to have a queue: in this process (LocalQueue), as processes of their own on one node (QueueService; other
nodes join by UnitService), or on all nodes of a Ray cluster (RayQueue)."""

from __future__ import annotations

from transfer_queue.local import LocalQueue
from transfer_queue.service.node import UnitService
from transfer_queue.service.queue_service import QueueService, read_address
from transfer_queue.service.ray_queue import RayQueue

__all__ = ["LocalQueue", "QueueService", "RayQueue", "UnitService", "read_address"]
