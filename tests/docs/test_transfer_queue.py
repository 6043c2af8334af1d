"""docs/transfer_queue.md: its program runs, and every promise names a test that exists."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from transfer_queue.clients.row_verbs import USUAL_WAIT
from transfer_queue.controller.absences import UNIT_LOST_AFTER
from transfer_queue.ledger.checks import MAX_GROUP_TAG
from transfer_queue.ledger.tags import MAX_TAG
from transfer_queue.net.bulk import CHUNK
from transfer_queue.settings import _KINDS, _TREE, QueueSettings
from transfer_queue.storage.objects import encode_object

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


@pytest.mark.parametrize(
    ("told", "holds"),
    [
        (f"`unit_lost_after` seconds ({UNIT_LOST_AFTER:g})", True),
        ("(at most 1 MiB packed, for a group 64 KiB)", (MAX_TAG, MAX_GROUP_TAG) == (1 << 20, 64 << 10)),
        ("each frame of at most\n8 MiB", CHUNK == 8 << 20),
        ("| `segment_bytes` | 8 MiB |", QueueSettings().segment_bytes == 8 << 20),
        ("num_data_storage_units` | 2 |", QueueSettings().units == 2),
        ("it ends after 60 s without enough rows", USUAL_WAIT == 60.0),
    ],
)
def test_a_number_is_that_of_the_code(told: str, holds: bool):
    assert told in TEXT
    assert holds


@pytest.mark.parametrize("key", [*_KINDS, "sampler", *_TREE])
def test_each_key_of_init_is_in_the_table(key: str):
    table = TEXT.partition("| key of `tq.init(conf)` |")[2].partition("\n\n")[0]
    assert f"`{key}`" in table


@pytest.mark.parametrize(
    "value",
    [{1, 2}, 1j, datetime.now(UTC), bytearray(b"x"), {(1, 2): 3}, Path.cwd(), inspect.Parameter.VAR_KEYWORD],
    ids=lambda value: type(value).__name__,
)
def test_what_migration_says_is_refused_is_refused_naming_field_and_row(value: object):
    with pytest.raises(TypeError, match="field 'x' row 3"):
        encode_object(value, field="x", row=3)


def test_commands_and_links_are_real():
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
    listed = subprocess.run(
        [sys.executable, "-m", "transfer_queue", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for verb in re.findall(r"python -m transfer_queue (\w+)", TEXT):
        assert verb in listed
