"""Sessions whose score comes from elsewhere, once their rows are put: they may end without one."""

from __future__ import annotations

from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.farm import farm


def test_without_a_reward_a_session_ends_with_no_score_and_no_column_for_it() -> None:
    async def main() -> None:
        async with farm() as f:
            await f.admit(["u"], tag={"tells_all": True})
            f.start(reward="", scored_later=True)
            group = (await f.settled(1))["u"]
            assert group.state == "ready"
            assert not [name for row in group.rows for name in row.tag if name.startswith("score")]
            assert "rm_scores" not in await f.trainer.get("train", [row.key for row in group.rows])
            [told] = [fields for name, _, _, fields in f.spans if name == "session" and fields["session"] == 0]
            assert told["status"] == "success"
            assert "score" not in told

    run_virtual(main())


def test_a_reward_function_is_asked_all_the_same_and_its_score_stays_in_the_tags() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["u"])
            f.start(scored_later=True)
            group = (await f.settled(1))["u"]
            assert [row.tag["score"] for row in group.rows] == [1.0, 1.0]
            assert "rm_scores" not in await f.trainer.get("train", [row.key for row in group.rows])

    run_virtual(main())


def test_without_a_reward_and_with_nobody_to_score_later_the_session_fails() -> None:
    async def main() -> None:
        async with farm() as f:
            await f.admit(["u"])
            f.start(reward="")
            group = (await f.settled(1))["u"]
            assert "no reward function is configured" in group.reason

    run_virtual(main())
