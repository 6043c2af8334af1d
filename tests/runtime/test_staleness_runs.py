"""Staleness policies, dynamic sampling and samplers in whole runs: simulated servers and ranks on a virtual clock."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from rich.console import Console

from streamrl.config import to_yaml
from streamrl.monitor.events import Event, read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import Summary
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.runtime.launch import launch
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session
from streamrl.trainer.batch_log import read_batch_log
from streamrl.trainer.group_buffer import LIVE
from tests.runtime.conftest import small_config
from tests.runtime.test_local_run import run
from transfer_queue.metadata import KVBatchMeta

ROLLOUT, V1 = "actor_rollout_ref.rollout", "trainer.v1"
LONG_TAIL = (
    f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent", f"{ROLLOUT}.sim.response_tokens_mean=12",
    f"{ROLLOUT}.sim.response_tokens_sigma=1.0", f"{ROLLOUT}.sim.token_seconds=0.02", f"{ROLLOUT}.max_num_seqs=24",
    f"{ROLLOUT}.agent.max_sessions=24", "actor_rollout_ref.actor.sim.step_seconds=0.2",
    "trainer.val_before_train=false", "trainer.total_training_steps=40",
)  # fmt: skip
"""A group takes from a fifth of a step to four steps."""
WORST = "training/off_policy/trajectory_staleness_worst/max"


def policy(strategy: str, threshold: int, ahead: float = 3) -> tuple[str, ...]:
    return (
        f"{V1}.trainer_mode=separate_async", f"{V1}.separate_async.num_warmup_batches={ahead}",
        f"{V1}.sampler.max_off_policy_strategy={strategy}", f"{V1}.sampler.max_off_policy_threshold={threshold}",
    )  # fmt: skip


def worst_ages(path: Path) -> list[float]:
    return [line[WORST] for line in read_metrics(path)]


def trained_orders(path: Path) -> list[int]:
    return [order for step in read_batch_log(path / "batches.jsonl") for order in step.orders]


def told_sessions(path: Path) -> list[Event]:
    return [e for e in read_events(path) if e.name == "session" and e.fields["partition"] == "train"]


def lengths(path: Path) -> dict[str, list[int]]:
    """Tokens of the sessions that ended, by group."""
    found: dict[str, list[int]] = {}
    for event in told_sessions(path):
        if event.fields["status"] == "success":
            found.setdefault(str(event.fields["uid"]), []).append(int(event.fields["tokens"]))
    return found


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Summary]]:
    """A run of 40 steps with this policy; several tests look at the same one."""
    known: dict[tuple[str, int], tuple[Path, Summary]] = {}

    def get(strategy: str, threshold: int) -> tuple[Path, Summary]:
        if (strategy, threshold) not in known:
            runs = f"trainer.runs_dir={tmp_path_factory.mktemp(strategy)}"
            known[strategy, threshold] = run(small_config(*LONG_TAIL, *policy(strategy, threshold, 1), runs))
        return known[strategy, threshold]

    return get


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_wait_drops_nothing_trains_nothing_too_old_and_leaves_no_long_answer_behind(long_run, threshold: int) -> None:
    path, summary = long_run("wait", threshold)
    assert summary.status == "finished"
    assert max(worst_ages(path)) <= threshold - 1
    assert sum(summary.groups.dropped.values()) == 0
    orders = trained_orders(path)
    assert len(set(orders)) == len(orders) == 320
    assert set(range(320 - 8 * threshold)) <= set(orders), "but for those that are out at the end"
    assert threshold != 2 or summary.lost_seconds_by_cause["wait_order"] > 0


def test_drop_cancels_in_flight_what_can_no_longer_be_used_and_refills_exactly_that(long_run) -> None:
    path, summary = long_run("drop", 2)
    assert max(worst_ages(path)) <= 1
    told = [event.fields for event in read_events(path) if event.name == "dropped"]
    cancelled = [str(fields["uid"]) for fields in told if "cancelled" in str(fields["reason"])]
    assert len(cancelled) == summary.groups.dropped["cancelled"] > 10
    issued = 1 + max(int(str(e.fields["uid"])[3:]) for e in told_sessions(path))
    assert 0 <= issued - 320 - sum(summary.groups.dropped.values()) <= 16, "what is out is within the credit"
    sessions = lengths(path)
    assert all(len(sessions.get(uid, [])) < 4 for uid in cancelled), "its last session never ended"


def test_what_was_cancelled_in_flight_is_accounted_to_the_token_and_to_the_slot_second(long_run) -> None:
    path, _ = long_run("drop", 2)
    events, sessions = list(read_events(path)), told_sessions(path)
    cut = [event.fields for event in sessions if event.fields["status"] == "cancelled"]
    assert sum(fields["tokens"] for fields in cut) > 0
    sampled = [event for event in events if event.name == "server_tokens"][-1]
    told = sum(event.fields["tokens"] for event in sessions if event.end <= sampled.start)
    under_way = sum(event.fields["tokens"] for event in sessions if event.start < sampled.start < event.end)
    assert told <= sampled.value <= told + under_way
    held = sum(event.fields["engine_seconds"] for event in sessions)
    assert held == pytest.approx(0.02 * sum(event.fields["tokens"] for event in sessions), rel=0.02)
    wasted = [line.get("waste/tokens/cancelled", 0.0) for line in read_metrics(path)]
    assert sum(wasted) > sum(fields["tokens"] for fields in cut) / 2 > 0


def test_the_length_bias_is_that_against_what_would_have_been_drawn(long_run) -> None:
    drawn = mean(line["response_length/mean"] for line in read_metrics(long_run("mask", 2)[0]))
    *_, last = read_metrics(long_run("drop", 2)[0])
    trained = mean(line["response_length/mean"] for line in read_metrics(long_run("drop", 2)[0]))
    assert last["sampling/length_bias"] == pytest.approx(trained / drawn, abs=0.03)


def test_drop_is_biased_to_short_answers_which_wait_and_mask_are_not(long_run) -> None:
    def trained(strategy: str) -> float:
        return mean(line["response_length/mean"] for line in read_metrics(long_run(strategy, 2)[0]))

    assert trained("wait") == pytest.approx(trained("mask"), rel=0.02)
    assert trained("drop") < 0.95 * trained("wait")


def test_mask_trains_old_groups_without_their_old_tokens(long_run) -> None:
    path, summary = long_run("mask", 2)
    lines = list(read_metrics(path))
    assert max(line[WORST] for line in lines) > 1
    assert max(line["training/off_policy/token_staleness_trained/max"] for line in lines) == 1
    assert max(line["training/off_policy/masked_ratio"] for line in lines) > 0
    assert sum(summary.groups.dropped.values()) == 0


def test_wait_keeps_its_promise_over_a_crash(make_config) -> None:
    config = make_config(*LONG_TAIL, *policy("wait", 3, 2), "trainer.save_freq=3", "trainer.total_training_steps=16")
    directory = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="auto", resume_from=None)

    async def crash() -> None:
        async with local_parts(config, directory) as parts:
            update, updates = parts.actor.update_actor, []

            async def update_until_the_crash(batch: KVBatchMeta) -> dict[str, float]:
                updates.append(batch)
                if len(updates) == 9:
                    raise RuntimeError("the ranks are gone")
                return await update(batch)

            parts.actor.update_actor = update_until_the_crash
            await Session(parts).run()

    with pytest.raises(RuntimeError, match="the ranks are gone"):
        run_virtual(crash())
    directory.release()
    path, summary = run(config)
    assert path == directory.path
    orders = trained_orders(path)
    assert len(set(orders)) == len(orders) == 16 * 8
    assert max(worst_ages(path)) <= 2
    assert sum(summary.groups.dropped.values()) == 0


def test_without_a_policy_the_age_is_only_measured(make_config) -> None:
    path, summary = run(make_config(*LONG_TAIL, *policy("null", 2)))
    assert max(worst_ages(path)) > 3
    assert sum(summary.groups.dropped.values()) == 0


def test_while_the_critic_warms_up_no_version_is_published_and_nothing_ages(make_config) -> None:
    path, _ = run(
        make_config(*LONG_TAIL, *policy("drop", 3, 2), "trainer.critic_warmup=5", "trainer.total_training_steps=12")
    )
    published = [e.fields["version"] for e in read_events(path) if e.kind == "span" and e.name == "publish"]
    assert published == [0, *range(1, 8)]
    ages = worst_ages(path)
    assert ages[:6] == [0.0] * 6, "step 6 is the first that moves the actor"
    assert max(ages) <= 2


def test_several_mini_batches_make_one_version(make_config) -> None:
    four = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{V1}.separate_async.parameter_sync_step=4")
    path, _ = run(make_config(*LONG_TAIL, *policy("wait", 2), *four, "trainer.total_training_steps=15"))
    published = [e.fields["version"] for e in read_events(path) if e.kind == "span" and e.name == "publish"]
    assert published == list(range(16))
    assert max(worst_ages(path)) <= 1
    assert [line["actor/optimizer_steps"] for line in read_metrics(path)] == [4.0] * 15


LONGEST_FIRST = """
class LongestFirst:
    def __init__(self, least=0):
        self.least = least

    def choose(self, ready, count, version):
        if len(ready) < self.least:
            return None
        return sorted(ready, key=lambda group: -max(row.tag["response_len"] for row in group.rows))[:count]
"""


def test_a_sampler_of_the_users_chooses_among_the_ready_groups(make_config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LONGEST_FIRST)
    mine = (
        f"{V1}.sampler.custom_sampler.path={tmp_path}/mine.py", f"{V1}.sampler.custom_sampler.name=LongestFirst",
        f"+{V1}.sampler.sampler_kwargs.least=16",
    )  # fmt: skip
    few = ("trainer.total_training_steps=6", *policy("null", 8, 3))
    path, _ = run(make_config(*LONG_TAIL, *few, *mine))
    first = read_batch_log(path / "batches.jsonl")[0]
    known = lengths(path)
    plain, _ = run(make_config(*LONG_TAIL, *few))
    oldest = read_batch_log(plain / "batches.jsonl")[0]
    assert oldest.orders == sorted(oldest.orders)
    assert mean(max(known[uid]) for uid in first.uids) > 1.3 * mean(max(known[uid]) for uid in oldest.uids)


HALF_ALIKE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    same = extra_info["index"] % 2
    return 1.0 if same else float(len(solution_str) % 7)
"""


def dapo(tmp_path: Path) -> tuple[str, ...]:
    """Every second prompt scores the same with every answer."""
    answer = {"reward_model": {"ground_truth": "1"}, "data_source": "sums"}
    rows = [{"prompt": f"{i} + 1 = ?", "extra_info": {"index": i}, **answer} for i in range(512)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "half.py").write_text(HALF_ALIKE)
    return (
        f"data.train_files={tmp_path}/train.jsonl", "data.shuffle=false",
        f"reward.custom_reward_function.path={tmp_path}/half.py", "algorithm.filter_groups.enable=true",
        "trainer.total_training_steps=12",
    )  # fmt: skip


def test_sync_over_issues_by_the_filter_rate_and_trains_by_prompt_order(make_config, tmp_path: Path) -> None:
    path, summary = run(make_config(*LONG_TAIL, *dapo(tmp_path), f"{V1}.trainer_mode=sync"))
    lines = list(read_metrics(path))
    assert all(line["groups/zero_variance"] == 0 for line in lines)
    assert worst_ages(path) == [0.0] * 12
    orders = trained_orders(path)
    assert orders == sorted(orders)
    assert all(order % 2 == 0 for order in orders)
    surplus = summary.groups.dropped.get("surplus", 0)
    assert summary.groups.dropped["filtered"] >= 80
    assert surplus < 48, "about half a batch a step is too many"
    skipped = set(range(max(orders))) - set(orders)
    assert len([order for order in skipped if order % 2 == 0]) <= surplus


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_groups_that_are_all_filtered_out_end_the_run_which_says_so(make_config, tmp_path: Path, mode: str) -> None:
    alike = dapo(tmp_path)
    (tmp_path / "half.py").write_text("def compute_score(**_):\n    return 1.0\n")
    config = make_config(
        *LONG_TAIL, *alike, f"{V1}.trainer_mode={mode}", "algorithm.filter_groups.max_num_gen_batches=2"
    )
    directory = open_run(Path(config.trainer.runs_dir), "t", to_yaml(config), resume_mode="disable", resume_from=None)
    told = io.StringIO()
    assert launch(config, directory, Console(file=told, force_terminal=False, width=400)) == 1
    assert re.search(r"(16|17|18|19|2\d) prompt groups since the last step were filtered out", told.getvalue())


def test_async_over_issues_within_the_staleness_credit(make_config, tmp_path: Path) -> None:
    path, _ = run(make_config(*LONG_TAIL, *dapo(tmp_path), *policy("drop", 3, 1)))
    assert all(line["groups/zero_variance"] == 0 for line in read_metrics(path))
    assert len(trained_orders(path)) == 96
    depths: dict[float, float] = {}
    for event in read_events(path):
        if event.name == "queue_groups" and event.fields["partition"] == "train" and event.fields["state"] in LIVE:
            assert isinstance(event.value, int | float)
            depths[event.start] = depths.get(event.start, 0) + event.value
    assert 16 < max(depths.values()) <= 24, "beyond two batches, but no more than three can be trained in time"


def test_colocated_servers_sleep_while_a_step_trains_and_the_tail_carries_over(make_config) -> None:
    slow = (f"{ROLLOUT}.agent.session_timeout=200", "trainer.total_training_steps=12")
    config = make_config(*LONG_TAIL, f"{V1}.trainer_mode=colocate_async", *slow)
    directory = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="auto", resume_from=None)
    asleep: list[bool] = []

    async def main() -> Summary:
        async with local_parts(config, directory) as parts:
            assert isinstance(parts.servers, LLMServerManager)
            [server] = parts.servers.servers.values()
            update = parts.actor.update_actor

            async def watched(batch: KVBatchMeta) -> dict[str, float]:
                before = (await server.load()).tokens_generated
                metrics = await update(batch)
                asleep.append((await server.load()).tokens_generated == before)
                return metrics

            parts.actor.update_actor = watched
            return await Session(parts).run()

    summary = run_virtual(main())
    directory.release()
    assert summary.status == "finished"
    assert asleep == [True] * 12
    lines = list(read_metrics(directory.path))
    assert max(line["training/off_policy/trajectory_spans/max"] for line in lines) >= 1, "its rows have both versions"
    assert max(line[WORST] for line in lines) <= 7
