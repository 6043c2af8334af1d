"""The reference is the code's own account of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.cli import main
from streamrl.config.reference import field_docs, reference
from streamrl.config.schema import known_keys
from streamrl.config.sections.data import DataConfig


def test_every_key_is_in_the_reference_once():
    lines = reference().splitlines()
    assert [key for key in known_keys() if sum(line.startswith(f"| `{key}` |") for line in lines) != 1] == []


def test_a_line_has_type_default_and_the_docstring_under_the_field():
    assert "| `data.train_batch_size` | an integer >= 1 | `1024` | Prompts per step. |" in reference()
    assert field_docs(DataConfig)["seed"] == "Of the permutation; None: trainer.seed."


def test_docs_config_md_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    """If this fails: streamrl config reference > docs/config.md"""
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out == (Path(__file__).parents[2] / "docs/config.md").read_text()
