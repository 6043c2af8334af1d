"""docs/algorithms.md, from the registries and docstrings.

python -m streamrl.algorithms.document > docs/algorithms.md
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from agent_loop.plugins import Registry
from streamrl.algorithms import aggregation, filters, kl, kl_control, kl_reward, off_policy, overlong, thresholds
from streamrl.algorithms import rollout_correction as correction
from streamrl.algorithms import rollout_diagnostics as diagnostics
from streamrl.algorithms import value_loss as values
from streamrl.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimator, whitening
from streamrl.algorithms.policy_losses import NEEDS_SELECTION, POLICY_LOSSES, covariance, policy_loss

ACTOR = "actor_rollout_ref.actor"

SETTING_KEYS = {
    "norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "components": "algorithm.gdpo_reward_keys",
    "weights": "algorithm.gdpo_reward_weights",
    **{name: f"{ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")},
    **{
        name: f"{ACTOR}.policy_loss.{name}"
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
}
"""What an estimator or a loss is told → the configuration key."""

NEED_WORDS = {
    "lengths": "tokens per session",
    "baseline": "score of a greedy answer",
    "components": "parts of the score",
    "values": "critic",
}

SECTION_KEYS = {
    "estimators": ("algorithm.adv_estimator",),
    "losses": (f"{ACTOR}.policy_loss.loss_mode",),
    "aggregation": (f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor", "critic.loss_agg_mode"),
    "value": ("critic.cliprange_value",),
    "kl": (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_type", f"{ACTOR}.kl_loss_coef", "algorithm.kl_penalty"),
    "kl_reward": ("algorithm.use_kl_in_reward", "algorithm.kl_penalty"),
    "teacher": (
        "distillation.enabled",
        "distillation.distillation_loss.loss_mode",
        "distillation.distillation_loss.distillation_loss_coef",
        "distillation.distillation_loss.use_task_rewards",
        "distillation.teacher_model.placement",
    ),
    "kl_control": tuple(f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "target_kl", "horizon")),
    "rejection": tuple(f"algorithm.rollout_correction.{name}" for name in ("rollout_rs", "rollout_rs_threshold")),
    "weights": tuple(
        f"algorithm.rollout_correction.{name}"
        for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    ),
    "age": ("trainer.v1.sampler.max_off_policy_threshold", "trainer.v1.sampler.max_off_policy_strategy"),
    "filter": ("algorithm.filter_groups.enable",),
    "overlong": tuple(f"reward.overlong_buffer.{name}" for name in ("enable", "len", "penalty_factor")),
}
"""Part of the page → the keys that it is about."""

MODULES = ("outcome", "tokens", "token", "sequence", "covariance")
"""Of estimators and losses, in the order of the page."""

INTRODUCTION = """\
# Algorithms

<!-- Generated: python -m streamrl.algorithms.document > docs/algorithms.md -->

All of them are pure functions in `streamrl/algorithms/`; each is tested there against a second implementation, written
from its paper as loops over rows and tokens in float64.

- One mask decides what counts: `loss_mask` is what was sampled, less what is too old, rejected or excluded. It is in
  every numerator and every denominator, and rows without any token in it are in no denominator either.
- Averages are over the mini-batch on all ranks. They do not depend on micro-batches, ranks or padding.
- Statistics of a group use the scores of all its sessions, whatever is masked. A group of equal scores, hence also of
  one session, has advantage 0 (`remax`, which compares with another answer, aside). A score that is not finite is an
  error.
- One's own estimator or loss is named `path/to/file.py:function` in place of a name.
"""

TEACHER = """\
On-policy distillation: `distillation_loss_coef` times KL(policy || teacher) at each sampled token, by one of the
estimates above, is part of the loss; without `use_task_rewards` it is all of it. The teacher's log-probs of what the
policy sampled, at the policy's temperature, come from a stage on the training ranks or from servers of its own, which
score each row before it is put.

Source: Agarwal et al. ([arXiv:2306.13649](https://arxiv.org/abs/2306.13649)).
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_parts()).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _parts() -> Iterator[str]:
    yield INTRODUCTION
    yield _heading("Advantage estimators", "estimators")
    yield from _table(("name", "one value per", "needs", "settings", "then whitened"), _estimator_rows())
    for name in _shipped(ADVANTAGE_ESTIMATORS, lambda each: each.function):
        yield _entry(f"`{name}`", estimator(name).function)
    yield _text("Whitening", whitening, whitening.whitened)
    yield _heading("Policy losses", "losses")
    yield from _table(("name", "settings", "needs"), _loss_rows())
    for name in _shipped(POLICY_LOSSES, lambda each: each):
        yield _entry(f"`{name}`", policy_loss(name))
    yield _text("Selection by covariance", covariance)
    yield _heading("Averaging", "aggregation")
    yield _doc(aggregation.aggregation_weights)
    yield _heading("The critic's loss", "value")
    yield _doc(values.value_loss)
    yield _heading("KL to a reference", "kl")
    yield _doc(kl)
    yield from _table(("names", "estimate"), _kl_rows())
    yield _entry("In the reward", kl_reward.penalised_rewards, "kl_reward")
    yield _entry("Its coefficient", kl_control.AdaptiveKL, "kl_control")
    yield f"### To a teacher\n\n{_key_list('teacher')}\n\n{TEACHER}"
    yield f"## Samples of another policy\n\n{_doc(correction)}"
    yield _entry("Rejection", correction.rejection_mask, "rejection")
    yield _doc(thresholds.rejection_rules)
    yield _entry("Importance weights", correction.importance_weights, "weights")
    yield f"### Diagnostics\n\n{_doc(diagnostics.policy_gap)}\n{_doc(diagnostics.weight_spread)}"
    yield _entry("Age", off_policy.age_mask, "age")
    yield "## Scores and groups\n"
    yield _entry("Groups that teach nothing", filters.zero_variance, "filter")
    yield _entry("Answers that are too long", overlong.overlong_penalty, "overlong")


def settings_of(function: Callable[..., Any]) -> list[str]:
    """Of an estimator: its arguments that are settings; of a policy loss: what its docstring names under Settings."""
    named = re.search(r"^Settings: (.*?)(?:\n\n|\Z)", inspect.getdoc(function) or "", re.DOTALL | re.MULTILINE)
    words = set(inspect.signature(function).parameters) | set(re.findall(r"\w+", named[1] if named else ""))
    return [name for name in SETTING_KEYS if name in words]


def _estimator_rows() -> Iterator[tuple[str, ...]]:
    for name in _shipped(ADVANTAGE_ESTIMATORS, lambda each: each.function):
        found = estimator(name)
        needs = ", ".join(NEED_WORDS[need] for need in sorted(found.needs))
        per = "session" if found.per_session else "token"
        yield f"`{name}`", per, needs, _keys(settings_of(found.function)), "yes" if found.whiten else ""


def _loss_rows() -> Iterator[tuple[str, ...]]:
    for name in _shipped(POLICY_LOSSES, lambda each: each):
        needs = "a selection per mini-batch" if name in NEEDS_SELECTION else ""
        yield f"`{name}`", _keys(settings_of(policy_loss(name))), needs


def _kl_rows() -> Iterator[tuple[str, ...]]:
    names: dict[Any, list[str]] = {}
    for name, function in kl.KL_ESTIMATORS.items():
        if not name.endswith("+"):
            names.setdefault(function, []).append(name)
    for function, known in names.items():
        both = [*known, *(f"{name}+" for name in known)]
        yield ", ".join(f"`{name}`" for name in both), inspect.getdoc(function) or ""


def _shipped(registry: Registry[Any], function: Callable[[Any], Callable[..., Any]]) -> list[str]:
    """Names of a registry, in the order of MODULES and their source; not what a user's file has added."""
    places: dict[str, tuple[int, int]] = {}
    for name in registry.names():
        found = function(registry.resolve(name))
        if found.__module__.startswith("streamrl."):
            places[name] = MODULES.index(found.__module__.rpartition(".")[2]), found.__code__.co_firstlineno
    return sorted(places, key=places.__getitem__)


def _heading(title: str, section: str) -> str:
    return f"## {title}\n\n{_key_list(section)}\n"


def _entry(title: str, function: Any, section: str = "") -> str:
    keys = f"{_key_list(section)}\n\n" if section else ""
    return f"### {title}\n\n{keys}{_doc(function)}"


def _text(title: str, *documented: Any) -> str:
    return f"### {title}\n\n" + "\n".join(map(_doc, documented))


def _key_list(section: str) -> str:
    return ", ".join(f"`{key}`" for key in SECTION_KEYS[section])


def _keys(settings: Iterable[str]) -> str:
    return ", ".join(f"`{SETTING_KEYS[name].removeprefix('actor_rollout_ref.')}`" for name in settings)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield ""
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in row) + " |"
    yield ""


def _doc(documented: Any) -> str:
    text = inspect.getdoc(documented) or ""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
