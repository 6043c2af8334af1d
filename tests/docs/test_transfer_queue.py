"""docs/transfer_queue.md: its program runs, and every promise names a test that exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = "transfer_queue.md"
TEXT = (ROOT / "docs" / PAGE).read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)


def test_every_promise_has_its_test():
    table = TEXT.partition("## What it promises")[2].partition("\n*What an")[0]
    promises = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(promises) > 15
    assert [line for line in promises if not re.search(r"\| `tests/\S+::test_\w+` \|$", line)] == []


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str):
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not name or name in functions


def test_the_program_runs(tmp_path):
    program = "\n".join(block.text for block in blocks(PAGE) if block.language == "python")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TQ_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"TMPDIR": str(tmp_path)}, cwd=ROOT, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_commands_and_links_are_real():
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
    listed = subprocess.run(
        [sys.executable, "-m", "transfer_queue", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for verb in re.findall(r"python -m transfer_queue (\w+)", TEXT):
        assert verb in listed
