"""docs/extending.md, executed: its files are written, its commands and its Python run, in the order of the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.monitor.metrics_log import read_metrics
from tests.docs.pages import Block, blocks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files of the page."""
    path = tmp_path_factory.mktemp("extending")
    for block in blocks("extending.md"):
        if block.file:
            (path / block.file).write_text(block.text)
    return path


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=110)


def executed(block: Block, directory: Path) -> subprocess.CompletedProcess[str]:
    if block.language == "python":
        return run(directory, sys.executable, "-c", block.text)
    return run(directory, "bash", "-euc", block.text)


BLOCKS = [block for block in blocks("extending.md") if not block.file]


@pytest.mark.parametrize("block", BLOCKS[:-1], ids=lambda block: block.text.splitlines()[-1].strip()[-40:])
def test_every_block_of_the_page_runs(directory: Path, block: Block):
    done = executed(block, directory)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_with_a_file_for_each_part_trains(directory: Path):
    done = executed(BLOCKS[-1], directory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in read_metrics(directory / "runs/latest")] == [1, 2]


def test_there_is_nothing_on_the_page_but_what_is_executed():
    assert {block.language for block in blocks("extending.md")} == {"python", "bash"}
    assert len(BLOCKS) < len(blocks("extending.md"))
