"""What somebody is told who waited in vain: who waited for what and how long, how things stand, and what to do."""

from __future__ import annotations

from transfer_queue.controller.grants import SegmentGrants
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.checks import some
from transfer_queue.net.messages import Admit, Find, Lease, Lookup, SegmentRequest, UnitStats


def lease(ledger: Ledger, m: Lease, waited: float, now: float) -> str:
    wanted = f"groups {some(m.uids)}" if m.uids else f"up to {m.groups} groups"
    if not ledger.is_open(m.partition):
        opened = [name for name in ledger.partitions if ledger.is_open(name)]
        return (
            f"{m.holder!r} waited {waited:.1f} s to lease {wanted} of task {m.task!r} in partition {m.partition!r}, "
            f"which nobody has opened (open: {some(opened) or 'none'}). Look at who should call open_partition, and at "
            "the name; or wait longer"
        )
    task = ledger.partition(m.partition).task(m.task)
    if task.stage == "prompt":
        advice = "Admit more prompts, or look at who holds the oldest"
    elif task.fields:
        advice = f"It takes ready groups whose rows all have {task.fields}: look at who should generate or write those"
    else:
        advice = "It takes ready groups: look at who should generate (the oldest holder)"
    return (
        f"{m.holder!r} waited {waited:.1f} s to lease {wanted} of task {m.task!r} in partition {m.partition!r}. "
        f"Now: {ledger.situation(m.partition, now)}. {advice}; or wait longer"
    )


def admit(ledger: Ledger, m: Admit, who: str, waited: float, now: float) -> str:
    p = ledger.partition(m.partition)
    return (
        f"{who!r} waited {waited:.1f} s for credit for {len(m.groups)} groups in partition {m.partition!r}: "
        f"{p.outstanding()} of {p.max_groups or 'unlimited'} are outstanding, {p.rows.nbytes} of "
        f"{p.max_bytes or 'unlimited'} bytes live. Now: {ledger.situation(m.partition, now)}. Credit returns when "
        "groups are trained or dropped, bytes when their step is committed (commit_step); wait longer, or raise "
        "max_groups or max_bytes"
    )


def segment(grants: SegmentGrants, m: SegmentRequest, who: str, waited: float) -> str:
    units, errors, disk = grants.stats(), grants.errors(), grants.spill_errors()
    if not units:
        return f"{who!r} waited {waited:.1f} s for a segment: no storage unit has registered. Look at the units' logs"
    if errors:
        why = "; ".join(f"unit {number} cannot make segments: {error}" for number, error in errors.items())
        return (
            f"{who!r} waited {waited:.1f} s for room for {m.nbytes} bytes: {why} ({_units(units)}). Make room "
            "there, or lower unit_budget_bytes or set another storage_dir and start the queue again"
        )
    why = "".join(f"; unit {number} cannot write segments to disk: {error}" for number, error in disk.items())
    return (
        f"{who!r} waited {waited:.1f} s for room for {m.nbytes} bytes, which comes in whole segments "
        f"({_segments(grants)}): {_units(units)}{why}. Free rows with kv_clear (clear), drop, or ack and commit_step; "
        "or wait longer (wait=...), or raise unit_budget_bytes or spill_budget_bytes"
    )


def lookup(units: list[UnitStats], m: Lookup | Find, who: str, waited: float) -> str:
    count = len(m.keys) if m.keys is not None else ""
    return (
        f"{who!r} waited {waited:.1f} s to read {count} rows of partition {m.partition!r} that lie in a storage "
        f"unit which has not registered since the controller restarted ({_units(units) or 'none has'}). Look at the "
        "units' logs"
    )


def _segments(grants: SegmentGrants) -> str:
    sizes = sorted({unit.segment_bytes for unit in grants.units.values()})
    return f"of {' or '.join(map(str, sizes))} bytes, or one that holds a larger put"


def _units(units: list[UnitStats]) -> str:
    return "; ".join(
        f"unit {unit.unit} {'uses' if unit.alive else 'is gone, used'} {unit.used} of {unit.budget} bytes, "
        f"{max(0, unit.budget - unit.used)} are free"
        + (f" and {unit.spilled} of {unit.spill_budget} on disk" if unit.spill_budget else "")
        for unit in units
    )
