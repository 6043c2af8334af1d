"""One Ray for the tests that need real ranks, with logical CPUs enough for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    if ray.is_initialized():  # another test of this process started one: it is its to end
        yield
        return
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()
