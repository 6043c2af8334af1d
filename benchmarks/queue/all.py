"""All workloads by name, in the order in which they run."""

from __future__ import annotations

from benchmarks.queue import (
    batches,
    clearing,
    clients,
    handoff,
    leases,
    listing,
    overload,
    restart,
    single,
    starting,
    unit_death,
    watching,
)

MODULES = (
    starting, batches, single, handoff, clients, listing, watching, clearing, unit_death, overload, leases, restart,
)  # fmt: skip
"""The large partitions come last: they stay in the controller."""

WORKLOADS = {workload.name: workload for module in MODULES for workload in module.WORKLOADS}
