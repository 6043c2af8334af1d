"""All workloads by name, in the order in which they run."""

from __future__ import annotations

from benchmarks.queue import batches, clients, handoff, leases, listing, restart, single, starting, watching

MODULES = (starting, batches, single, handoff, clients, listing, watching, leases, restart)
"""The large partitions come last: they stay in the controller."""

WORKLOADS = {workload.name: workload for module in MODULES for workload in module.WORKLOADS}
