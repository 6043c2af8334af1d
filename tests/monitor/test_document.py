"""docs/metrics.md says what the code does: it is generated, and what it says is not here is not."""

from __future__ import annotations

from pathlib import Path

from streamrl.monitor import document
from streamrl.monitor.registry import expand, step_metric
from streamrl.monitor.trackers import LIBRARIES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == document.page(), "python -m streamrl.monitor.document > docs/metrics.md"


def test_what_has_no_counterpart_is_in_no_table() -> None:
    for entry in document.NOT_HERE:
        for name in entry.split(", "):
            assert [each for each in expand(name) if "*" not in each and step_metric(each) is not None] == []


def test_every_tracker_has_its_row() -> None:
    page = document.page()
    for name in LIBRARIES:
        assert f"\n| `{name}` | `pip install {name}`" in page
