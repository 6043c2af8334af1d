"""What must hold after every turn of the controller, told from a shadow of its journal and from its own tables.

I3 one live lease per (task, group) at most; I4 tokens increase; I5 the states add up to what was accepted; I6 the bytes
accounted are those in use; I7 a unit never exceeds its budget; I13 what a restart gives back is what was journaled.
"""

from __future__ import annotations

from collections import Counter

from transfer_queue.controller.core import ControllerCore
from transfer_queue.ledger import Ledger
from transfer_queue.net.messages import Admit, Life, Record, Token


class Checker:
    """The shadow is a ledger that never restarts: it applies each record once it is in the journal. Of a journal that
    lost its end with the power, it begins anew."""

    def __init__(self) -> None:
        self.shadow = Ledger()
        self.journal: list[Record] = []
        self.records = 0
        self._dark = False
        self.lives = 0
        self.accepted: dict[str, set[str]] = {}
        self._newest = Token(0, 0)

    def lost_power(self) -> None:
        self._dark = True

    def recorded(self, record: Record) -> None:
        if self._dark:
            self._go_back(record.seq - 1)
        assert record.seq == len(self.journal) + 1, "the journal lost records"
        self.journal.append(record)
        self.records += 1
        self.lives += isinstance(record.mutation, Life)
        self._apply(record)

    def _go_back(self, records: int) -> None:
        """Nobody was told of what came after; a token that nobody has may be given again."""
        self._dark, self._newest = False, Token(0, 0)
        del self.journal[records:]
        self.shadow, self.accepted = Ledger(), {}
        for record in self.journal:
            self._apply(record)

    def _apply(self, record: Record) -> None:
        self.shadow.apply(record.mutation, record.now, record.client, record.request)
        if isinstance(record.mutation, Admit):
            uids = self.accepted.setdefault(record.mutation.partition, set())
            uids.update(group.uid for group in record.mutation.groups)

    def recovered(self, core: ControllerCore) -> None:
        """I13: from snapshot and journal, and whatever was torn or half done."""
        assert core.ledger.fingerprint() == self.shadow.fingerprint(), "a restart gave another state than was journaled"

    def check(self, core: ControllerCore) -> None:
        ledger = core.ledger
        leased = Counter((lease.task.name, uid) for lease in ledger.leases.held.values() for uid in lease.groups)
        assert all(count == 1 for count in leased.values()), f"I3: leased twice: {leased.most_common(3)}"
        newest = Token(ledger.leases.epoch, ledger.leases.counter)
        assert (newest.epoch, newest.counter) >= (self._newest.epoch, self._newest.counter), "I4: tokens go back"
        self._newest = newest
        for name, p in ledger.partitions.items():
            if name in self.accepted:
                assert sum(p.depth().values()) == len(self.accepted[name]), f"I5: {p.depth()}"
        rows = sum(p.rows.nbytes for p in ledger.partitions.values())
        use = sum(use.nbytes for use in ledger.segments.use.values())
        assert rows == use, f"I6: rows hold {rows} bytes, segments {use}"
        for unit in core._grants.units.values():
            assert unit.used <= unit.budget, f"I7: unit {unit.info.unit} uses {unit.used} of {unit.budget} bytes"
