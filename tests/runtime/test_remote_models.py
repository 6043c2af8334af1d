"""A run whose teacher and whose judge somebody else serves, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from streamrl.config import to_yaml
from streamrl.errors import UserError
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.preflight import not_installed
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session
from tests.fake_remote import KEY, Remote, log_prob, scores
from tests.http_app import Answer, Asked

REAL_TIME = (
    "runtime=local", "trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.strategy=sim",
    "actor_rollout_ref.rollout.name=sim", "actor_rollout_ref.rollout.sim.token_seconds=0.001",
    "actor_rollout_ref.actor.sim.step_seconds=0.1",
    "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent", "trainer.val_before_train=false",
    "trainer.total_training_steps=2",
)  # fmt: skip
REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, judge):
    said = await judge.chat([{"role": "user", "content": str(ground_truth)}], max_tokens=1)
    return float(said.text)
"""


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setenv("REMOTE_KEY", KEY.value)
    remote = Remote()
    yield remote
    remote.app.close()


def at(remote: Remote, key: str, model: str) -> list[str]:
    given = {"base_url": remote.app.url + "/v1", "model": model, "key_env": "REMOTE_KEY", "timeout": 5}
    return [f"{key}.{name}={value}" for name, value in given.items()]


def teacher(remote: Remote) -> list[str]:
    chosen = [f"distillation.teacher_model.{each}" for each in ("name=openai", "placement=servers")]
    return ["distillation.enabled=true", *chosen, *at(remote, "distillation.teacher_model.remote", "teacher")]


def ran(config) -> tuple[Path, list[tuple[np.ndarray, ...]]]:
    """The run's directory; responses, their mask and the teacher's log-probs of all rows that were trained."""
    directory = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="auto", resume_from=None)
    read: list[tuple[np.ndarray, ...]] = []

    async def main() -> None:
        async with local_parts(config, directory) as parts:
            session, update = Session(parts), parts.actor.update_actor

            async def looked_at(batch):
                names = ["responses", "response_mask", "teacher_log_prob"]
                columns = await parts.queue.get(batch.partition_id, batch.keys, names)
                for index in range(len(batch.keys)):
                    read.append(tuple(np.asarray(columns[name][index]) for name in names))
                return await update(batch)

            parts.actor.update_actor = looked_at
            await session.run()

    try:
        asyncio.run(main())
    finally:
        directory.release()
    return directory.path, read


def test_rows_have_the_remote_teachers_log_probs_and_the_remote_judges_scores(
    make_config, remote: Remote, tmp_path: Path
) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.path.endswith("/chat/completions"):
            return Answer({"choices": [{"message": {"content": "0.25"}}]})
        return scores(asked)

    remote.answer = answer
    (tmp_path / "reward.py").write_text(REWARD)
    judged = [f"reward.custom_reward_function.path={tmp_path}/reward.py", *at(remote, "reward.judge", "judge")]
    judged += ["reward.custom_reward_function.name=compute_score"]
    path, read = ran(make_config(*judged, *teacher(remote), base=REAL_TIME))
    assert len(read) == 2 * 8 * 4
    for responses, mask, told in read:
        expected = [log_prob(int(token)) if here else 0.0 for token, here in zip(responses, mask, strict=True)]
        assert told.tolist() == expected
    assert {asked.body["model"] for asked in remote.seen} == {"teacher", "judge"}
    assert all(asked.headers["authorization"] == f"Bearer {KEY.value}" for asked in remote.seen)
    assert {line["critic/score/mean"] for line in read_metrics(path)} == {0.25}
    sessions = [event for event in read_events(path) if event.name == "session"]
    assert any(event.fields.get("teacher_seconds", 0) > 0 for event in sessions)
    assert not any(KEY.value in file.read_text(errors="ignore") for file in path.rglob("*") if file.is_file())


def test_a_run_whose_teacher_cannot_score_does_not_begin(make_config, remote: Remote) -> None:
    config = make_config(*teacher(remote), base=REAL_TIME)
    with pytest.raises(UserError, match=r"teacher_model\.remote: teacher at .* tells no log-probs of given tokens"):
        ran(config)
    assert not list(not_installed(config))


def test_a_key_that_is_not_there_is_told_before_anything_starts(
    make_config, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(*teacher(remote), base=REAL_TIME)
    monkeypatch.delenv("REMOTE_KEY")
    (problem,) = not_installed(config)
    assert problem.startswith("distillation.teacher_model.remote: the environment variable REMOTE_KEY holds no API key")
