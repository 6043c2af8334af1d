"""The queue's processes start fast because they import nothing heavy; only making tensors imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "tensordict", "pandas", "transformers", "hydra", "zmq.asyncio"}

MODULES = [
    "transfer_queue",
    "transfer_queue.__main__",
    "transfer_queue.controller.process",
    "transfer_queue.storage.unit",
    "transfer_queue.ledger",
    "transfer_queue.storage.journal",
    "transfer_queue.client",
    "transfer_queue.cluster",
    "transfer_queue.service.child",
    "transfer_queue.operations.doctor",
    "transfer_queue.operations.inspecting",
    "transfer_queue.interface",
    "transfer_queue.clients.batch_client",
    "transfer_queue.sampler",
    "transfer_queue.metadata",
]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_public_names_are_there():
    import transfer_queue

    assert all(getattr(transfer_queue, name) is not None for name in transfer_queue.__all__)
    with pytest.raises(AttributeError, match="no attribute 'kv_pop'"):
        _ = transfer_queue.kv_pop
