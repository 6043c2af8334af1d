"""What can go wrong between the controller and its ranks. Every message names rank, process and method."""

from __future__ import annotations

from streamrl.errors import UserError


class WorkerGroupError(Exception):
    """Base."""


class PlacementError(WorkerGroupError, UserError):
    """The ranks do not fit on the cluster: how much is needed, how much there is, what to do."""


class MeshError(WorkerGroupError, ValueError):
    """Ranks do not say, or contradict each other in, where they stand in a mesh (`mesh.py`)."""


class WorkerDied(WorkerGroupError, ConnectionError):
    """The process of a rank is gone. The group is of no further use: close it and start another."""

    def __init__(self, rank: int, pid: int, method: str, log: str = "") -> None:
        """`method`: empty, if none ran. `log`: the file with its last words, on its node."""
        when = f"during {method}" if method else "while it had nothing to do"
        where = f"; its log is {log}" if log else ""
        super().__init__(
            f"rank {rank} (pid {pid}) died {when}{where}; if nothing there says why, it was killed from outside, maybe "
            "for want of memory (see dmesg); the same command resumes a run, a program starts a new worker group"
        )
        self.rank, self.pid, self.method, self.log = rank, pid, method, log

    def __reduce__(self) -> tuple[type, tuple[int, int, str, str]]:
        return type(self), (self.rank, self.pid, self.method, self.log)


class WorkerFailed(WorkerGroupError):
    """A method raised on a rank; `__cause__` is what it raised."""

    def __init__(self, rank: int, pid: int, method: str, reason: str) -> None:
        super().__init__(f"{method} failed on rank {rank} (pid {pid}): {reason}")
        self.rank, self.pid, self.method, self.reason = rank, pid, method, reason

    def __reduce__(self) -> tuple[type, tuple[int, int, str, str]]:
        return type(self), (self.rank, self.pid, self.method, self.reason)


class WorkerTimeout(WorkerGroupError, TimeoutError):
    """Ranks did not answer in time. They may be stuck in a collective, so the group is of no further use."""

    def __init__(self, method: str, ranks: list[int], pids: list[int], seconds: float) -> None:
        who = ", ".join(f"{rank} (pid {pid})" for rank, pid in zip(ranks, pids, strict=True))
        super().__init__(
            f"{method}: no answer from rank {who} after {seconds:g} s; see their logs, or call with a larger timeout="
        )
        self.method, self.ranks, self.pids, self.seconds = method, ranks, pids, seconds

    def __reduce__(self) -> tuple[type, tuple[str, list[int], list[int], float]]:
        return type(self), (self.method, self.ranks, self.pids, self.seconds)
