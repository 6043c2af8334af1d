"""What this machine cannot hold is an error before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.runtime.preflight import check_machine

RAY = ("runtime=ray",)


def test_more_ranks_than_cpus_are_refused(make_config) -> None:
    with pytest.raises(UserError, match=r"30 training ranks .* need 30 CPUs, this machine has \d+"):
        check_machine(make_config("trainer.n_gpus_per_node=30", base=RAY))


def test_logical_cpus_may_be_promised_to_ray(make_config) -> None:
    check_machine(make_config("trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_cpus=4", base=RAY))


def test_more_servers_than_memory_are_refused(make_config) -> None:
    with pytest.raises(UserError, match=r"9000 LLM servers need about .* GiB of memory, .* GiB are free"):
        check_machine(make_config("actor_rollout_ref.rollout.num_replicas=9000", base=RAY))


def test_a_storage_budget_larger_than_the_disk_is_refused(make_config) -> None:
    with pytest.raises(UserError, match=r"MiB free .* lower unit_budget_bytes"):
        check_machine(make_config("transfer_queue.unit_budget_bytes=9000000000000000"))


def test_a_refused_run_ends_with_status_2_two_lines_at_most_and_leaves_no_directory(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "streamrl.main", "experiment=calculator", f"trainer.runs_dir={runs}"]
    result = subprocess.run([*command, "trainer.n_gpus_per_node=100"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) <= 2
    assert not runs.exists()
