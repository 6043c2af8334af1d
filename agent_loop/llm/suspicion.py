"""Which requests kill the servers that serve them: a state machine without I/O.

A server that dies takes all its requests with it, of which at most one is to blame. So a request under which servers
died is tried alone before it is blamed:

    1st and 2nd death          it continues elsewhere
    from then on a suspect     one suspect at a time, of one client, is under way without having shown a token
    its third, as such a one   it is poison: it is given up, and so is every other request with the same prompt

A request that ends, however that went before, clears its prompt. When prompt after prompt is found to be poison and
none ends between them, it is the servers that are ill (broken weights, a full GPU); then nobody is blamed any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

SUSPECT_DEATHS = 2
MAX_CONVICTED = 3
"""In a row without a request that ended; then the servers are to blame."""
MAX_RECORDS = 4096
"""Prompts remembered; the oldest is forgotten, and may kill three more."""


class PoisonRequest(RuntimeError):
    """Servers die under this request. It is not the infrastructure's error: another attempt would kill more."""


@dataclass(slots=True)
class _Record:
    deaths: set[tuple[str, int]] = field(default_factory=set)
    """(server, incarnation): n samples of a prompt that die with one server count once."""
    poison: str = ""


class Suspicion:
    """Invariants: `poison_deaths` deaths at least precede a verdict, the last of them with no other suspect on that
    server; a prompt once found to be poison is not sent to any server again."""

    def __init__(self, poison_deaths: int = 3) -> None:
        self._poison_deaths = poison_deaths
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self._convicted = 0

    def __bool__(self) -> bool:
        """Whether anything was noted at all; nobody has to make keys before."""
        return bool(self._records)

    @staticmethod
    def key(prompt_ids: list[int]) -> int:
        return hash(tuple(prompt_ids))

    def suspects(self, key: int) -> bool:
        return (record := self._records.get(key)) is not None and len(record.deaths) >= SUSPECT_DEATHS

    def check(self, key: int) -> None:
        """Raises PoisonRequest."""
        if (record := self._records.get(key)) is not None and record.poison:
            raise PoisonRequest(record.poison)

    def died(self, key: int, server: str, incarnation: int, reason: str, *, alone: bool) -> None:
        """`alone`: no other request was open there, or no other suspect."""
        record = self._records.setdefault(key, _Record())
        record.deaths.add((server, incarnation))
        guilty = alone and len(record.deaths) >= self._poison_deaths
        if guilty and not record.poison and self._convicted < MAX_CONVICTED:
            self._convicted += 1
            record.poison = (
                f"{len(record.deaths)} LLM servers died under this request, the last one while no other was suspected: "
                f"{reason}"
            )
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def ended(self, key: int) -> None:
        """A request with this prompt was answered."""
        self._convicted = 0
        self._records.pop(key, None)
