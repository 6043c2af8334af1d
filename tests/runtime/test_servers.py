"""LLM servers that join and leave a run under Ray, asked for on the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.monitor.events import read_events
from tests.runtime.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(400)]


def servers(job: Job, *arguments: str) -> str:
    command = [sys.executable, "-c", "import sys; from streamrl.cli import main; sys.exit(main())"]
    found = subprocess.run(
        [*command, "servers", str(job.path), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_server_joins_another_one_leaves_and_a_third_is_killed_and_no_prompt_is_lost(tmp_path: Path) -> None:
    job = Job(tmp_path, "actor_rollout_ref.rollout.num_replicas=2", steps=40, seconds=200.0)
    job.start()
    job.wait_for_step(1)
    assert servers(job, "add").strip() == "added server-2"
    assert servers(job, "remove", "server-0", "--deadline", "2").strip() == "removed server-0"
    os.kill(job.pid_of("server-1"), signal.SIGKILL)
    listed = servers(job, "list")
    assert "server-2" in listed
    assert "server-0" not in listed
    job.finish()
    job.check_accounts()
    busy = {event.fields["server"] for event in read_events(job.path) if event.name == "server_busy"}
    assert busy == {"server-0", "server-1", "server-2"}
    assert not (job.path / "servers.key").exists()
