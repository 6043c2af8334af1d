"""What a resume cannot change, since what was written before lacks what would be needed then.

Most keys may differ (trainer.resume_mode=resume_path). These say what the queue's groups and a checkpoint hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streamrl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from streamrl.config import StreamRLConfig, to_yaml

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Fixed:
    key: str
    why: str
    counts: Callable[[Tree], bool] = lambda config: True
    """Of the configuration now."""
    value: Callable[[Any], object] = lambda value: value
    """What of it must stay."""


def _deterministic(config: Tree) -> bool:
    return bool(config["trainer"]["deterministic"])


def _lags(config: Tree) -> bool:
    return _deterministic(config) and config["trainer"]["v1"]["trainer_mode"] == "separate_async"


def _has_baseline(name: str) -> bool:
    """Raises ValueError for one of the user's own, which is not imported for this."""
    if name not in ADVANTAGE_ESTIMATORS:
        raise ValueError(name)
    return "baseline" in ADVANTAGE_ESTIMATORS.resolve(name).needs


FIXED = (
    _Fixed("trainer.deterministic", "which prompt is trained where, and by which weights it is sampled, is fixed from "
           "a run's first prompt on, or not at all"),
    _Fixed("data.train_batch_size", "in deterministic mode it says which step trains a prompt", _deterministic),
    _Fixed("trainer.v1.trainer_mode", "in deterministic mode it says which weights sample a prompt", _deterministic),
    _Fixed("trainer.v1.separate_async.num_warmup_batches", "in deterministic mode it says which weights sample a "
           "prompt, and a checkpoint holds no others", _lags),
    _Fixed("distillation.enabled", "rows are scored by the teacher before they are stored, or are not"),
    _Fixed("distillation.teacher_model.placement", "rows are scored by the teacher before they are stored, or are not",
           lambda config: bool(config["distillation"]["enabled"])),
    _Fixed("reward.reward_model.enable", "rows that it was to score have no other score",
           lambda config: not config["reward"]["reward_model"]["enable"]),
    _Fixed("algorithm.adv_estimator", "only one of the two has a greedy answer to each prompt generated, and needs it",
           value=_has_baseline),
)  # fmt: skip


def unlike(written: Path, config: StreamRLConfig) -> str:
    """Why a run whose configuration was `written` cannot go on with `config`; empty if it can, or if that one cannot
    be read."""
    try:
        before = yaml.safe_load(written.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    now = yaml.safe_load(to_yaml(config))
    for fixed in FIXED:
        try:
            was, is_now = (_at(tree, fixed.key) for tree in (before, now))
            same = fixed.value(was) == fixed.value(is_now)
        except (KeyError, TypeError, ValueError):  # a key that there was not yet
            continue
        if fixed.counts(now) and not same:
            return (
                f"{fixed.key} is {_shown(is_now)} and was {_shown(was)}: {fixed.why}. Give it as it was, or start anew "
                "with trainer.resume_mode=disable"
            )
    return ""


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


def _shown(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
