"""Deterministic mode: the same weights and metrics, to the bit, whoever generates and whatever dies."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.runtime.run_dir import RunDirectory
from streamrl.runtime.settings import weights_dir
from tests.runtime.conftest import VIRTUAL
from tests.runtime.jobs import Job, chaos_seed
from tests.runtime.results import result

pytestmark = pytest.mark.timeout(400)

SIM_STEPS = 12
TOOL = "actor_rollout_ref.rollout.tools.calculator"
SIM = (
    *VIRTUAL, "trainer.deterministic=true", "trainer.save_freq=3", "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.rollout.sim.response_tokens_sigma=0.8", "actor_rollout_ref.rollout.sim.token_sigma=0.5",
)  # fmt: skip
REAL = (
    "runtime=local", "trainer.n_gpus_per_node=1", "trainer.deterministic=true", "trainer.save_freq=1",
    "trainer.v1.trainer_mode=separate_async", "data.max_response_length=32", f"{TOOL}.latency_mean=0.02",
)  # fmt: skip


def servers(count: int, workers: int) -> tuple[str, str]:
    rollout = "actor_rollout_ref.rollout"
    return f"{rollout}.num_replicas={count}", f"{rollout}.agent.num_workers={workers}"


def run(directory: Path, *arguments: str, steps: int) -> Job:
    directory.mkdir()
    job = Job(directory, *arguments, steps=steps)
    job.start()
    job.finish()
    return job


def killed_and_resumed(directory: Path, *arguments: str, steps: int, after: list[int], spread: float) -> Job:
    """Killed with -9 soon after these steps, and started again each time."""
    directory.mkdir()
    job, rng = Job(directory, *arguments, steps=steps), random.Random(chaos_seed())
    for step in after:
        job.start()
        job.wait_for_step(step)
        time.sleep(rng.random() * spread)
        job.kill()
    job.start()
    job.finish()
    job.check_accounts()
    return job


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of one server, one agent worker and no kill."""
    return result(run(tmp_path_factory.mktemp("det") / "one", *SIM, steps=SIM_STEPS).path)


@pytest.mark.parametrize(("count", "workers"), [(2, 4), (4, 2)])
def test_other_numbers_of_servers_and_workers_train_the_same_in_the_same_order(
    tmp_path: Path, simulated: dict[str, Any], count: int, workers: int
) -> None:
    assert result(run(tmp_path / "more", *SIM, *servers(count, workers), steps=SIM_STEPS).path) == simulated


def test_kills_leave_no_trace(tmp_path: Path, simulated: dict[str, Any]) -> None:
    job = killed_and_resumed(tmp_path / "killed", *SIM, steps=SIM_STEPS, after=[1, 7], spread=0.1)
    assert result(job.path) == simulated


def test_every_step_trains_its_own_prompts_of_one_version_a_fixed_lag_old(simulated: dict[str, Any]) -> None:
    assert [step for step, _ in simulated["batches"]] == list(range(1, SIM_STEPS + 1))
    assert [uid for _, uids in simulated["batches"] for uid in uids] == [f"e0p{i:07d}" for i in range(8 * SIM_STEPS)]
    off_policy = "training/off_policy/trajectory"
    ages = [line[f"{off_policy}_staleness/max"] for line in simulated["metrics"]]
    assert ages == ["0.0"] + ["1.0"] * (SIM_STEPS - 1)
    assert {line[f"{off_policy}_spans/max"] for line in simulated["metrics"]} == {"0.0"}


def refilled(directory: Path) -> tuple[str, ...]:
    """Half of the groups are filtered out, since both samples score the same, and for a fifth of the prompts the reward
    fails."""
    file = directory / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if int(ground_truth) % 5 == 0:\n"
        "        raise ValueError('no multiple of five')\n"
        "    return float(len(solution_str) % 2)\n"
    )
    return (
        *SIM, f"reward.custom_reward_function.path={file}", "actor_rollout_ref.rollout.n=2",
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=0",
    )  # fmt: skip


def test_refills_of_failed_and_filtered_groups_are_the_same_for_any_workers_and_kills(tmp_path: Path) -> None:
    arguments = refilled(tmp_path)
    one = run(tmp_path / "one", *arguments, steps=6)
    killed = killed_and_resumed(tmp_path / "k", *arguments, *servers(2, 3), steps=6, after=[1, 3], spread=0.1)
    assert result(killed.path) == result(one.path)
    batches = result(one.path)["batches"]
    assert any(uid.startswith("e1000") for _, uids in batches for uid in uids), "slots were refilled"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the tiny model, one server, one agent worker and no kill."""
    return result(run(tmp_path_factory.mktemp("det") / "one", *REAL, steps=3).path)


def test_a_model_is_trained_to_the_same_bits_with_two_servers_and_two_workers(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    assert any(name.endswith(".safetensors") for name in trained["state"])
    assert result(run(tmp_path / "two", *REAL, *servers(2, 2), steps=3).path) == trained


@pytest.mark.parametrize("rows", ["never", "always"])
def test_a_model_is_trained_to_the_same_bits_after_a_kill_that_lost_queue_and_shared_memory(
    tmp_path: Path, trained: dict[str, Any], rows: str
) -> None:
    """What was generated comes back with the checkpoint, or has to be generated again, with older weights than those
    that are trained."""
    directory = tmp_path / "killed"
    directory.mkdir()
    job = Job(directory, *REAL, f"trainer.ckpt_include_rows={rows}", steps=3)
    job.start()
    job.wait_until(lambda: any(job.path.glob("checkpoints/global_step_2")), "the checkpoint of step 2")
    job.kill()
    shutil.rmtree(job.path / "queue")
    shutil.rmtree(weights_dir(RunDirectory(job.path, resumed=True)))
    job.start()
    job.finish()
    job.check_accounts()
    assert result(job.path) == trained


def test_another_seed_trains_something_else(tmp_path: Path, simulated: dict[str, Any]) -> None:
    other = result(run(tmp_path / "seed", *SIM, "trainer.seed=7", steps=SIM_STEPS).path)
    assert other["metrics"] != simulated["metrics"], "what is compared tells two runs apart"
