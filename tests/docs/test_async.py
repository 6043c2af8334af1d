"""docs/async.md, executed: what each block prints is what stands below it; what it links to is there.

python -m tests.docs.test_async        # writes what the blocks print into the page
"""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_concepts import printed

PAGES = ("async.md", "results.md")


def programs() -> list[str]:
    return [block.text for block in blocks("async.md") if block.language == "python"]


@pytest.mark.timeout(300)
async def test_every_block_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    told = [block.text for block in blocks("async.md") if block.language == "text"]
    for program, found, expected in zip(programs(), await printed(programs()), told, strict=True):
        assert found == expected, program


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_plot_is_there(page: str):
    text = (ROOT / "docs" / page).read_text()
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert targets
    for target in targets:
        assert target.startswith("http") or (ROOT / "docs" / target).is_file(), target


if __name__ == "__main__":
    path, outputs = ROOT / "docs/async.md", iter(asyncio.run(printed(programs())))
    page = re.sub(r"^```text\n.*?^```$", lambda _: f"```text\n{next(outputs)}```", path.read_text(), flags=re.M | re.S)
    path.write_text(page)
