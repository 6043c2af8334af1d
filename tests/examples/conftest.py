"""The example's scripts import each other by name, as they do when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/calculator"
sys.path.insert(0, str(EXAMPLE))
