"""Who may import whom, and what must stay light."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "tensordict", "transformers")


def test_the_three_packages_import_in_one_direction():
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout  # in a process of its own: it disables all loggers of this one


@pytest.mark.parametrize(
    "module",
    [
        "transfer_queue",
        "transfer_queue.controller.process",
        "transfer_queue.storage.unit",
        "transfer_queue.client",
        "agent_loop.loop",
        "agent_loop.worker",
        "agent_loop.manager",
        "streamrl.cli",
        "streamrl.data",
        "streamrl.monitor",
    ],
)
def test_importing_it_loads_nothing_heavy(module: str):
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []


def test_every_package_says_that_it_is_typed():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    assert [package for package in packages if not (ROOT / package / "py.typed").is_file()] == []
