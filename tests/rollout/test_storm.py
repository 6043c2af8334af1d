"""Whatever happens to the servers, requests get the tokens that were sampled for them; see storm.py."""

from __future__ import annotations

import pytest

from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.rollout.storm import Outcome, Storm


def storm(seed: int, requests: int) -> Outcome:
    async def main() -> Outcome:
        return await Storm(seed, requests).run()

    return run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
def test_every_token_has_the_version_that_sampled_it_no_budget_is_exceeded_and_nothing_is_stuck(seed: int) -> None:
    outcome = storm(seed, 400)
    assert outcome.wrong == []
    assert outcome.left == {"tickets": 0, "in line": 0, "in engines": 0}
    assert outcome.requests == 400
    assert all(outcome.happened[what] > 0 for what in ("sync", "abort", "pause", "kill", "given up"))
