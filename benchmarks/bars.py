"""What a benchmark reports: one row per figure, with the bar it should meet."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """`bar` is the limit, on the side that `sense` says; None for a figure that is only reported. `always`: it is a
    count of what came out right, so it has to hold at any size; other bars are for full sizes on a quiet machine."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    always: bool = False

    @property
    def holds(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.sense == "at least" else self.value <= self.bar

    def judged(self, *, quick: bool = False) -> bool:
        """Whether it counts; in a quick run only what has to hold `always` does."""
        return self.bar is not None and (self.always or not quick)

    def verdict(self, *, quick: bool = False) -> str:
        """ "yes", "NO", "quick" where a quick run cannot tell, "" without a bar."""
        if self.bar is None:
            return ""
        return ("yes" if self.holds else "NO") if self.judged(quick=quick) else "quick"


def report(bars: list[Bar], json_file: Path | None, *, quick: bool = False) -> int:
    """Print the table and write the list; 0 if all bars that are judged hold, else 1."""
    table = Table("figure", "value", "unit", "bar", "holds")
    for bar in bars:
        limit = "" if bar.bar is None else f"{bar.sense} {bar.bar:g}"
        table.add_row(bar.name, f"{bar.value:.4g}", bar.unit, limit, bar.verdict(quick=quick))
    Console().print(table)
    if json_file is not None:
        rows = [asdict(bar) | {"holds": bar.holds if bar.judged(quick=quick) else None} for bar in bars]
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(bar.holds for bar in bars if bar.judged(quick=quick)) else 1
