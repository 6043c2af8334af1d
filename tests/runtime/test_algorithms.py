"""Every algorithm of examples/algorithms trains the calculator job: the real loop and engines, in one process."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.registry import check_step_metrics
from streamrl.trainer.batch_log import read_batch_log
from tests.runtime.test_local_run import run

SCRIPTS = sorted(Path("examples/algorithms").glob("*.sh"))
STEPS = 4
SMALL = (
    "runtime=local", "trainer.n_gpus_per_node=1", f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false", "actor_rollout_ref.rollout.tools.calculator.latency_mean=0.01",
    "reward.overlong_buffer.len=8",
)  # fmt: skip


def command_line(script: Path) -> list[str]:
    """The arguments of `streamrl train` in a script, less the `"$@"` at its end."""
    words = shlex.split(script.read_text().replace("\\\n", " "), comments=True)
    begin = words.index("exec")
    assert words[begin : begin + 3] == ["exec", "streamrl", "train"]
    assert words[-1] == "$@"
    return words[begin + 3 : -1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_algorithm_trains_the_calculator_job(make_config, script: Path) -> None:
    path, summary = run(make_config(*command_line(script), *SMALL, base=()))
    assert summary.status == "finished"
    assert summary.groups.trained == 8 * STEPS
    lines = list(read_metrics(path))
    for line in lines:
        check_step_metrics({name: value for name, value in line.items() if name != "step"})
    assert sum(line.get("actor/optimizer_steps", 0.0) for line in lines) >= STEPS - 2
    assert all(line["actor/grad_norm"] > 0 for line in lines if line.get("actor/optimizer_steps"))
    if script.stem == "dapo":
        assert all(line["groups/zero_variance"] == 0 for line in lines)
    if script.stem == "gdpo":
        assert any(line["critic/score/answered/mean"] > line["critic/score/correct/mean"] for line in lines)
    if script.stem == "ppo":
        assert lines[0]["critic/vf_loss"] > lines[-1]["critic/vf_loss"]
        assert "actor/optimizer_steps" not in lines[1], "the critic warms up"
        assert lines[-1]["actor/reward_kl_penalty"] != 0.0
    if script.stem == "remax":
        assert all(line["rows/trained"] == 32 for line in lines), "greedy answers are not trained"
    orders = [order for step in read_batch_log(path / "batches.jsonl") for order in step.orders]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_with_the_current_policy_as_the_old_one_a_job_computes_no_log_probs_before_its_updates(
    make_config, mode: str
) -> None:
    chosen = (f"trainer.v1.trainer_mode={mode}", "algorithm.rollout_correction.pi_old=current")
    path, _ = run(make_config(*SMALL, *chosen, base=()))
    lines = list(read_metrics(path))
    assert [line["actor/ppo_kl"] for line in lines if "actor/ppo_kl" in line] == [0.0] * len(lines)
    assert not any("timing_s/old_log_prob" in line for line in lines)
    assert lines[-1]["rollout_corr/k3_kl"] > 0.0


def test_chosen_steps_are_profiled_on_every_rank_and_role(make_config) -> None:
    import json

    script = command_line(Path("examples/algorithms/ppo.sh"))
    profiler = ("global_profiler.tool=torch", "global_profiler.steps=[3]", "trainer.total_training_steps=3")
    path, _ = run(make_config(*script, *SMALL, *profiler, base=()))
    traces = sorted((path / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step-000003-actor-r0.json", "step-000003-critic-r0.json"]
    for trace in traces:
        assert any("addmm" in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])
