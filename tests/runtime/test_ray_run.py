"""The job as processes under Ray, as `make demo` runs it, and what happens when one of them is killed with -9."""

from __future__ import annotations

import os
import random
import signal
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamrl.monitor.events import read_events
from streamrl.monitor.schema import check_events
from streamrl.monitor.summary import read_summary
from streamrl.runtime.run_dir import status_of
from tests.runtime.jobs import Job, chaos_seed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = 200.0


def survivors(processes: list[psutil.Process], seconds: float = 120.0) -> list[psutil.Process]:
    """Those still alive after a while. Ours end at once; Ray's own agents need up to a minute to miss their raylet."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.parametrize("seconds", [1.0, 4.0, 8.0])
def test_ctrl_c_while_ray_and_the_parts_start_ends_it_and_leaves_no_process(tmp_path: Path, seconds: float) -> None:
    job = Job(tmp_path, steps=100, seconds=SECONDS)
    process = job.start()
    while not job.takes_interrupts():
        time.sleep(0.01)
    time.sleep(seconds)
    children = job.processes()
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130, job.text
    assert not survivors(children)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["agent worker", "storage unit", "LLM server"])
def test_the_run_goes_on_when_a_process_is_killed(tmp_path: Path, victim: str) -> None:
    rng = random.Random(chaos_seed())
    job = Job(tmp_path, steps=10, seconds=SECONDS)
    job.start()
    job.wait_for_step(2)
    time.sleep(rng.random())
    find = {
        "agent worker": lambda: job.pid_of("agent-0"),
        "storage unit": lambda: job.queue_pid("unit"),
        "LLM server": lambda: job.pid_of("server-0"),
    }
    pid = find[victim]()
    os.kill(pid, signal.SIGKILL)
    job.finish()
    job.check_accounts()
    assert not psutil.pid_exists(pid)
    assert check_events(read_events(job.path)) > 0


@pytest.mark.chaos
@pytest.mark.parametrize(("title", "told"), [("TaskRunner", "the trainer's process"), ("RankActor", "rank")])
def test_a_run_without_its_trainer_or_a_rank_ends_at_once_with_one_line_and_resumes(
    tmp_path: Path, title: str, told: str
) -> None:
    job = Job(tmp_path, "trainer.save_freq=3", steps=10, seconds=SECONDS)
    process = job.start()
    job.wait_for_step(4)
    children = job.processes()
    os.kill(next(child.pid for child in children if title in child.name()), signal.SIGKILL)
    assert process.wait(30) == 1, job.text
    [line] = [line for line in job.text.splitlines() if line.startswith("failed: ")]
    assert told in line
    assert not survivors(children)
    job.start()
    job.finish()
    job.check_accounts()


@pytest.mark.chaos
def test_the_whole_run_killed_and_started_again_trains_every_prompt_once_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    rng = random.Random(chaos_seed())
    job = Job(tmp_path, "trainer.save_freq=3", steps=10, seconds=SECONDS)
    job.start()
    job.wait_for_step(5)
    time.sleep(rng.random())
    children = job.processes()
    job.kill()
    assert not survivors(children)
    assert status_of(job.path) == "killed"
    path = job.path
    job.start()
    job.finish()
    assert job.path == path
    job.check_accounts()


def scrape(job: Job) -> dict[tuple[str, ...], float]:
    """The samples of the running job's metrics endpoint, by name and label values."""
    [state] = [event for event in read_events(job.path) if event.name == "prometheus"]
    key = Path(str(state.fields["key_file"])).read_text().strip()
    request = urllib.request.Request(str(state.value), headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_running_job_serves_its_metrics_and_ctrl_c_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=30, seconds=SECONDS)
    process = job.start()
    job.wait_for_step(2)
    served = scrape(job)
    assert served["streamrl_train_step",] >= 2
    assert {key[2] for key in served if key[:2] == ("streamrl_queue_groups", "train")} >= {
        "pending",
        "generating",
        "ready",
    }
    children = job.processes()
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130, job.text
    assert not survivors(children)
    summary = read_summary(job.path)
    assert summary.status == "interrupted"
    assert list(job.path.glob(f"checkpoints/global_step_{summary.steps}/manifest.json"))


def test_a_broken_reward_is_told_with_its_line_and_its_log(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    print('scoring')\n    return {}['nothing']\n")
    arguments = (f"reward.custom_reward_function.path={reward}", "trainer.val_before_train=false")
    job = Job(tmp_path, *arguments, steps=3, seconds=SECONDS)
    assert job.start().wait(SECONDS) == 1
    log = job.path / "logs" / "agent-0.log"
    assert f"KeyError: 'nothing' ({reward}:3 in compute_score: return {{}}['nothing'])" in job.text
    assert f"see {log}" in job.text
    assert log.read_text().count("Traceback") == 1
    assert "scoring" in log.read_text()
    assert read_summary(job.path).groups.dropped["failed"] >= 8
