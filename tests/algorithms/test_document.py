"""docs/algorithms.md says what the code does: it is generated, its keys exist, its settings are those that are read."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from streamrl.algorithms import document
from streamrl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from streamrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossSettings, policy_loss
from streamrl.config import StreamRLConfig
from tests.algorithms.test_policy_losses import Batch

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == document.page(), "python -m streamrl.algorithms.document > docs/algorithms.md"


def test_every_name_of_the_registries_has_its_section() -> None:
    page = document.page()
    for name in ADVANTAGE_ESTIMATORS.names() + POLICY_LOSSES.names():
        assert f"\n### `{name}`\n" in page


def exists(config: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    if first not in {field.name for field in dataclasses.fields(config)}:
        return False
    return not rest or exists(typing.get_type_hints(config)[first], rest)


@pytest.mark.parametrize(
    "key", sorted({*document.SETTING_KEYS.values(), *(key for keys in document.SECTION_KEYS.values() for key in keys)})
)
def test_a_key_on_the_page_is_one_of_the_configuration(key: str) -> None:
    assert exists(StreamRLConfig, key)


class Recording:
    """Settings that remember which of them were read."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(PolicyLossSettings(), name)


SELECTION = {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio"}
"""Read when tokens are selected, not in the loss."""


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_the_settings_a_loss_reads_are_those_it_documents(name: str) -> None:
    settings: Any = Recording()
    policy_loss(name)(Batch(0).inputs(), settings)
    assert settings.read == set(document.settings_of(policy_loss(name))) - SELECTION
