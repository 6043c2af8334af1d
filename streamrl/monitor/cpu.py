"""CPU time of all processes of a run on this node: what two busy cores could at best have done in that time."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from streamrl.monitor.event_reader import read_events


class CpuMeter:
    """Sums over a process and all below it. What a process took stays counted after its death, up to the last reading.

    `root`: the process that started the run; its own, if that is this one (runtime=local).
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = root or os.getpid()
        self._seen: dict[tuple[int, float], float] = {}

    @classmethod
    def of(cls, run_dir: Path) -> CpuMeter:
        """Of the run whose launcher writes to this directory."""
        launchers = [e for e in read_events(run_dir) if e.kind == "process" and e.name == "launcher"]
        return cls(int(launchers[-1].fields["pid"]) if launchers else None)

    def seconds(self) -> float | None:
        """Since the processes started; None if this process is not among them (it works in a cluster that was there
        before), since then neither are others."""
        try:
            root = psutil.Process(self._root)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        if all(process.pid != os.getpid() for process in processes):
            return None
        for process in processes:
            try:
                times = process.cpu_times()
                self._seen[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return sum(self._seen.values())


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
