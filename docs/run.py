"""Runs the Python code of a page, block after block in one program, from the root of the project:

    python docs/run.py docs/concepts.md            prints what stands below each block
    python -i docs/run.py docs/concepts.md         the same, and then asks for more, with all names at hand

A block may use `await` at its top level, as in the shell of `python -m asyncio`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from pathlib import Path


async def run(page: str, text: str, names: dict[str, object]) -> None:
    """Every block sees the names of those before it."""
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code = compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)  # noqa: S307  # the page's own code
        if inspect.isawaitable(running):
            await running


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected one page, as docs/concepts.md")
    sys.path.insert(0, str(Path.cwd()))
    asyncio.run(run(sys.argv[1], Path(sys.argv[1]).read_text(encoding="utf-8"), globals()))
