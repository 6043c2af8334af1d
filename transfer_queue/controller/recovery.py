"""What survives a controller: the ledger and the answers it gave. As sections of a snapshot, and back from the files.

state = recover(path, run)     newest good snapshot, then the records after it
sections(ledger, replies)      what the next snapshot holds
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfer_queue.controller.parking import Replies
from transfer_queue.errors import Corrupt, QueueError
from transfer_queue.failpoints import failpoint
from transfer_queue.ledger import Ledger, dump, kept, load
from transfer_queue.net.messages import Record, Reply
from transfer_queue.storage.history import replay_seconds
from transfer_queue.storage.journal import ADVICE, journal_files, read_journals
from transfer_queue.storage.snapshot import read_snapshot, snapshots

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State:
    """As it was after `record`, the last one; replaying those after the snapshot took about `tail` seconds."""

    ledger: Ledger
    replies: Replies
    record: int = 0
    tail: float = 0.0


def recover(path: str | Path, *, run: str | None = None) -> State:
    """The state where the files at `path` (the journal; the others lie beside it) end. Raises Corrupt.

    A snapshot that is damaged is put aside, if the one before it and the journal since then still stand.
    """
    collecting = gc.isenabled()
    gc.disable()  # a million new objects, none of them garbage
    try:
        state = _newest(Path(path), run)
        failpoint("recovery.after_snapshot")
        for record in read_journals(path, after=state.record, run=run):
            reply = _replay(state.ledger, record, path)
            if record.client:
                state.replies.put(record.client, record.request, kept(reply))
            state.record = record.seq
            state.tail += replay_seconds(record.mutation)
            failpoint("recovery.mid_replay")
    finally:
        if collecting:
            gc.enable()
    state.ledger.segments.take_emptied()
    return state


def sections(ledger: Ledger, replies: Replies) -> Iterator[list[Any]]:
    """The state, for `write_snapshot`."""
    yield from dump(ledger)
    for section in replies.dump():
        yield ["replies", section]


def restore(found: Iterable[list[Any]]) -> State:
    """The state from `sections`. Raises ValueError, TypeError, KeyError or IndexError for others."""
    replies = Replies()

    def without_replies() -> Iterator[list[Any]]:
        for section in found:
            if section[0] == "replies":
                replies.load(section[1])
            else:
                yield section

    return State(load(without_replies()), replies)


def _newest(path: Path, run: str | None) -> State:
    """From the newest snapshot that is good."""
    damaged: list[Path] = []
    reasons: list[str] = []
    for record, file in snapshots(path):
        try:
            state = restore(read_snapshot(file, record, run))
        except (Corrupt, ValueError, TypeError, KeyError, IndexError) as error:
            reasons.append(str(error) if isinstance(error, Corrupt) else f"{file}: {type(error).__name__}: {error}")
            damaged.append(file)
            continue
        state.record = record
        break
    else:
        state = State(Ledger(), Replies())
    if damaged:
        _check_reachable(path, state.record, reasons)
        for file in damaged:
            log.error("%s is damaged and put aside; going on from record %d", file, state.record)
            file.rename(file.with_name(f"{file.name}.damaged"))
    return state


def _check_reachable(path: Path, record: int, reasons: list[str]) -> None:
    """Whether the journal still has all that came after an older snapshot. Raises Corrupt."""
    try:
        if not journal_files(path):
            raise Corrupt(f"there is no journal at {path}")
        next(read_journals(path, after=record), None)
    except Corrupt as error:
        raise Corrupt(f"{'; '.join(reasons)}; and nothing older serves: {error}") from None


def _replay(ledger: Ledger, record: Record, path: str | Path) -> Reply:
    try:
        return ledger.apply(record.mutation, record.now, record.client, record.request)
    except QueueError as error:
        raise Corrupt(
            f"{path}: record {record.seq} ({type(record.mutation).__name__}) was accepted once and is refused now: "
            f"{error}. The journal is not of this version of the ledger, or damaged. {ADVICE}"
        ) from error
