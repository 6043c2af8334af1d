"""How many requests one LLM server should have in flight: a state machine without I/O.

Additive increase, multiplicative decrease, as a congestion window (Chiu and Jain, 1989). A request too few leaves a
slot empty; one too many costs a running one its cache, which is computed again. Engines that reserve a row of cache per
slot never preempt, and stay at the ceiling.
"""

from __future__ import annotations

from agent_loop.llm.protocol import ServerLoad

CLEAR = 0.9
"""Share of the cache in use up to which there is room for more."""
CUT = 0.7
"""Of what was in flight when a request was preempted."""
STEPS = 32
"""Beats from nothing to all slots."""
SPARE = 4
"""One waiting request per so many slots: the next one is there when a slot comes free, not a round trip later."""
LEAST = 2
"""Requests that any server may have."""


class InFlightLimit:
    """Invariant: between `LEAST` and the slots with their spare; a preemption cuts once per beat, however many."""

    def __init__(self) -> None:
        self.requests: int | None = None
        """None until the first load is known."""
        self._preemptions = 0
        self._slots = 0

    def update(self, load: ServerLoad) -> int:
        """After a beat; the limit from now on."""
        ceiling = load.slots + max(LEAST, load.slots // SPARE)
        if self.requests is None or load.slots != self._slots:
            self.requests = ceiling
        elif load.preemptions > self._preemptions:
            self.requests = int(min(self.requests, load.running + load.waiting) * CUT)
        elif load.cache_usage <= CLEAR:
            self.requests += max(1, load.slots // STEPS)
        self.requests = max(LEAST, min(self.requests, ceiling))
        self._preemptions, self._slots = load.preemptions, load.slots
        return self.requests
