"""docs/concepts.md, executed as one program: what each block prints is what stands below it.

python -m tests.docs.test_concepts        # writes what the blocks print into the page
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
from types import CodeType
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = "concepts.md"


def compiled(code: str) -> CodeType:
    return compile(code, PAGE, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def printed(programs: list[str]) -> list[str]:
    """What each block prints, run one after the other in one event loop and one namespace."""
    names: dict[str, Any] = {"__name__": "concepts"}
    found = []
    for program in programs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            running = eval(compiled(program), names)  # noqa: S307
            if inspect.isawaitable(running):
                await running
        found.append(out.getvalue())
    return found


def programs() -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == "python"]


async def test_every_block_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    told = [block.text for block in blocks(PAGE) if block.language == "text"]
    for program, found, expected in zip(programs(), await printed(programs()), told, strict=True):
        assert found == expected, program


def test_every_block_of_code_is_followed_by_what_it_prints():
    languages = [block.language for block in blocks(PAGE) if block.language != "bash"]
    assert languages == ["python", "text"] * (len(languages) // 2)


def test_the_page_runs_by_the_command_that_it_names():
    (command,) = [block.text.split() for block in blocks(PAGE) if block.language == "bash"]
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, cwd=ROOT, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(block.text for block in blocks(PAGE) if block.language == "text")


if __name__ == "__main__":
    path, outputs = ROOT / "docs" / PAGE, iter(asyncio.run(printed(programs())))
    page = re.sub(r"^```text\n.*?^```$", lambda _: f"```text\n{next(outputs)}```", path.read_text(), flags=re.M | re.S)
    path.write_text(page)
