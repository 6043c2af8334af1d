"""What every LLM server keeps while it sleeps: the shared suite's part on colocation, over the same implementations."""

from __future__ import annotations

import asyncio

import pytest

from agent_loop.llm.protocol import LLMServer, ServerDied
from tests.rollout.test_llm_server import LONG, SLOTS, Case, case, check, start, until_tokens

__all__ = ["case"]


def test_a_request_that_comes_during_sleep_waits_and_ends_after_it(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        await server.sleep()
        asked = [start(server, f"r{i}", 5) for i in range(SLOTS + 2)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in asked)
        load = await server.load()
        assert (load.asleep, load.running + load.waiting, load.tokens_generated) == (True, SLOTS + 2, 0)
        assert not any(piece.token_ids for piece in (await server.progress({"r0": 0})).values())
        await server.wake_up()
        for got in await asyncio.gather(*asked):
            check(got)
            assert (len(got.token_ids), got.stop_reason) == (5, "length")
        assert not (await server.load()).asleep

    case.run(test)


def test_an_abort_during_sleep_is_answered_at_once_with_the_tokens_there_are(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = [start(server, f"r{i}", LONG) for i in range(SLOTS)]
        waiting = [start(server, f"w{i}", LONG) for i in range(3)]
        await until_tokens(server, 20)
        await server.sleep()
        made = (await server.load()).tokens_generated
        assert await server.abort(["r0", "w0", "unknown"]) == 2
        first, none = await running[0], await waiting[0]
        check(first)
        assert (first.stop_reason, none.stop_reason, none.token_ids) == ("aborted", "aborted", [])
        assert first.token_ids
        assert await server.abort() == SLOTS + 1
        ended = await asyncio.gather(*running[1:], *waiting[1:])
        assert {got.stop_reason for got in ended} == {"aborted"}
        assert made == len(first.token_ids) + sum(len(got.token_ids) for got in ended), "no token is lost"
        load = await server.load()
        assert (load.asleep, load.running, load.waiting) == (True, 0, 0)
        await server.wake_up()
        assert len((await start(server, "next", 7)).token_ids) == 7

    case.run(test)


def test_several_versions_may_come_during_one_sleep_and_the_last_one_serves(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = start(server, "running", LONG)
        await until_tokens(server, 5)
        await server.sleep()
        for version in (1, 2):
            await server.update_weights(case.publish(version), version)
        load = await server.load()
        assert (load.weight_version, load.asleep) == (2, True), "new weights do not wake it"
        await server.wake_up()
        got = await running
        check(got)
        assert set(got.weight_versions) == {0, 2}
        assert len(got.token_ids) == LONG

    case.run(test)


def test_sleeping_twice_is_one_sleep_and_waking_an_awake_server_is_nothing(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        await server.wake_up()
        assert len((await start(server, "awake", 3)).token_ids) == 3
        for turn in range(2):
            running = start(server, f"r{turn}", LONG)
            await until_tokens(server, (await server.load()).tokens_generated + 5)
            await server.sleep()
            await server.sleep()
            before = (await server.load()).tokens_generated
            await server.wake_up()
            await server.wake_up()
            got = await running
            check(got)
            assert (len(got.token_ids), got.stop_reason) == (LONG, "length")
            assert before < (await server.load()).tokens_generated

    case.run(test)


def test_a_pause_outlives_a_sleep_within_it(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = start(server, "running", LONG)
        await until_tokens(server, 5)
        await server.pause()
        await server.sleep()
        await server.wake_up()
        before = (await server.load()).tokens_generated
        await asyncio.sleep(0.05)
        assert (await server.load()).tokens_generated == before
        await server.resume()
        assert len((await running).token_ids) == LONG

    case.run(test)


def test_a_server_that_is_closed_asleep_fails_what_waits(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = start(server, "running", LONG)
        await until_tokens(server, 5)
        await server.sleep()
        waiting = start(server, "waiting", 3)
        await asyncio.sleep(0.01)
        await server.close()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ServerDied, ServerDied]
        with pytest.raises(ServerDied):
            await server.wake_up()

    case.run(test)
