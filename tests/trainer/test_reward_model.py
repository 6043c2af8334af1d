"""The stage between a lease and its update: whose score counts, and what becomes of the function's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent_loop.session import SAMPLED_SESSIONS
from streamrl.config.root import StreamRLConfig
from streamrl.config.sections.algorithm import OverlongBufferConfig, RewardConfig
from streamrl.config.sections.reward_model import RewardModelConfig
from streamrl.config.sections.trainer import TrainerConfig
from streamrl.monitor.events import EventLog
from streamrl.monitor.registry import check_step_metrics
from streamrl.single_controller.metrics import Peak, Total
from streamrl.trainer.replay_buffer import LeasedBatch
from streamrl.trainer.scores import score_metrics
from streamrl.trainer.update import Update
from tests.trainer.groups import ready_group
from tests.trainer.test_update import Ranks, config
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import Group, Token


class Scorers(Ranks):
    """Two ranks, which score rows by their keys: 10 * group + session, and 0.5 more for each row before."""

    async def compute_rm_scores(self, batch: KVBatchMeta) -> list[dict[str, Any]]:
        self.calls.append(("compute_rm_scores", batch))
        metrics = {"timing_s/reward_model": Peak(0.5), "data/bytes_read": Total(8.0)}
        return [{"scores": {key: score_of(key) for key in batch.keys[i::2]}, "metrics": metrics} for i in range(2)]


def score_of(key: str) -> float:
    uid, session, row = key.split("_")
    return 10.0 * int(uid.strip("u")) + int(session) + 0.5 * int(row)


@pytest.fixture
def events(tmp_path):
    with EventLog(tmp_path, "trainer") as log:
        yield log


def rewarded(**reward: Any) -> StreamRLConfig:
    return replace(config(), reward=RewardConfig(reward_model=RewardModelConfig(enable=True), **reward))


async def scored(chosen: StreamRLConfig, events: EventLog, groups: list[Group]) -> tuple[list[Group], Scorers, Any]:
    ranks = Scorers()
    update = Update(chosen, ranks, None, events, "train")
    batch, metrics = await update.scored(LeasedBatch(Token(1, 7), groups), step=5)
    await update.run(batch, step=5, version=4, max_age=3, staleness=1.5)
    return batch.groups, ranks, metrics


async def test_advantages_come_from_the_reward_models_scores(events):
    groups = [ready_group("u0", [1.0, 1.0]), ready_group("u1", [0.0, 0.0])]
    _, ranks, metrics = await scored(rewarded(), events, groups)
    assert ranks.methods == ["compute_rm_scores", "update_actor"]
    advantages = ranks.told("update_actor")["advantages"]
    assert advantages["u0_0_0"] == advantages["u1_0_0"] == pytest.approx(-(0.5**0.5), rel=1e-4)
    assert metrics == {"timing_s/reward_model": 0.5, "data/bytes_read": 16.0}


async def test_a_session_of_several_rows_has_the_score_of_its_last_one_which_alone_is_scored(events):
    groups, ranks, _ = await scored(rewarded(), events, [ready_group("u2", [1.0, 0.0], rows=2)])
    [batch] = [batch for method, batch in ranks.calls if method == "compute_rm_scores"]
    assert batch is not None
    assert (batch.keys, batch.token, batch.partition_id) == (["u2_0_1", "u2_1_1"], Token(1, 7), "train")
    assert [row.tag["score"] for row in groups[0].rows] == [20.5, 20.5, 21.5, 21.5]
    assert set(ranks.told("update_actor")["advantages"]) == {"u2_0_0", "u2_0_1", "u2_1_0", "u2_1_1"}


async def test_a_greedy_baseline_is_scored_too(events):
    group = ready_group("u0", [0.0, 0.0, 0.0], **{SAMPLED_SESSIONS: 2})
    remax = replace(rewarded(), algorithm=config(adv_estimator="remax").algorithm)
    _, ranks, _ = await scored(remax, events, [group])
    assert ranks.told("update_actor")["advantages"] == {"u0_0_0": -2.0, "u0_1_0": -1.0}


async def test_what_shapes_scores_shapes_these(events):
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=8.0)
    long = replace(rewarded(overlong_buffer=buffer), data=replace(config().data, max_response_length=5))
    _, ranks, _ = await scored(long, events, [ready_group("u0", [0.0, 0.0])])
    advantages = ranks.told("update_actor")["advantages"]
    assert advantages["u0_0_0"] > advantages["u0_1_0"], "0 - 6 of 4 tokens is more than 1 - 8 of 5"


async def test_the_functions_score_is_told_beside_and_of_rows_without_one_nothing(events):
    groups, _, _ = await scored(rewarded(), events, [ready_group("u1", [1.0, 0.0])])
    metrics = score_metrics(groups, 4)
    check_step_metrics(metrics)
    assert (metrics["critic/score/mean"], metrics["critic/score/function/mean"]) == (10.5, 0.5)
    without = ready_group("u1", [1.0, 0.0])
    for row in without.rows:
        del row.tag["score"]
    groups, _, _ = await scored(rewarded(), events, [without])
    metrics = score_metrics(groups, 4)
    assert metrics["critic/score/max"] == 11.0
    assert not [name for name in metrics if "function" in name]


async def test_a_replay_takes_no_recorded_score_for_the_functions(events):
    replay = replace(rewarded(), trainer=TrainerConfig(replay="/a/run"))
    groups, _, _ = await scored(replay, events, [ready_group("u1", [10.0, 11.0])])
    assert not [name for row in groups[0].rows for name in row.tag if name.startswith("score/")]


async def test_without_a_reward_model_a_batch_stays_as_it_is(events):
    batch = LeasedBatch(Token(1, 7), [ready_group("u0", [1.0, 0.0])])
    found, metrics = await Update(config(), Scorers(), None, events, "train").scored(batch, step=5)
    assert found is batch
    assert metrics == {}
