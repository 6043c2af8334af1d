"""Named places at which a process can be made to die, fail or stall: how every cell of the crash matrix is reached.

    failpoint("snapshot.after_rename")      stands in the code; does nothing, in some 30 ns, unless it is armed

    TQ_FAILPOINTS="controller.after_append=kill@3;unit.after_make=sleep:2"     arms them in a process and its children
    TQ_FAILPOINTS_ONCE=/some/directory                                         each at most once, over all processes

An entry is `name=action`, on the n-th time with `@n` (else the first). Actions: `kill` (SIGKILL to this very process),
`stop` (SIGSTOP), `raise` (an InjectedError), `sleep:SECONDS` (blocks the process, not just a task). A process that is
started again counts anew, so a supervised one needs TQ_FAILPOINTS_ONCE: what has fired leaves a file of its name there.

A simulation sets `hooked` instead, and decides for itself. `python -m transfer_queue failpoints` lists all, with where
they stand.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transfer_queue.errors import Invalid

log = logging.getLogger(__name__)

VARIABLE, ONCE_VARIABLE = "TQ_FAILPOINTS", "TQ_FAILPOINTS_ONCE"

FAILPOINTS = {
    "controller.before_append": "a mutation is applied and not in the journal",
    "controller.after_append": "a mutation is in the journal and not answered",
    "controller.before_reply": "an answer is kept for who asks again, and not sent",
    "controller.before_flush": "the answers of a turn are made, and none has gone out",
    "controller.before_sync": "records are in the journal that must be on the disk, and may not be",
    "controller.after_sync": "records are on the disk, and their answers have not gone out",
    "controller.before_register": "a unit has said what it holds, and is not known yet",
    "controller.after_register": "a unit is known, and was not told what to keep",
    "snapshot.after_rotate": "the journal has a new file, and there is no snapshot before it",
    "snapshot.mid_write": "the first section of a snapshot is written",
    "snapshot.before_rename": "a snapshot is whole, and has no name",
    "snapshot.after_rename": "a snapshot has its name, and what it makes needless is still there",
    "snapshot.mid_prune": "one file that is needless is gone, others are not",
    "recovery.after_snapshot": "a snapshot is read, the journal is not",
    "recovery.mid_replay": "a record is replayed",
    "recovery.before_life": "all is replayed; the new life is not in the journal",
    "recovery.after_life": "the new life is in the journal; nobody is served",
    "unit.before_register": "a unit knows its files, and has not told the controller",
    "unit.after_register": "the controller knows the unit; files that are to go are still there",
    "unit.mid_keep": "one file that is to go is gone, others may not be",
    "unit.mid_make": "one of the segments asked for is made",
    "unit.after_make": "segments are made, and the controller does not know",
    "unit.mid_free": "one of the segments to be freed is, others may not be",
    "unit.after_compact": "survivors are copied to a new segment, and the controller does not know",
    "unit.mid_spill": "a segment is copied to disk, and has no name there",
    "unit.after_spill": "a segment is on disk, and still in memory",
    "unit.before_answer": "bulk bytes were read or written, and the client was not told",
    "client.before_sync": "bytes lie in a segment on disk, in memory of the kernel alone",
    "client.after_copy": "bytes lie in a segment, and their commit is not sent",
    "client.after_send": "a request is sent, and not answered",
    "client.after_commit": "a commit is answered, and its caller does not know",
    "client.before_renew": "a lease is to be renewed, and the controller does not know",
}
"""What has just happened, by name."""

_ENTRY = re.compile(r"(?P<name>[a-z._]+)=(?P<action>kill|stop|raise|sleep:[0-9.]+)(?:@(?P<nth>[1-9][0-9]*))?")

_SITE = re.compile(r"""\bfailpoint\(\s*["']([^"']+)["']""")


class InjectedError(RuntimeError):
    """What a failpoint armed with `raise` raises."""


_hook: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Here a process may be made to die."""
    if _hook is not None:
        _hook(name)


@contextmanager
def hooked(hook: Callable[[str], None]) -> Iterator[None]:
    """`hook` gets the names of the failpoints that are passed meanwhile, in this process."""
    global _hook
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before


@dataclass(frozen=True, slots=True)
class Entry:
    """One armed failpoint."""

    name: str
    action: str
    nth: int


class Armed:
    """The hook of a process whose environment arms failpoints."""

    def __init__(self, entries: list[Entry], once: Path | None) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._once = once
        self._passed: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        self._passed[name] += 1
        if self._passed[name] == entry.nth and (self._once is None or _claim(self._once / name)):
            log.warning("failpoint %s: %s", name, entry.action)
            _act(entry)


def parse(text: str) -> list[Entry]:
    """The entries of TQ_FAILPOINTS. Raises Invalid."""
    entries = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise Invalid(f"{VARIABLE}: {part!r} is not name=kill|stop|raise|sleep:SECONDS, with @n for the n-th time")
        if match["name"] not in FAILPOINTS:
            raise Invalid(f"{VARIABLE}: no failpoint {match['name']!r}; see `python -m transfer_queue failpoints`")
        entries.append(Entry(match["name"], match["action"], int(match["nth"] or 1)))
    return entries


def sites() -> dict[str, list[str]]:
    """Where each failpoint stands in this package: "storage/history.py:84"."""
    root = Path(__file__).parent
    found: dict[str, list[str]] = {name: [] for name in FAILPOINTS}
    for path in sorted(root.rglob("*.py")):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in _SITE.findall(line):
                found.setdefault(name, []).append(f"{path.relative_to(root)}:{number}")
    return found


def listing() -> str:
    """All failpoints, for people."""
    width = max(map(len, FAILPOINTS))
    return "".join(
        f"{name:{width}}  {FAILPOINTS.get(name, '')} ({', '.join(where) or 'nowhere'})\n"
        for name, where in sites().items()
    )


def _act(entry: Entry) -> None:
    if entry.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif entry.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif entry.action == "raise":
        raise InjectedError(f"failpoint {entry.name}")
    else:
        time.sleep(float(entry.action.removeprefix("sleep:")))


def _claim(path: Path) -> bool:
    """Whether this is the first process to come here."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _from_environment() -> Armed | None:
    entries = parse(os.environ.get(VARIABLE, ""))
    once = os.environ.get(ONCE_VARIABLE)
    return Armed(entries, Path(once) if once else None) if entries else None


_hook = _from_environment()
