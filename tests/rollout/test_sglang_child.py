"""The first process of an SGLang server, with another `sglang` in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streamrl.rollout.sglang import process as sglang_process

LAUNCH = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
import requests
print(json.dumps([sys.argv, child.pid, requests.__file__]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path) -> subprocess.Popen[bytes]:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LAUNCH)
    (tmp_path / "requests.py").touch()
    return subprocess.Popen(
        [sys.executable, "-u", str(sglang_process._CHILD)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip


def test_its_arguments_are_not_in_the_list_of_processes_and_its_group_ends_with_who_started_it(
    child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(["--api-key", "a secret"]).encode() + b"\n")
    child.stdin.flush()
    arguments, grandchild, requests = json.loads(child.stdout.readline())
    assert arguments[1:] == ["--api-key", "a secret"]
    assert requests == str(tmp_path / "requests.py"), "not the module of this package with that name"
    processes = [psutil.Process(child.pid), psutil.Process(grandchild)]
    assert not any("secret" in word for process in processes for word in process.cmdline())
    child.stdin.close()  # as when the process at the other end was killed
    assert child.wait(20) < 0
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_without_arguments_it_says_who_starts_it(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(20) == 1
