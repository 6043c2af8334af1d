"""One Ray for the tests that need real ranks."""

from __future__ import annotations

from tests.workers.conftest import ray_cluster

__all__ = ["ray_cluster"]
