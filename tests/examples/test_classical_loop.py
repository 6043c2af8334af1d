"""examples/classical_loop: the loop as users of verl know it runs, and computes what the streaming trainer does."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config import load_config
from streamrl.data import train_dataset
from streamrl.protocol import DataProto
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.workers.actor import ActorWorker
from streamrl.workers.critic import CriticWorker
from streamrl.workers.settings import ActorSettings, CriticSettings
from tests.workers.tiny import MemoryStore
from transfer_queue.keys import row_key
from transfer_queue.metadata import KVBatchMeta

SCRIPT = Path(__file__).parents[2] / "examples/classical_loop/train_ppo.py"
SMALL = [
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "critic.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
]  # fmt: skip
WRITTEN = ("old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns", "loss_mask")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("train_ppo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_ppo"] = module
    spec.loader.exec_module(module)
    return module


def references(data: DataProto, store: MemoryStore) -> KVBatchMeta:
    """The rows of a batch, as an agent would have put them into the queue, and references to them."""
    assert data.batch is not None
    mask, width = data.batch["attention_mask"].numpy() > 0, data.batch["responses"].shape[1]
    keys, tags = [], []
    for i, (uid, session) in enumerate(
        zip(data.non_tensor_batch["uid"], data.non_tensor_batch["session"], strict=True)
    ):
        keys.append(row_key(uid, int(session)))
        whole, response = int(mask[i].sum()), int(mask[i, -width:].sum())
        tags.append({"seq_len": whole, "response_len": response, "prompt_len": whole - response})
        store.put("train", keys[-1:], {"input_ids": [data.batch["input_ids"][i].numpy()[mask[i]]]})
        for name in ("response_mask", "rollout_log_probs"):
            store.put("train", keys[-1:], {name: [data.batch[name][i, :response].numpy()]})
    scores = data.batch["token_level_scores"].sum(1).tolist()
    info = {**data.meta_info, "scores": dict(zip(keys, scores, strict=True))}
    return KVBatchMeta(keys, tags, "train", extra_info={n: value for n, value in info.items() if n != "metrics"})


def trained(views: dict[str, Any], batch: KVBatchMeta) -> dict[str, float]:
    """A step as streamrl.trainer.update makes it."""
    actor, critic = views["actor"], views["critic"]
    metrics = actor.compute_log_prob(batch) | actor.compute_ref_log_prob(batch) | critic.compute_values(batch)
    actor.compute_rewards(batch)
    metrics |= actor.compute_advantage(batch) | critic.update_critic(batch)
    batch.extra_info = {**(batch.extra_info or {}), "advantage_columns": True}
    return metrics | actor.update_actor(batch)


def test_two_steps_move_the_weights_and_give_the_figures_of_the_queues_path(script: Any, tmp_path: Path):
    config = load_config([*script.SETTINGS, "trainer.total_training_steps=2", *SMALL]).config
    group, store = LocalWorkerGroup(script.workers(config, tmp_path)), MemoryStore({})
    queue = LocalWorkerGroup({
        "actor": ClassWithInitArgs(ActorWorker, ActorSettings.of(config), store),
        "critic": ClassWithInitArgs(CriticWorker, CriticSettings.of(config), store),
    })  # fmt: skip
    views, rollout_views = queue.spawn(), group.spawn()
    for view in views.values():
        view.init_model()
    digests = {views["actor"].state_digest()}
    trainer = script.PPOTrainer(config, **rollout_views, prompts=train_dataset(config), directory=tmp_path)
    for step, data in enumerate(trainer.fit(2)):
        batch, metrics = references(data, store), data.meta_info["metrics"]
        expected = trained(views, batch)
        for name in WRITTEN:
            for row, key in zip(data.batch[name].numpy(), batch.keys, strict=True):
                column = store.columns[name][key]
                np.testing.assert_allclose(row[: len(column)], column, atol=1e-6, err_msg=name)
        same = [name for name in expected if not name.startswith(("timing", "actor/seconds", "data/"))]
        assert {name: metrics[name] for name in same} == pytest.approx({n: expected[n] for n in same}, abs=1e-6)
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        assert metrics["actor/optimizer_steps"] == 2.0
        versions = data.batch["weight_versions"][data.batch["response_mask"] > 0]
        assert set(versions.tolist()) == {step}, "the server samples with the weights of the last step"
        digests.add(rollout_views["actor"].state_digest())
    assert len(digests) == 3
    queue.shutdown()
    group.shutdown()
    assert {path.name for path in (tmp_path / "actor").iterdir()}
    assert {path.name for path in (tmp_path / "critic").iterdir()}


def figures(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", printed)]


def test_answers_are_compared_with_each_other_and_the_reward_may_return_a_dict(script: Any, tmp_path: Path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, unit):\n"
        "    assert extra_info['last_turn'] in solution_str\n"
        "    return {'score': unit * len(solution_str), 'said': solution_str}\n"
    )
    chosen = [
        *SMALL, "algorithm.adv_estimator=grpo", f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.reward_kwargs.unit=0.5", "algorithm.kl_ctrl.kl_coef=0",
    ]  # fmt: skip
    config = script.checked(chosen, 1)
    group = LocalWorkerGroup(script.workers(config, tmp_path))
    views = group.spawn()
    assert "critic" not in views
    trainer = script.PPOTrainer(config, **views, prompts=train_dataset(config), directory=tmp_path)
    (data,) = trainer.fit(1)
    group.shutdown()
    scores, advantages = data.batch["token_level_scores"].sum(1), data.batch["advantages"]
    first = data.batch["response_mask"].argmax(1, keepdim=True)
    found = advantages.gather(1, first).reshape(4, 3)
    each = scores.reshape(4, 3)
    expected = (each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-6)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-3)
    assert scores.unique().numel() > 1


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1", "needs n >= 2"),
        ("algorithm.adv_estimator=remax", "needs baseline, which only `streamrl train` has"),
        ("algorithm.use_kl_in_reward=false", "set algorithm.kl_ctrl.kl_coef=0"),
    ],
)
def test_what_the_loop_cannot_do_is_a_line(script: Any, capsys: pytest.CaptureFixture[str], argument: str, says: str):
    with pytest.raises(SystemExit) as ended:
        script.main(argument.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_the_help_says_which_keys_count(script: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert "these count:" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_print_what_one_process_prints(script: Any, capsys: pytest.CaptureFixture[str]):
    arguments = ["--steps", "2", *SMALL]
    script.main(arguments)
    local = capsys.readouterr().out
    ranks = subprocess.run(
        [sys.executable, str(SCRIPT), "--ray", *arguments], capture_output=True, text=True, timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=SCRIPT.parents[2], check=False,
    )  # fmt: skip
    assert ranks.returncode == 0, ranks.stderr
    assert local.count("step") == 2
    assert figures(ranks.stdout) == pytest.approx(figures(local), abs=1e-3)
