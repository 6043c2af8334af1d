"""The code blocks of a page of docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name in the first line of a file."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else None


def blocks(page: str) -> list[Block]:
    text = (ROOT / "docs" / page).read_text()
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
