"""The queue's tour runs as its user runs it, shows what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tour_runs_without_ray_and_leaves_nothing_behind(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    before = set(Path("/dev/shm").glob("tq-*"))
    done = subprocess.run(
        [sys.executable, "examples/queue/tour.py"], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env=environment | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for shown in (
        "lengths of c, b: [2, 5]; their sources: [None, {'book': 7}]",
        "tags of b: {'score': 0.5, 'status': 'read'}",
        "groups by state: {'pending': 1, 'ready': 1}",
        "[[0, 1, 2]]; restarts: 3",
        "dead: {'p1': 'the tool crashed (delivered 3 times)'}",
        "replayed: p1 is leased again",
        "controller   unix socket, private directory, run key",
    ):
        assert shown in done.stdout
    assert [left.name for left in tmp_path.iterdir() if left.name.startswith("tq-")] == []
    assert [home for home in set(Path("/dev/shm").glob("tq-*")) - before if str(tmp_path) in owner_of(home)] == []


def owner_of(home: Path) -> str:
    """ "" for what somebody else has just removed."""
    try:
        return (home / "owner").read_text()
    except FileNotFoundError:
        return ""
