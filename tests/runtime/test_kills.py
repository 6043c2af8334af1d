"""Runs killed at any instruction, in forks that cost no start of Python: see benchmarks/resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.jobs import chaos_seed


def bench(*arguments: str, seconds: float) -> None:
    """In a process of its own, since it forks."""
    command = [sys.executable, "-m", "benchmarks.resume", "--seed", str(chaos_seed()), *arguments]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=seconds, check=False)
    assert found.returncode == 0, (found.stdout + found.stderr).decode()[-5000:]


@pytest.mark.chaos
def test_ten_kills_lose_no_prompt_and_train_none_twice() -> None:
    bench("--kills", "10", seconds=110.0)


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_two_hundred_kills_in_any_mode_lose_no_prompt_and_train_none_twice() -> None:
    bench("--kills", "200", seconds=3500.0)


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_twenty_kills_of_real_processes_lose_no_prompt_and_train_none_twice() -> None:
    bench("--kills", "0", "--real", "20", seconds=3500.0)
