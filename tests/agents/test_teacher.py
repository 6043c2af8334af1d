"""Rows are scored by a teacher's servers before they are put: whole, or not at all."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from agent_loop.llm.client import Patience, RoutedClient
from agent_loop.llm.protocol import CannotScore, SamplingParams, Scores
from agent_loop.loop import AgentContext, Budgets
from agent_loop.rows import MULTI_MODAL_FIELD, SessionRows
from agent_loop.teacher import Teacher
from streamrl.monitor.events import Event
from streamrl.monitor.schema import check_events
from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.fakes import FakeServer, says
from tests.agents.farm import CHAT, TASKS, Farm, farm


def teacher(**changes) -> FakeServer:
    return FakeServer(says("never asked"), **{"seconds": 0.5, **changes})


@asynccontextmanager
async def school(**servers: FakeServer) -> AsyncIterator[Farm]:
    async with farm() as f:
        f.teacher = RoutedClient(servers, patience=Patience(healthy=20.0))
        yield f
        await f.teacher.close()


def expected(rows, index: int) -> np.ndarray:
    """As FakeServer scores."""
    return np.where(rows["response_mask"][index] > 0, -rows["responses"][index] / 1000, 0.0).astype(np.float32)


def test_a_ready_group_has_the_teachers_log_probs_and_zeros_where_nothing_was_sampled() -> None:
    async def main() -> None:
        server = teacher()
        async with school(t=server) as f:
            await f.admit(["u"])
            f.start()
            group = (await f.settled(1))["u"]
            rows = await f.trainer.get("train", [row.key for row in group.rows])
            assert (rows["teacher_log_prob"].kind, rows["teacher_log_prob"].dtype) == ("ragged", "<f4")
            for index in range(2):
                assert not rows["response_mask"][index].all(), "there is tool text in it"
                np.testing.assert_array_equal(rows["teacher_log_prob"][index], expected(rows, index))
                asked = (list(rows["prompts"][index]), list(rows["responses"][index]), 1.0)
                assert asked in server.scored, "the teacher sees the tool text, which the policy saw too"
            fields = next(fields for name, _, _, fields in f.spans if name == "session")
            assert fields["teacher_seconds"] == pytest.approx(0.5)
            assert fields["teacher_queue_seconds"] == pytest.approx(0.1)
            check_events(Event("span", name, start, end, fields=fields) for name, start, end, fields in f.spans)

    run_virtual(main())


def test_a_validation_is_not_scored() -> None:
    async def main() -> None:
        server = teacher()
        async with school(t=server) as f:
            await f.trainer.open_partition("val", tasks=TASKS)
            await f.admit(["v"], partition="val", n=1)
            f.start(partitions=("train", "val"))
            await f.settled(1, partition="val")
            assert server.scored == []

    run_virtual(main())


def test_rows_wait_for_a_teacher_that_comes_back_beyond_the_agents_own_time() -> None:
    async def main() -> None:
        server = teacher(dead=True)
        async with school(t=server) as f:
            await f.admit(["u"])
            f.start(session_timeout=5.0)
            asyncio.get_running_loop().call_later(15.0, setattr, server, "dead", False)
            group = (await f.settled(1))["u"]
            assert (group.state, group.attempt) == ("ready", 0)
            rows = await f.trainer.get("train", [row.key for row in group.rows])
            np.testing.assert_array_equal(rows["teacher_log_prob"][1], expected(rows, 1))

    run_virtual(main())


def test_a_teacher_that_stays_away_sends_the_group_back_and_no_row_is_put_without_it() -> None:
    async def main() -> None:
        server = teacher(dead=True)
        async with school(t=server) as f:
            await f.admit(["u"])
            worker = f.start()
            await asyncio.sleep(30.0)
            assert worker.counts["sessions_interrupted"] == 2
            assert worker.counts["rows"] == worker.counts["sessions_failed"] == 0
            assert (await f.trainer.stats()).partitions["train"].depth.get("ready", 0) == 0
            server.dead = False
            group = (await f.settled(1))["u"]
            assert group.state == "ready"
            rows = await f.trainer.get("train", [row.key for row in group.rows])
            np.testing.assert_array_equal(rows["teacher_log_prob"][0], expected(rows, 0))

    run_virtual(main())


class Refuses(FakeServer):
    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        raise CannotScore("this kind scores no tokens")


def test_what_the_teacher_says_of_the_tokens_ends_the_session_as_failed() -> None:
    async def main() -> None:
        async with school(t=Refuses(says("x"))) as f:
            await f.admit(["u"])
            worker = f.start()
            group = (await f.settled(1))["u"]
            assert worker.counts["sessions_failed"] == 2
            assert "CannotScore: this kind scores no tokens" in group.reason

    run_virtual(main())


class Wrong:
    """A scorer whose first log-prob is `first`, and that gives `more` of them than tokens."""

    def __init__(self, first: float, more: int) -> None:
        self._first, self._more = first, more

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], temperature: float, *, session: str
    ) -> Scores:
        return Scores([self._first] + [-1.0] * (len(response_ids) - 1 + self._more))


@pytest.mark.parametrize(
    ("first", "more", "says"),
    [
        (float("nan"), 0, "FloatingPointError: the teacher's log-prob of token 0 of .* is nan"),
        (float("-inf"), 0, "the teacher's log-prob of token 0 of .* is -inf"),
        (-1e30, 0, r"is -1e\+30"),
        (5.0, 0, "is 5; expected one from -10000 to 0"),
        (-1.0, 1, "ValueError: the teacher gave .* log-probs of .* tokens"),
    ],
)
def test_scores_that_cannot_be_end_the_session_by_the_teachers_name(first: float, more: int, says: str) -> None:
    async def main() -> None:
        async with farm() as f:
            f.teacher = Wrong(first, more)  # pyright: ignore[reportAttributeAccessIssue]
            await f.admit(["u"])
            worker = f.start()
            group = (await f.settled(1))["u"]
            assert worker.counts["rows"] == 0
            assert re.search(says, group.reason), group.reason

    run_virtual(main())


def test_teachers_that_die_at_random_moments_lose_and_change_no_row() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)

    async def main() -> None:
        servers = {"a": teacher(), "b": teacher()}
        async with school(**servers) as f:
            await f.admit([f"u{i}" for i in range(20)])
            f.start("agent-0")
            f.start("agent-1")

            async def deaths() -> None:
                while True:
                    await asyncio.sleep(rng.uniform(0.1, 2.0))
                    server = rng.choice(list(servers.values()))
                    server.dead = not server.dead

            dying = asyncio.ensure_future(deaths())
            groups = await f.settled(20)
            dying.cancel()
            assert {group.state for group in groups.values()} == {"ready"}
            keys = [row.key for group in groups.values() for row in group.rows]
            assert len(keys) == len(set(keys)) == 40
            rows = await f.trainer.get("train", keys)
            for index in range(40):
                np.testing.assert_array_equal(rows["teacher_log_prob"][index], expected(rows, index))

    run_virtual(main())


async def test_a_row_with_images_is_not_scored_as_if_it_had_none() -> None:
    server = teacher(seconds=0.0)
    client = RoutedClient({"t": server})
    context = AgentContext(
        llm=client, chat=CHAT, sampling=SamplingParams(1), budgets=Budgets(response_length=9), session="s", seed=0
    )
    text = {name: [np.array([1, 1])] * 2 for name in ("prompts", "responses", "response_mask")}
    shown = {**text, MULTI_MODAL_FIELD: [{}, {"pixel_values": np.zeros(2)}]}
    with pytest.raises(ExceptionGroup) as caught:
        await Teacher(client, 1.0).taught(SessionRows(["u_0_0", "u_0_1"], shown, [{}, {}]), context)
    assert "the row has images" in str(caught.value.exceptions[0])
    assert len(server.scored) <= 1, "the other row has none"
    await client.close()
