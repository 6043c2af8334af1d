"""What each token counts and by how much, before an engine sees it. Pure functions; numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from streamrl.algorithms.off_policy import age_mask, token_age
from streamrl.single_controller.dispatch import MINI_BATCH, MINI_BATCHES
from streamrl.single_controller.metrics import Low, Mean, Metric, Peak, Total
from transfer_queue.keys import split_row_key

TOKENS_OF_AGE = "training/off_policy/token_age/"
"""And the age: how many sampled tokens are that old."""
OLDEST = 64
"""Tokens that are older count as so old."""


def loss_masks(
    keys: list[str], masks: list[np.ndarray], versions: list[np.ndarray] | None, info: Mapping[str, Any]
) -> list[np.ndarray]:
    """f32[R] per row: `response_mask`, less the rows in `info["excluded"]`, less tokens older than `info["max_age"]`
    versions when `info["version"]` is trained (`versions` are the tokens' stamps), and less the rows of which more than
    `info["max_masked_ratio"]` is too old."""
    excluded, share = set(info.get("excluded") or ()), 1.0 - float(info.get("max_masked_ratio", 1.0))
    found = []
    for i, (key, mask) in enumerate(zip(keys, masks, strict=True)):
        kept = np.zeros_like(mask) if key in excluded else mask
        if versions is not None and info.get("max_age") is not None:
            version, max_age = int(info["version"]), int(info["max_age"])
            kept = age_mask(kept, versions[i], version=version, max_age=max_age, min_share=share)
        found.append(kept.astype(np.float32))
    return found


def token_advantages(keys: list[str], masks: list[np.ndarray], info: Mapping[str, Any]) -> list[np.ndarray]:
    """f32[R] per row: its scalar from `info["advantages"]` at each token with mask 1.

    Raises ValueError for a row that counts and has none, or none that is finite.
    """
    advantages = info.get("advantages") or {}
    found = []
    for key, mask in zip(keys, masks, strict=True):
        value = advantages.get(key, 0.0 if not mask.any() else math.nan)
        if not math.isfinite(value):
            raise ValueError(
                f"row {key} counts in the loss but its advantage is {advantages.get(key)}; give a finite one"
            )
        found.append((mask * np.float32(value)).astype(np.float32))
    return found


def session_rewards(keys: list[str], masks: list[np.ndarray], scores: Mapping[str, float]) -> list[np.ndarray]:
    """f64[R] per row: its session's score at its last sampled token (tool text at the end changes nothing), else 0.

    A row without a sampled token gets none. Raises ValueError for a row without a finite score.
    """
    found = []
    for key, mask in zip(keys, masks, strict=True):
        score = scores.get(key, math.nan)
        if not math.isfinite(score):
            raise ValueError(f"row {key} has the score {scores.get(key)}; give a finite one")
        rewards = np.zeros(len(mask), np.float64)
        if (sampled := np.flatnonzero(mask)).size:
            rewards[sampled[-1]] = score
        found.append(rewards)
    return found


def flat_mean(rows: list[np.ndarray], masks: list[np.ndarray]) -> Mean:
    """Over the tokens with mask 1."""
    total = sum(float((np.asarray(values, np.float64) * mask).sum()) for values, mask in zip(rows, masks, strict=True))
    return Mean(total, float(sum(float(mask.sum()) for mask in masks)))


def flat_stats(name: str, rows: list[np.ndarray], masks: list[np.ndarray]) -> dict[str, Metric]:
    """Mean, largest and smallest over the tokens with mask 1; nothing where there is none."""
    found: dict[str, Metric] = {f"{name}/mean": flat_mean(rows, masks)}
    counted = [np.asarray(v, np.float64)[m > 0] for v, m in zip(rows, masks, strict=True) if m.any()]
    if counted:
        found[f"{name}/max"] = Peak(max(float(values.max()) for values in counted))
        found[f"{name}/min"] = Low(min(float(values.min()) for values in counted))
    return found


def mini_batch_rows(keys: list[str], info: Mapping[str, Any]) -> list[list[int]]:
    """Per mini-batch of the whole batch, this rank's rows of it (may be none)."""
    index = info.get(MINI_BATCH) or {}
    batches: list[list[int]] = [[] for _ in range(int(info.get(MINI_BATCHES, 1)))]
    for i, key in enumerate(keys):
        batches[int(index.get(key, 0))].append(i)
    return batches


def session_numbers(keys: list[str]) -> list[int]:
    """Per row the number of its session among those here, in order of first appearance."""
    numbers: dict[tuple[str, int], int] = {}
    parts = [split_row_key(key) for key in keys]
    return [numbers.setdefault((part.uid, part.session), len(numbers)) for part in parts]


def counts(keys: list[str], masks: list[np.ndarray]) -> np.ndarray:
    """f64[2]: tokens with loss mask 1, and sessions with at least one, on this rank (a session is on one rank)."""
    tokens = [float(mask.sum()) for mask in masks]
    sessions = {number for number, count in zip(session_numbers(keys), tokens, strict=True) if count}
    return np.array([sum(tokens), len(sessions)], np.float64)


def mask_metrics(
    masks: list[np.ndarray], loss: list[np.ndarray], versions: list[np.ndarray] | None, info: Mapping[str, Any]
) -> dict[str, Metric]:
    """How many sampled tokens count, and how old they are."""
    sampled = float(sum(int(mask.sum()) for mask in masks))
    kept = float(sum(float(mask.sum()) for mask in loss))
    found: dict[str, Metric] = {"loss_mask/ratio": Mean(kept, sampled)}
    if versions is not None:
        ages = [token_age(v, int(info["version"]))[m > 0] for v, m in zip(versions, masks, strict=True)]
        flat = np.concatenate(ages) if ages else np.zeros(0, np.int64)
        found["training/off_policy/token_staleness/mean"] = Mean(float(flat.sum()), float(flat.size))
        found["training/off_policy/token_staleness/max"] = Peak(float(flat.max(initial=0)))
        for age, count in enumerate(np.bincount(np.clip(flat, 0, OLDEST))):
            if count:
                found[f"{TOKENS_OF_AGE}{age}"] = Total(float(count))
        counted = [
            token_age(v, int(info["version"]))[m > 0].max(initial=0) for v, m in zip(versions, loss, strict=True)
        ]
        found["training/off_policy/token_staleness_trained/max"] = Peak(float(max(counted, default=0)))
        if (limit := info.get("max_age")) is not None:
            found["training/off_policy/masked_ratio"] = Mean(float((flat > int(limit)).sum()), float(flat.size))
    return found
