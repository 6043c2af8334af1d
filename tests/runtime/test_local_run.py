"""The whole loop in one process: the simulated server on a virtual clock, and the real engines for a few steps."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.config import StreamRLConfig, to_yaml
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics, read_validations
from streamrl.monitor.registry import check_step_metrics
from streamrl.monitor.schema import check_events
from streamrl.monitor.summary import Summary, read_summary
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.runtime.launch import launch
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session
from streamrl.runtime.settings import agent_worker, weights_dir
from streamrl.trainer.batch_log import read_batch_log
from streamrl.weight_sync import WeightsNotPrivate
from transfer_queue.metadata import KVBatchMeta

MODES = ("sync", "separate_async")


def run(config: StreamRLConfig) -> tuple[Path, Summary]:
    directory = open_run(
        Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode=config.trainer.resume_mode, resume_from=None
    )
    console = Console(file=io.StringIO(), force_terminal=False)
    assert launch(config, directory, console) == 0, console.file.getvalue()
    directory.release()
    return directory.path, read_summary(directory.path)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_each_prompt_once_in_virtual_time(make_config, mode: str) -> None:
    began = time.monotonic()
    slow = "actor_rollout_ref.rollout.sim.token_seconds=1.0"
    path, summary = run(make_config(f"trainer.v1.trainer_mode={mode}", slow))
    assert summary.status == "finished"
    assert summary.groups.trained == 80
    steps = read_batch_log(path / "batches.jsonl")
    assert [step.step for step in steps] == list(range(1, 11))
    orders = [order for step in steps for order in step.orders]
    assert len(set(orders)) == len(orders) == 80
    assert summary.train_seconds > 5 * (time.monotonic() - began)


def test_sync_trains_only_tokens_of_the_version_being_trained(make_config) -> None:
    path, _ = run(make_config("trainer.v1.trainer_mode=sync"))
    worst = [line["training/off_policy/trajectory_staleness_worst/max"] for line in read_metrics(path)]
    assert worst == [0.0] * 10


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_no_token_older_than_the_threshold_is_trained(make_config, threshold: int) -> None:
    path, summary = run(
        make_config(
            "trainer.v1.trainer_mode=separate_async",
            f"trainer.v1.sampler.max_off_policy_threshold={threshold}",
            "trainer.v1.separate_async.num_warmup_batches=3",
            "actor_rollout_ref.rollout.sim.response_tokens_sigma=1.0",
        )
    )
    worst = [line["training/off_policy/trajectory_staleness_worst/max"] for line in read_metrics(path)]
    assert max(worst) <= threshold - 1
    assert summary.groups.trained == 80


def test_with_a_fixed_lag_every_token_is_that_many_versions_old(make_config) -> None:
    path, _ = run(
        make_config(
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.num_warmup_batches=3",
            "trainer.v1.separate_async.fixed_lag=true",
            "trainer.v1.sampler.max_off_policy_threshold=4",
        )
    )
    name = "training/off_policy/trajectory_staleness"
    ages = [(line[f"{name}/min"], line[f"{name}_worst/max"]) for line in read_metrics(path)]
    assert ages[3:] == [(3.0, 3.0)] * 7


def test_generation_overlaps_with_training_only_in_the_asynchronous_mode(make_config) -> None:
    balanced = (
        "actor_rollout_ref.actor.sim.step_seconds=3.0",
        "actor_rollout_ref.rollout.sim.token_seconds=0.04",
        "trainer.total_training_steps=15",
    )
    seconds = {mode: run(make_config(f"trainer.v1.trainer_mode={mode}", *balanced))[1].train_seconds for mode in MODES}
    assert seconds["separate_async"] < 0.75 * seconds["sync"]


def test_what_a_run_writes_is_in_the_tables(make_config) -> None:
    path, _ = run(make_config())
    assert check_events(read_events(path)) > 100
    for line in read_metrics(path):
        check_step_metrics({name: value for name, value in line.items() if name != "step"})


def test_only_prompts_pass_through_the_trainer_however_long_the_answers(make_config) -> None:
    passed = {}
    for tokens in (8, 32):
        mean = f"actor_rollout_ref.rollout.sim.response_tokens_mean={tokens}"
        path, _ = run(make_config(mean, "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"))
        lines = list(read_metrics(path))[2:]
        groups = sum(line["groups/trained"] for line in lines)
        passed[tokens] = sum(line["data/bytes_trainer"] for line in lines) / groups
        rows = sum(line["data/bytes_read"] for line in lines) / sum(line["rows/trained"] for line in lines)
        assert rows > 12 * tokens, "the ranks read the tokens, so there was something to pass by"
    assert passed[8] == pytest.approx(passed[32], rel=0.1)
    assert passed[32] < 2000


def test_lost_time_and_busy_time_add_up_to_the_time_of_the_steps(make_config) -> None:
    _, summary = run(make_config())
    spent = summary.busy_seconds["training"] + sum(summary.lost_seconds_by_cause.values())
    assert spent == pytest.approx(summary.measured_seconds, rel=1e-6)


def test_a_stop_between_two_mini_batches_of_a_step_finishes_the_step_first(make_config) -> None:
    two = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.v1.separate_async.parameter_sync_step=2")
    # The server has room for one mini-batch, so that the second one of a step has to be waited for.
    slow = ("actor_rollout_ref.rollout.max_num_seqs=16", "trainer.v1.separate_async.num_warmup_batches=0")
    config = make_config(*two, *slow, "trainer.v1.trainer_mode=separate_async")
    directory = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="auto", resume_from=None)

    async def main() -> Summary:
        async with local_parts(config, directory) as parts:
            session, actor = Session(parts), parts.actor
            update, updates = actor.update_actor, []

            async def update_and_stop(batch: KVBatchMeta) -> dict[str, float]:
                metrics = await update(batch)
                updates.append(batch)
                if len(updates) == 5:  # the first of two in step 3
                    session.stop()
                return metrics

            actor.update_actor = update_and_stop
            return await session.run()

    summary = run_virtual(main())
    directory.release()
    assert (summary.status, summary.steps) == ("interrupted", 3)
    assert [path.parent.name for path in directory.checkpoints.glob("*/manifest.json")] == ["global_step_3"]
    assert [len(step.orders) for step in read_batch_log(directory.batches)] == [8, 8, 8]
    path, summary = run(config)
    assert path == directory.path
    orders = [order for step in read_batch_log(path / "batches.jsonl") for order in step.orders]
    assert len(set(orders)) == len(orders) == 80
    assert summary.groups.trained == 80


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_real_engines_train_in_one_process(make_config, mode: str) -> None:
    real = ("runtime=local", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2")
    path, summary = run(make_config(f"trainer.v1.trainer_mode={mode}", base=real))
    assert summary.groups.trained == 16
    assert summary.val_sampled_before is not None
    assert 0.1 <= summary.val_sampled_before <= 0.9
    for line in read_metrics(path):
        check_step_metrics({name: value for name, value in line.items() if name != "step"})
        assert line["actor/grad_norm"] > 0


FLAKY_LOOP = """
from agent_loop.trajectory import Trajectory

class Flaky:
    async def run(self, row, ctx):
        if row["extra_info"]["index"] % 4 == 0:
            raise RuntimeError("this agent cannot do multiples of four")
        trajectory = Trajectory(prompt_ids=ctx.chat.render_prompt(row["raw_prompt"]))
        await ctx.sample(trajectory, turn=0)
        return [trajectory]
"""


def questions(directory: Path) -> Path:
    """A dataset whose rows name no agent, so that the default loop runs them."""
    rows = [{"prompt": f"{i} + 1 = ?", "data_source": "sums", "extra_info": {"index": i}} for i in range(64)]
    path = directory / "train.jsonl"
    path.write_text("".join(json.dumps({**row, "reward_model": {"ground_truth": "1"}}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_custom_loop_ends_its_groups_with_the_reason_and_the_run_goes_on(
    make_config, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY_LOOP)
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/flaky.py:Flaky"
    data = questions(tmp_path)
    path, summary = run(make_config(loop, f"data.train_files={data}", f"trainer.v1.trainer_mode={mode}"))
    assert summary.groups.trained == 80
    assert summary.groups.dropped["failed"] >= 16
    reasons = {str(event.fields["reason"]) for event in read_events(path) if event.name == "dropped"}
    assert any("this agent cannot do multiples of four" in reason for reason in reasons)


def test_a_loop_that_always_fails_stops_the_run_and_says_why(make_config, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(FLAKY_LOOP.replace("% 4 == 0", "> -1"))
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/broken.py:Flaky"
    config = make_config(loop, f"data.train_files={questions(tmp_path)}", "trainer.val_before_train=false")
    directory = open_run(
        Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="disable", resume_from=None
    )
    console = Console(file=io.StringIO(), force_terminal=False, width=400)
    assert launch(config, directory, console) == 1
    told = console.file.getvalue()
    assert re.search(r"(8|9|1\d) prompt groups in a row failed, and no session ever succeeded", told), told
    assert f"({tmp_path}/broken.py:" in told, "the user's file and line"
    summary = read_summary(directory.path)
    assert summary.status == "failed"
    assert summary.groups.dropped["failed"] >= 8
    log = (directory.path / "trainer.log").read_text() if (directory.path / "trainer.log").exists() else ""
    assert log.count("Traceback") <= 2, "once for all sessions, and once for the run"


ODD_SERVER = """
from streamrl.rollout.building import build_server
from dataclasses import replace

def build(config, events):
    server = build_server(replace(config, name="sim"), events)
    if config.server != "server-1":
        return server
    right = server.generate

    async def generate(*args):
        got = await right(*args)
        if got.stop_reason == "aborted":
            return got
        ODD
        return got

    server.generate = generate
    return server
"""


@pytest.mark.parametrize(
    "odd",
    [
        "raise KeyError('slot')",
        "got.weight_versions = [version + 1000 for version in got.weight_versions]",
        "got.weight_versions = [-1] * len(got.token_ids)",
        "got.token_ids[0] = -1",
        "got.log_probs[-1] = float('nan')",
        "got.stop_reason = 'tired'",
        "got.log_probs.pop()",
    ],
)
def test_one_of_two_servers_that_breaks_the_protocol_costs_the_run_no_group(
    make_config, tmp_path: Path, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(ODD_SERVER.replace("ODD", odd))
    rollout = "actor_rollout_ref.rollout"
    own = f"{rollout}.server={tmp_path}/own.py:build"
    path, summary = run(make_config(own, f"{rollout}.num_replicas=2", "trainer.total_training_steps=3"))
    assert summary.status == "finished"
    assert summary.groups.trained == 24
    assert summary.groups.dropped.get("failed", 0) == 0
    worst = [line["training/off_policy/trajectory_staleness_worst/max"] for line in read_metrics(path)]
    assert all(0 <= staleness < 10 for staleness in worst)
    assert "server server-1 broke the protocol" in caplog.text


def test_when_every_server_breaks_the_protocol_the_end_of_the_run_names_one_and_not_the_agent(
    make_config, tmp_path: Path
) -> None:
    odd = ODD_SERVER.replace('"server-1"', "config.server").replace("ODD", "raise KeyError('slot')")
    (tmp_path / "own.py").write_text(odd)
    own = f"actor_rollout_ref.rollout.server={tmp_path}/own.py:build"
    config = make_config(own, "trainer.val_before_train=false")
    directory = open_run(
        Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="disable", resume_from=None
    )
    told = io.StringIO()
    assert launch(config, directory, Console(file=told, force_terminal=False, width=400)) == 1
    assert "server server-0 broke the protocol: generate raised KeyError" in told.getvalue()
    assert "The agent loop, its tools or the reward" not in told.getvalue()


def test_agent_workers_know_the_vocabulary_that_answers_are_held_against(make_config) -> None:
    config = make_config(base=("runtime=local", "trainer.n_gpus_per_node=1"))
    model = json.loads(Path(config.actor_rollout_ref.model.path, "config.json").read_text())
    assert agent_worker(config).vocab_size == model["vocab_size"]
    assert agent_worker(make_config()).vocab_size is None, "a simulation speaks its own"


def test_a_reward_that_is_broken_for_every_prompt_ends_the_first_validation_early(make_config, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return {}['score']\n")
    reward = f"reward.custom_reward_function.path={tmp_path}/reward.py"
    config = make_config(reward, "data.val_max_samples=64")
    directory = open_run(Path(config.trainer.runs_dir), "t", to_yaml(config), resume_mode="disable", resume_from=None)
    console = Console(file=io.StringIO(), force_terminal=False, width=400)
    assert launch(config, directory, console) == 1
    told = console.file.getvalue()
    assert "sessions of the validation failed, the last with: KeyError: 'score'" in told
    assert f"({tmp_path}/reward.py:2 in compute_score: return {{}}['score'])" in told


def test_a_weights_directory_that_somebody_else_could_have_made_is_an_error_before_anything_starts(make_config) -> None:
    config = make_config()
    directory = open_run(
        Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="disable", resume_from=None
    )
    weights = weights_dir(directory)
    weights.mkdir()
    weights.chmod(0o777)
    try:
        with pytest.raises(WeightsNotPrivate, match=r"is open to others \(mode 0777"):
            launch(config, directory, Console(file=io.StringIO(), force_terminal=False))
        assert weights.is_dir(), "what is not ours is left alone"
    finally:
        weights.rmdir()


def test_what_the_model_said_is_written_shown_and_the_metrics_hold_the_validations(make_config, tmp_path: Path) -> None:
    where = (f"trainer.rollout_data_dir={tmp_path / 'said'}", f"trainer.validation_data_dir={tmp_path / 'asked'}")
    config = make_config(
        *where, "trainer.log_val_generations=2", "trainer.total_training_steps=3", "trainer.test_freq=2"
    )
    path, _ = run(config)
    assert {file.name for file in (tmp_path / "said").iterdir()} == {"1.jsonl", "2.jsonl", "3.jsonl"}
    said = [json.loads(line) for line in (tmp_path / "said/2.jsonl").read_text().splitlines()]
    assert len(said) == 8 * 4
    assert {line["step"] for line in said} == {2}
    assert all(line["input"] and {"output", "gts", "score"} <= line.keys() for line in said)
    assert {file.name for file in (tmp_path / "asked").iterdir()} == {"0.jsonl", "2.jsonl", "3.jsonl"}
    modes = [json.loads(line)["mode"] for line in (tmp_path / "asked/0.jsonl").read_text().splitlines()]
    assert sorted(modes) == ["greedy"] * 8 + ["sampled"] * 8
    samples = [event for event in read_events(path) if event.name == "sample"]
    assert [event.fields["step"] for event in samples] == [0, 0, 2, 2, 3, 3]
    validations = list(read_validations(path))
    assert [(line["step"], line["validation"]) for line in validations] == [(0, "before"), (2, "during"), (3, "after")]
    assert all(any(name.startswith("val-core/") for name in line) for line in validations)


def test_a_run_that_only_ever_scores_0_says_where_to_look(make_config, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    return 0.0\n")
    path, _ = run(make_config(f"reward.custom_reward_function.path={reward}", "trainer.total_training_steps=3"))
    [note] = [str(event.value) for event in read_events(path) if event.name == "note"]
    assert note.startswith("every session of the first 2 steps scored 0")
    assert "trainer.rollout_data_dir" in note


def test_the_first_checkpoint_that_is_removed_is_told(make_config) -> None:
    path, _ = run(make_config("trainer.save_freq=1", "trainer.total_training_steps=3"))
    notes = [str(event.value) for event in read_events(path) if event.name == "note"]
    [note] = [text for text in notes if "checkpoint" in text]
    assert note.startswith("the checkpoint of step 1 was removed")
    assert [saved.name for saved in (path / "checkpoints").iterdir()] == ["global_step_3"]
    path, _ = run(
        make_config("trainer.save_freq=1", "trainer.total_training_steps=3", "trainer.max_actor_ckpt_to_keep=null")
    )
    assert len(list((path / "checkpoints").iterdir())) == 3
