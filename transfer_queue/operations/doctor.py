"""What is there, and what is wrong with it: listeners and who may use them, room for segments, versions, leftovers.

    report = doctor("runs/1/queue")      # or without a directory: the queue of this process, else the machine alone
    print(report.text())

Nothing is started and no queue is asked: it reads the run's files, /proc and the packages' metadata, so it works on a
queue that hangs as well as on one that is gone.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from transfer_queue.errors import QueueError
from transfer_queue.operations.listeners import tcp_listeners, unix_listeners
from transfer_queue.operations.terminal import age, count, size
from transfer_queue.service.attached import queue_directory
from transfer_queue.service.queue_service import read_run
from transfer_queue.storage.filesystems import IN_MEMORY, is_shared, journal_on_shared, kind_of
from transfer_queue.storage.leftovers import Leftover, find_leftovers
from transfer_queue.storage.place import SHM, free_bytes, memory_limit, ray_store_bytes
from transfer_queue.storage.private import read_regular, text_if_there

SMALL_SHM = 256 << 20
"""Bytes of /dev/shm below which a container was started without a thought for it (Docker gives 64 MiB)."""

_PACKAGES = ("streamrl", "msgspec", "numpy", "pyzmq", "xxhash", "blake3", "torch", "tensordict", "ray")


@dataclass(frozen=True, slots=True)
class Listening:
    """One socket on which a process of the queue accepts connections."""

    process: str
    pid: int
    endpoint: str
    auth: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong or will be, and what to do about it."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `doctor` found. `text()` is for people; the fields are for programs."""

    versions: dict[str, str]
    storage: list[str] = field(default_factory=list)
    listeners: list[Listening] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # of a queue's report: what concerns other queues

    def text(self) -> str:
        parts = [("versions", [f"{name} {version}" for name, version in self.versions.items()])]
        parts.append(("storage", self.storage))
        parts.append(("listeners", [f"{x.process} ({x.pid})  {x.endpoint}  {x.auth}" for x in self.listeners]))
        parts.append(("leftovers", [leftover_line(one) for one in self.leftovers]))
        told = [[f"{found.what}\n    -> {found.remedy}" for found in some] for some in (self.findings, self.notes)]
        parts.append(("to do", told[0] or ["nothing"]))
        parts += [("of other queues", told[1])] if self.notes else []
        return "\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines or ["none"]) for title, lines in parts)


def doctor(directory: str | Path | None = None, *, storage_dir: str | Path | None = None) -> Report:
    """Examine this machine, and the queue in `directory`, or the one that this process uses. Never raises for what it
    finds. What other queues have left is a finding where no queue is examined, else a note."""
    directory = directory if directory is not None else queue_directory()
    report = Report(_versions())
    report.findings.extend(_packages_in_the_way())
    parents = {SHM, Path(tempfile.gettempdir()), *([Path(storage_dir)] if storage_dir else [])}
    if directory is not None:
        parents |= _examine_queue(Path(directory).absolute(), report)
    for parent in sorted(parent for parent in parents if parent.is_dir()):
        _examine_storage(parent, report)
    report.leftovers.extend(one for one in find_leftovers(sorted(parents)) if one.state != "live")
    leftovers = report.findings if directory is None else report.notes
    leftovers.extend(_examine_leftovers(report.leftovers))
    return report


def _examine_leftovers(leftovers: Sequence[Leftover]) -> Iterator[Finding]:
    dead, stopped = ([one for one in leftovers if one.state == state] for state in ("dead", "stopped"))
    clean = "python -m transfer_queue doctor --clean"
    if dead:
        what = f"{count(len(dead), 'dead run')} left {size(sum(one.nbytes for one in dead))}"
        yield Finding(what, f"{clean} removes it")
    if stopped:
        names = " ".join(one.run for one in stopped[:5]) + (" ..." if len(stopped) > 5 else "")
        what = f"{count(len(stopped), 'stopped run')} to go on with: {size(sum(one.nbytes for one in stopped))}"
        yield Finding(what, f"{clean} {names}, if they are not wanted any more, removes what they stored")


def leftover_line(one: Leftover) -> str:
    of = f", of the queue in {one.owner}" if one.owner else ""
    return f"{one.state} run {one.run}: {size(one.nbytes)}, written {age(one.age)} ago, {one.path}{of}"


def peer_in_the_way() -> Finding | None:
    """PyPI's TransferQueue brings a package of our name. None if it is not installed."""
    return next(iter(_packages_in_the_way()), None)


# --- packages ----------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["libzmq"] = zmq.zmq_version() + ("" if zmq.has("curve") else ", without CURVE")
    return found


def _packages_in_the_way(distributions: Sequence[str] = ("TransferQueue",)) -> Iterator[Finding]:
    here = Path(__file__).resolve().parents[1]
    for name in distributions:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        theirs = Path(str(distribution.locate_file("transfer_queue"))).resolve()
        if theirs == here:
            what = f"PyPI's {name} {distribution.version} is installed over this package: files of both are in {here}"
            remedy = f"pip uninstall {name}, then install this package again"
        else:
            what = (
                f"PyPI's {name} {distribution.version} is installed too, in {theirs}: a process whose path differs "
                f"imports that one instead of {here}"
            )
            remedy = f"pip uninstall {name}: programs written for it run with this package"
        yield Finding(what, remedy)


# --- storage -----------------------------------------------------------------------------------------------------


def _examine_storage(parent: Path, report: Report) -> None:
    free, kind = free_bytes(parent), kind_of(parent)
    line = f"{parent}: {kind}, {size(free)} may be written"
    if kind in IN_MEMORY and (limit := memory_limit()) is not None:
        line += f", the cgroup's memory limit is {size(limit[0])} of which {size(limit[1])} are used"
    if parent == SHM:
        ray = ray_store_bytes()
        line += f", Ray's object stores may take {size(ray)}" if ray else ""
        report.findings.extend(_examine_shm(free, ray))
    report.storage.append(line)


def _examine_shm(free: int, ray: int) -> Iterator[Finding]:
    enlarge = "start the container with --shm-size (a pod: an emptyDir of medium Memory), or set storage_dir"
    if free < SMALL_SHM:
        yield Finding(f"only {size(free)} of {SHM} may be written", enlarge)
    elif ray > free:
        what = (
            f"Ray's object store may take {size(ray)} of {SHM}, where {size(free)} are free: who comes last gets none"
        )
        yield Finding(
            what, "give ray a smaller object_store_memory, set storage_dir or unit_budget_bytes, or " + enlarge
        )


# --- one queue ---------------------------------------------------------------------------------------------------


def _examine_queue(directory: Path, report: Report) -> set[Path]:
    """What the files of the queue in `directory` say; where its storage is."""
    try:
        known = read_run(directory)
    except QueueError as error:
        report.findings.append(Finding(str(error), "look at the file"))
        return set()
    if not known:
        report.findings.append(Finding(f"{directory} holds no queue", "give the directory of a queue service"))
        return set()
    _examine_files(directory, report)
    storage = Path(known["storage"])
    units = sorted(storage.glob("unit-*"), key=lambda unit: int(unit.name.rpartition("-")[2]))
    budget = int(known["budget"])
    if storage.is_dir():
        report.storage.append(f"{storage}: {count(len(units), 'unit')} of at most {size(budget)} each")
        live = sum(f.stat().st_size for unit in units for f in unit.glob("*.seg"))
        if len(units) * budget - live > free_bytes(storage):
            what = f"the units may write {size(len(units) * budget - live)} more, {size(free_bytes(storage))} are free"
            report.findings.append(Finding(what, "lower unit_budget_bytes, or set storage_dir to a larger place"))
    processes = {"controller": directory / "controller.lock"} | {unit.name: unit / "lock" for unit in units}
    for name, lock in processes.items():
        _examine_process(name, lock, known, report)
    _examine_metrics(directory, report)
    return {storage.parent}


def _examine_files(directory: Path, report: Report) -> None:
    if (found := journal_on_shared(directory)) is not None:
        report.findings.append(Finding(*found))
    for path in (directory, directory / "key", directory / "metrics.key"):
        if path.exists() and path.stat().st_mode & 0o077:
            report.findings.append(Finding(f"others can read {path}", f"chmod go= {path}, and start the queue anew"))
    if is_shared(directory):
        report.storage.append(f"{directory}: {kind_of(directory)}")


def _examine_process(name: str, lock: Path, known: dict[str, str], report: Report) -> None:
    pid = _holder(lock)
    try:
        ports, paths = (tcp_listeners(pid), unix_listeners(pid)) if pid else ([], [])
    except OSError as error:
        report.findings.append(Finding(f"{name} ({pid}) cannot be examined: {error}", "run this as its user"))
        return
    if pid is None:
        what = f"{name} does not run"
        report.findings.append(Finding(what, "start the queue service on its directory again, if it is wanted"))
    for path in paths:
        private = "private directory" if not Path(path).parent.stat().st_mode & 0o077 else "OPEN DIRECTORY"
        report.listeners.append(Listening(name, pid or 0, f"unix {path}", f"{private}, run key"))
    for ip, port in ports:
        curve = name == "controller" or known.get("bulk") == "curve"
        auth = "CURVE with the run's keys" if curve else "MAC of the run's key on each frame"
        report.listeners.append(Listening(name, pid or 0, f"tcp {ip}:{port}", auth))
        if ip in ("0.0.0.0", "::") or "network" not in known:
            what = f"{name} listens at {ip}:{port}, which this queue did not ask for"
            report.findings.append(Finding(what, "find out who made it do so; end the queue"))


def _examine_metrics(directory: Path, report: Report) -> None:
    """The endpoint of the metrics, in the process that runs the service."""
    endpoint = (text_if_there(directory / "metrics.endpoint") or "").strip()
    try:
        pid = int(read_regular(directory / "service.lock"))
        ports = [f"{ip}:{port}" for ip, port in tcp_listeners(pid)]
    except (OSError, ValueError):  # no service runs
        return
    if endpoint in ports:
        report.listeners.append(Listening("metrics", pid, f"tcp {endpoint}", "bearer key in metrics.key"))


def _holder(lock: Path) -> int | None:
    """The living process that wrote its id into a lock that it holds."""
    try:
        pid = int(read_regular(lock))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"transfer_queue" in command else None


def as_json(report: Report) -> str:
    """For programs in other languages."""
    return json.dumps(
        {
            "versions": report.versions,
            "storage": report.storage,
            "listeners": [{"process": x.process, "pid": x.pid, "endpoint": x.endpoint, "auth": x.auth}
                          for x in report.listeners],
            "leftovers": [{"run": x.run, "state": x.state, "age": x.age, "bytes": x.nbytes, "path": str(x.path)}
                          for x in report.leftovers],
            "findings": [{"what": x.what, "remedy": x.remedy} for x in report.findings],
            "notes": [{"what": x.what, "remedy": x.remedy} for x in report.notes],
        },
        indent=2,
    )  # fmt: skip
