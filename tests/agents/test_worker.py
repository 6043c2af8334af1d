"""The worker against the real queue, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.group import MAX_ATTEMPTS
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import SamplingParams, ServerDied
from agent_loop.loop import AGENT_LOOPS, AgentContext
from agent_loop.plugins import PluginError
from agent_loop.trajectory import Trajectory
from streamrl.monitor.events import Event
from streamrl.monitor.schema import check_events
from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.fakes import FakeServer, says
from tests.agents.farm import CALL, CHAT, TASKS, config, farm
from transfer_queue.errors import Disconnected
from transfer_queue.net.messages import Token


@AGENT_LOOPS.register("test_custom")
class Custom:
    """Does what the row's extra_info says."""

    async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
        info = row["extra_info"]
        if info.get("fail_session") == row["session"] or info.get("fail_all"):
            raise LookupError("the agent lost its way")
        if "sleep" in info:
            await ctx.sleep(info["sleep"])
        if row["session"] == info.get("sleep_session", (None,))[0]:
            await ctx.sleep(info["sleep_session"][1])
        made = []
        for index in range(info.get("outputs", 1)):
            trajectory = Trajectory(prompt_ids=ctx.chat.render_prompt(row["raw_prompt"]), num_turns=2)
            await ctx.sample(trajectory, turn=index)
            trajectory.score = info.get("score")
            trajectory.score_components = info.get("parts", {})
            trajectory.extra_fields = dict(info.get("extra_fields", {}))
            made.append(trajectory)
        row["raw_prompt"].append("a loop may scribble in its row")
        return made if not info.get("nothing") else []


def test_the_components_of_a_score_that_are_asked_for_go_with_every_row(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("async def parts(**kwargs): return {'score': 1.0, 'right': 1, 'short': 0.25, 'pred': '391'}\n")

    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["of_reward"])
            await f.admit(["of_agent"], agent_name="test_custom", extra_info={"score": 2.0, "parts": {"short": 7.0}})
            f.start(reward=f"{file}:parts", reward_components=("right", "short", "absent"))
            groups = await f.settled(2)
            tags = [row.tag for uid in ("of_reward", "of_agent") for row in groups[uid].rows]
            assert [{k: v for k, v in tag.items() if k.startswith("score")} for tag in tags] == [
                *[{"score": 1.0, "score/right": 1.0, "score/short": 0.25}] * 2,
                *[{"score": 2.0, "score/short": 7.0}] * 2,
            ]

    run_virtual(main())


def test_a_score_of_more_components_than_may_travel_fails_the_session_and_says_so(tmp_path: Path) -> None:
    file, names = tmp_path / "reward.py", tuple(f"part_{i}" for i in range(9))
    file.write_text(f"async def parts(**kwargs): return {dict.fromkeys(('score', *names), 1.0)}\n")

    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["u"], n=1)
            f.start(reward=f"{file}:parts", reward_components=names)
            group = (await f.settled(1))["u"]
            assert "9 components of a score; at most 8 travel with a row" in group.reason

    run_virtual(main())


def test_a_group_becomes_ready_with_rows_of_the_schema() -> None:
    async def main() -> None:
        async with farm() as f:
            await f.admit(["u"], tag={"index": 7, "epoch": 0})
            f.start()
            group = (await f.settled(1))["u"]
            assert group.state == "ready"
            assert [row.key for row in group.rows] == ["u_0_0", "u_1_0"]
            tag = group.rows[1].tag
            assert tag == {
                "status": "success", "prompt_len": tag["prompt_len"], "response_len": tag["response_len"],
                "seq_len": tag["prompt_len"] + tag["response_len"], "global_steps": 3, "min_global_steps": 3,
                "max_global_steps": 3, "score": 1.0, "session": 1, "num_turns": 4,
            }  # fmt: skip
            rows = await f.trainer.get("train", ["u_0_0", "u_1_0"])
            types = {name: (column.kind, column.dtype) for name, column in rows.items() if column.kind != "object"}
            assert types == {
                **dict.fromkeys(["prompts", "responses", "input_ids", "position_ids"], ("ragged", "<i8")),
                "response_mask": ("ragged", "<i8"),
                "rollout_log_probs": ("ragged", "<f4"), "rm_scores": ("ragged", "<f4"),
                "weight_versions": ("ragged", "<i4"), "num_turns": ("dense", "<i8"),
            }  # fmt: skip
            assert set(rows) - set(types) == {
                "uid", "raw_prompt", "data_source", "reward_model", "extra_info", "metrics", "reward_extra_info",
            }  # fmt: skip
            mask = rows["response_mask"][1]
            assert CHAT.decode(rows["responses"][1][mask == 1]) == CALL + "<|im_end|>= 391<|im_end|>"
            assert list(rows["input_ids"][1]) == [*rows["prompts"][1], *rows["responses"][1]]
            assert list(rows["position_ids"][1]) == list(range(tag["seq_len"]))
            assert np.flatnonzero(rows["rm_scores"][1]).tolist() == [len(mask) - 1]
            assert set(rows["weight_versions"][1][mask == 0]) == {-1}
            assert rows["metrics"][1]["tool_calls"] == 1
            assert rows["metrics"][1]["generate_seconds"] == pytest.approx(0.2)
            assert rows["reward_extra_info"][1] == {"pred": "391"}
            assert rows["uid"][1] == "u"
            assert await f.held() == 0

    run_virtual(main())


def test_the_groups_tag_decides_the_sampling_and_val_may_open_later() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            worker = f.worker(partitions=("train", "val"), default_agent_loop="single_turn_agent")
            lease, asked = worker.queue.lease, []

            async def counted(partition: str, *args: Any, **kwargs: Any) -> Any:
                asked.append(partition)
                return await lease(partition, *args, **kwargs)

            worker.queue.lease = counted
            f.tasks.create_task(worker.run())
            await asyncio.sleep(5)
            assert sorted(asked) == ["train", "val"], "it waits in the queue and does not ask again"
            await f.trainer.open_partition("val", tasks=TASKS)
            await f.admit(["g"], partition="val", n=1, tag={"greedy": True, "temperature": 1.0})
            await f.admit(["t"], partition="val", n=1, tag={"temperature": 0.7, "top_k": 5})
            await f.settled(2, partition="val")
            seen = {(s.temperature, s.top_k, s.stop_token_ids) for _, _, s in f.server.calls}
            assert seen == {(0.0, -1, CHAT.stop_token_ids), (0.7, 5, CHAT.stop_token_ids)}

    run_virtual(main())


def test_sessions_beyond_the_sampled_ones_are_greedy() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            f.start("agent-0", default_agent_loop="single_turn_agent")
            await f.admit(["g"], n=3, tag={"sampled_sessions": 2})
            await f.settled(1)
            assert sorted(sampling.temperature for _, _, sampling in f.server.calls) == [0.0, 1.0, 1.0]

    run_virtual(main())


def test_sessions_that_are_closed_already_do_not_run_again() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=10.0) as f:
            await f.admit(["u"], n=4)
            first = f.start("agent-0", max_sessions=2, default_agent_loop="single_turn_agent")
            await asyncio.sleep(15)
            await first.stop()
            assert first.counts["sessions_finished"] == 2
            second = f.start("agent-1", default_agent_loop="single_turn_agent")
            group = (await f.settled(1))["u"]
            assert len(group.rows) == 4
            assert second.counts["sessions_finished"] == 2
            assert f.server.most_running == 2

    run_virtual(main())


def test_a_failing_session_fails_its_group_with_the_reason_and_the_run_goes_on() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["bad"], extra_info={"fail_session": 1}, agent_name="test_custom")
            await f.admit(["good"], extra_info={}, agent_name="test_custom")
            worker = f.start()
            groups = await f.settled(2)
            assert (groups["bad"].state, groups["good"].state) == ("dropped", "ready")
            assert "LookupError: the agent lost its way" in groups["bad"].reason
            assert worker.counts["sessions_failed"] == 1

    run_virtual(main())


def test_a_prompt_that_kills_its_servers_fails_its_group_by_name_and_is_not_tried_again() -> None:
    def script(prompt_ids: list[int], sampling: SamplingParams) -> list[int] | ServerDied:
        deadly = "kill" in CHAT.decode(prompt_ids)
        return ServerDied("CUDA error: illegal memory access") if deadly else says("= 391")(prompt_ids, sampling)

    async def main() -> None:
        server = FakeServer(script, seconds=1.0)
        async with farm(server=server, poison=3) as f:
            await f.admit(["bad"], n=4, raw_prompt=[{"role": "user", "content": "kill"}])
            await f.admit(["good"], n=4)
            f.start()
            groups = await f.settled(2)
            assert (groups["bad"].state, groups["good"].state) == ("dropped", "ready")
            assert "PoisonRequest: 3 LLM servers died under this request" in groups["bad"].reason
            assert "illegal memory access" in groups["bad"].reason
            calls = len(server.calls)
            await asyncio.sleep(100)
            assert len(server.calls) == calls

    run_virtual(main())


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"nothing": True}, "ValueError: Custom.run returned no trajectory"),
        ({"extra_fields": {"prompts": 1}}, "ValueError: extra_fields may not be called prompts"),
        ({"extra_fields": {"open_file": object()}}, "open_file"),
        ({"score": float("nan")}, "RewardError: the agent loop set nan; a score must be finite"),
        ({"score": 3.4e38}, "RewardError: the agent loop set 3.4e+38"),
        ({"score": "good"}, "RewardError: the agent loop set 'good'; expected a number"),
        ({"sleep": 1e6}, "session did not end within 100 s"),
    ],
)
def test_what_an_agent_does_wrong_is_the_reason(info: dict[str, Any], reason: str) -> None:
    @AGENT_LOOPS.register(f"test_wrong_{info}")
    class Wrong(Custom):
        async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
            return await super().run({**row, "extra_info": info}, ctx)

    Wrong.__name__ = "Custom"

    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["u"], n=1, agent_name=f"test_wrong_{info}")
            f.start(session_timeout=100.0)
            group = (await f.settled(1))["u"]
            assert group.state == "dropped"
            assert reason in group.reason

    run_virtual(main())


@AGENT_LOOPS.register("test_escape")
class Escape(Custom):
    """Raises, in its first session, what is not an Exception."""

    async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
        match row["extra_info"]["how"] if row["session"] == 0 else "":
            case "cancelled":
                raise asyncio.CancelledError("mine")
            case "interrupt":
                raise KeyboardInterrupt("mine")
            case "exit":
                raise SystemExit("mine")
            case "generator":
                raise GeneratorExit("mine")
            case "group":
                raise BaseExceptionGroup("mine", [SystemExit("mine")])
            case "cancels itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)
        return await super().run(row, ctx)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cancelled", "CancelledError (raised by the agent's code"),
        ("interrupt", "KeyboardInterrupt (raised by the agent's code"),
        ("exit", "SystemExit (raised by the agent's code"),
        ("generator", "GeneratorExit (raised by the agent's code"),
        ("group", "SystemExit (raised by the agent's code"),
        ("cancels itself", "CancelledError (raised by the agent's code"),
    ],
)
def test_what_is_no_exception_fails_the_session_and_not_the_worker(how: str, reason: str) -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["bad"], extra_info={"how": how}, agent_name="test_escape")
            await f.admit(["good"], extra_info={}, agent_name="test_custom")
            worker = f.start()
            groups = await f.settled(2)
            assert (groups["bad"].state, groups["good"].state) == ("dropped", "ready")
            assert reason in groups["bad"].reason
            assert groups["bad"].attempt == 0
            await asyncio.sleep(1)
            assert (worker.counts["sessions_failed"], worker.counts["groups_closed"]) == (1, 2)

    run_virtual(main())


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_a_tool_that_raises_what_is_no_exception_fails_the_session(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(self: Any, arguments: Any, ctx: Any) -> str:
        raise error("mine")

    monkeypatch.setattr("agent_loop.tools.calculator.Calculator.call", call)

    async def main() -> None:
        async with farm() as f:
            await f.admit(["u"])
            f.start()
            group = (await f.settled(1))["u"]
            assert (group.state, group.attempt) == ("dropped", 0)
            assert error.__name__ in group.reason

    run_virtual(main())


def test_a_stopped_worker_gives_back_a_session_whose_clean_up_breaks() -> None:
    @AGENT_LOOPS.register("test_breaks_when_stopped")
    class Breaks(Custom):
        async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
            try:
                await ctx.sleep(1e6)
            finally:
                raise LookupError("in the clean-up")

    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["u"], agent_name="test_breaks_when_stopped")
            worker = f.start()
            await asyncio.sleep(5)
            await worker.stop()
            assert worker.counts["sessions_failed"] == 0
            assert (await f.trainer.stats()).partitions["train"].depth.get("pending", 0) == 1

    run_virtual(main())


def test_a_group_that_never_ends_is_poison_after_some_attempts() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["u"])
            for _ in range(MAX_ATTEMPTS):
                leased = await f.trainer.lease("train", "generate", groups=1, holder="dies")
                await f.trainer.nack("train", leased.token, ["u"], reason="died")
            f.start()
            group = (await f.settled(1))["u"]
            assert group.state == "dead"
            assert "attempts ended without all sessions closed" in group.reason
            assert not f.server.calls

    run_virtual(main())


def test_a_row_may_not_name_a_file() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["u"], n=1, agent_name="/tmp/evil.py:Agent")
            f.start()
            assert "a row names agent loop '/tmp/evil.py:Agent'; rows may name" in (await f.settled(1))["u"].reason

    run_virtual(main())


def test_several_outputs_of_a_session_share_its_score() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(
                ["u"], n=1, agent_name="test_custom", extra_info={"outputs": 3, "extra_fields": {"note": [1]}}
            )
            f.start()
            group = (await f.settled(1))["u"]
            assert [(row.key, row.tag["score"]) for row in group.rows] == [(f"u_0_{i}", 1.0) for i in range(3)]
            assert (await f.trainer.get("train", ["u_0_2"], ["note"]))["note"][0] == [1]

    run_virtual(main())


def test_a_score_that_the_loop_sets_is_kept() -> None:
    async def main() -> None:
        async with farm("= 0") as f:
            await f.admit(["u"], n=1, agent_name="test_custom", extra_info={"score": -2.5})
            f.start(reward="")
            assert (await f.settled(1))["u"].rows[0].tag["score"] == -2.5

    run_virtual(main())


def test_a_long_session_keeps_its_lease() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=500.0) as f:
            await f.admit(["u"])
            f.start(default_agent_loop="single_turn_agent")
            group = (await f.settled(1))["u"]
            assert (group.state, group.attempt) == ("ready", 0)

    run_virtual(main())


def test_a_dead_server_sends_the_group_back_unpoisoned_and_keeps_what_was_finished() -> None:
    async def main() -> None:
        server = FakeServer(says("= 391"), seconds=10.0)
        async with farm(server=server) as f:
            await f.admit(["u"], n=4)
            worker = f.start(max_sessions=2, default_agent_loop="single_turn_agent")
            await asyncio.sleep(15)
            server.dead = True
            await asyncio.sleep(300)
            assert worker.counts["groups_returned"] > 3, "more often than max_deliver"
            server.dead = False
            group = (await f.settled(1))["u"]
            assert group.state == "ready"
            assert worker.counts["sessions_finished"] == 4

    run_virtual(main())


def test_a_lost_lease_ends_the_group_silently() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=100.0) as f:
            await f.admit(["stale", "fresh"], n=2)
            worker = f.start(default_agent_loop="single_turn_agent")
            settled = asyncio.ensure_future(f.settled(2))
            await asyncio.sleep(10)
            await f.trainer.drop("train", ["stale"], "stale")
            groups = await settled
            assert (groups["stale"].state, groups["fresh"].state) == ("dropped", "ready")
            assert worker.counts["groups_lost"] == 1
            assert len(f.server.aborted) == 2, "their slots are free at once"

    run_virtual(main())


def test_a_worker_that_slept_too_long_writes_nothing_and_forgets_the_group() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=100.0) as f:
            await f.admit(["u"])
            zombie = f.worker("zombie", max_sessions=2, default_agent_loop="single_turn_agent")

            async def renew(partition: str, token: Token) -> None:
                await asyncio.sleep(1000)

            zombie.queue.renew = renew
            f.tasks.create_task(zombie.run())
            await asyncio.sleep(20)
            f.start("agent-0", max_sessions=2, default_agent_loop="single_turn_agent")
            group = (await f.settled(1))["u"]
            assert (group.state, group.attempt, len(group.rows)) == ("ready", 1, 2)
            assert zombie.counts["sessions_finished"] == 0
            assert zombie.counts["groups_lost"] == 1

    run_virtual(main())


@pytest.mark.parametrize("gone", [60.0, 1000.0])
def test_a_worker_outlives_a_queue_that_comes_back_and_gives_up_on_one_that_does_not(gone: float) -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            worker = f.worker(default_agent_loop="single_turn_agent", queue_patience=120.0)
            lease = worker.queue.lease

            async def flaky(*args: Any, **kwargs: Any) -> Any:
                if asyncio.get_running_loop().time() < gone:
                    raise Disconnected("the controller cannot be reached")
                return await lease(*args, **kwargs)

            worker.queue.lease = flaky
            await f.admit(["u"])
            run = asyncio.ensure_future(worker.run())
            await asyncio.wait([run], timeout=500)
            assert run.done() == (gone > 120)
            if run.done():
                error = run.exception()
                assert isinstance(error, ExceptionGroup)
                assert "worker agent-0 could not lease from 'train' for 12" in error.exceptions[0].__notes__[0]
            else:
                assert worker.counts["groups_closed"] == 1
                await worker.stop()

    run_virtual(main())


def test_stop_gives_groups_back_or_lets_them_finish() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=10.0) as f:
            await f.admit(["u"])
            worker = f.start("agent-0", default_agent_loop="single_turn_agent")
            await asyncio.sleep(5)
            await worker.stop()
            assert await f.held() == 0
            worker = f.start("agent-1", default_agent_loop="single_turn_agent")
            await asyncio.sleep(5)
            await worker.stop(drain=20.0)
            assert asyncio.get_running_loop().time() == pytest.approx(15.0, abs=0.5)
            assert (await f.settled(1))["u"].state == "ready"

    run_virtual(main())


def test_no_more_sessions_run_than_allowed_and_others_get_the_rest() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=1.0) as f:
            await f.admit([f"u{i}" for i in range(20)], n=4)
            workers = [f.start(f"agent-{i}", max_sessions=8, default_agent_loop="single_turn_agent") for i in range(2)]
            groups = await f.settled(20)
            assert all(group.state == "ready" for group in groups.values())
            assert f.server.most_running == 16
            assert [worker.counts["sessions_finished"] for worker in workers] == [40, 40]
            assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.1)

    run_virtual(main())


def test_the_spans_are_those_of_the_event_table() -> None:
    async def main() -> None:
        async with farm() as f:
            await f.admit(["u"], n=1)
            await f.admit(["bad"], n=1, agent_name="test_custom", extra_info={"fail_all": True})
            f.start()
            await f.settled(2)
            check_events(Event("span", name, start, end, fields=fields) for name, start, end, fields in f.spans)
            tool, failed, session = sorted(f.spans, key=lambda span: (span[0], span[3].get("status")))[::-1]
            assert {tool[0], session[0], failed[0]} == {"tool", "session"}
            done = next(fields for _, _, _, fields in f.spans if fields.get("status") == "success")
            assert done["score"] == 1.0
            assert done["turns"] == 4
            assert done["tokens"] == len(CHAT.encode(CALL + "= 391")) + 2
            assert done["tool_seconds"] > 0
            assert done["engine_seconds"] == pytest.approx(0.4)

    run_virtual(main())


def test_tokens_do_not_depend_on_who_runs_a_session() -> None:
    async def seeds(*names: str) -> set[int | None]:
        async with farm() as f:
            await f.admit([f"u{i}" for i in range(6)])
            for name in names:
                f.start(name, max_sessions=4)
            await f.settled(6)
            return {sampling.seed for _, _, sampling in f.server.calls}

    one, three = run_virtual(seeds("a")), run_virtual(seeds("b", "c", "d"))
    assert one == three
    assert len(one) == 24


def test_what_cannot_be_loaded_is_an_error_at_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with farm() as f:
            for changes, error in (
                ({"default_agent_loop": "tool_agnt"}, "did you mean 'tool_agent'"),
                ({"agent_loops": {"mine": f"{tmp_path}/mine.py:Mine"}}, "there is no file"),
                ({"tools": {"calculater": {}}}, "did you mean 'calculator'"),
                ({"reward": "last_integr"}, "did you mean 'last_integer'"),
            ):
                with pytest.raises(PluginError, match=error):
                    f.worker(**changes)

    run_virtual(main())
    assert config().partitions == ("train",)


def test_a_dropped_group_that_is_cancelled_frees_its_slots_at_once_and_writes_nothing() -> None:
    async def main() -> None:
        async with farm("= 391", seconds=100.0) as f:
            await f.admit(["old", "next"])
            worker = f.start(max_sessions=2, default_agent_loop="single_turn_agent")
            settled = asyncio.ensure_future(f.settled(2))
            await asyncio.sleep(12)  # a renewal was at 10
            await f.trainer.drop("train", ["old"], "cancelled")
            worker.cancel("train", ["old", "unknown"])
            began = asyncio.get_running_loop().time()
            groups = await settled
            assert asyncio.get_running_loop().time() - began == pytest.approx(100, abs=1), "the next one began at once"
            assert {uid: group.state for uid, group in groups.items()} == {"old": "dropped", "next": "ready"}
            assert len(f.server.aborted) == 2
            assert (worker.counts["groups_cancelled"], worker.counts["groups_lost"]) == (1, 0)
            assert worker.counts["rows"] == 2

    run_virtual(main())


def test_a_slot_that_a_session_leaves_is_used_though_its_group_goes_on() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(
                ["slow"], n=2, agent_name="test_custom", extra_info={"score": 1.0, "sleep_session": (1, 100.0)}
            )
            await f.admit(["quick"], n=1, agent_name="test_custom", extra_info={"score": 1.0})
            f.start(max_sessions=2)
            await f.settled(1, wait=50)

    run_virtual(main())


def test_time_in_which_the_servers_sleep_does_not_count_to_a_sessions_limit() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            for uid, seconds in (("in_time", 540.0), ("late", 560.0)):
                info = {"score": 1.0, "sleep": seconds}
                await f.admit([uid], n=1, agent_name="test_custom", extra_info=info)
            worker = f.start(session_timeout=100.0)
            await asyncio.sleep(50)
            worker.hear(FleetNews(asleep=True))
            await asyncio.sleep(450)
            worker.hear(FleetNews(asleep=False))
            groups = await f.settled(2)
            assert groups["in_time"].state == "ready"
            assert "session did not end within 100 s" in groups["late"].reason

    run_virtual(main())
