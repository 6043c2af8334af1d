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
    """`bar` is the limit, on the side that `sense` says; None for a figure that is only reported."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    sense: Literal["at least", "at most"] = "at least"

    @property
    def holds(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.sense == "at least" else self.value <= self.bar


def report(bars: list[Bar], json_file: Path | None) -> int:
    """Print the table and write the list; 0 if all bars hold, else 1."""
    table = Table("figure", "value", "unit", "bar", "holds")
    for bar in bars:
        limit = "" if bar.bar is None else f"{bar.sense} {bar.bar:g}"
        table.add_row(bar.name, f"{bar.value:.4g}", bar.unit, limit, "yes" if bar.holds else "NO")
    Console().print(table)
    if json_file is not None:
        rows = [asdict(bar) | {"holds": bar.holds} for bar in bars]
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(bar.holds for bar in bars) else 1
