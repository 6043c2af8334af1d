"""GAE, discounted returns and whitening on ragged rows, against loops over tokens written from the papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from streamrl.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimator, gae, moments, reinforce_plus_plus, whitened
from tests.algorithms.ragged import Ragged

SETTINGS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)]


def earned(rewards: np.ndarray, mask: np.ndarray) -> tuple[list[int], list[float]]:
    """The sampled positions, and each one's reward with those of the mask-0 tokens that follow it."""
    places: list[int] = []
    found: list[float] = []
    for t, m in enumerate(mask):
        if m:
            places.append(t)
            found.append(float(rewards[t]))
        elif places:
            found[-1] += float(rewards[t])
    return places, found


def by_definition(
    rewards: np.ndarray, mask: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_t = sum_l (gamma lam)^l delta_{t+l} (GAE eq. 16) on the row as if it had only its sampled tokens."""
    places, reward = earned(rewards, mask)
    v = [float(values[t]) for t in places] + [0.0]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, place in enumerate(places):
        advantages[place] = math.fsum(
            (gamma * lam) ** (k - i) * (reward[k] + gamma * v[k + 1] - v[k]) for k in range(i, len(places))
        )
        returns[place] = advantages[place] + v[i]
    return advantages, returns


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
def test_gae_is_the_discounted_sum_of_temporal_differences_over_sampled_tokens(
    seed: int, gamma: float, lam: float
) -> None:
    rows = Ragged(seed)
    rewards, values = rows.column(), rows.column()
    advantages, returns = gae(rewards, rows.masks, values, gamma=gamma, lam=lam)
    for i, mask in enumerate(rows.masks):
        expected, targets = by_definition(rewards[i], mask, values[i], gamma, lam)
        np.testing.assert_allclose(advantages[i], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(returns[i], targets, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_reinforce_plus_plus_is_the_discounted_return(seed: int, gamma: float) -> None:
    rows = Ragged(seed)
    rewards = rows.column()
    advantages, returns = reinforce_plus_plus(rewards, rows.masks, gamma=gamma)
    for i, mask in enumerate(rows.masks):
        places, reward = earned(rewards[i], mask)
        expected = [0.0] * len(mask)
        for k, place in enumerate(places):
            expected[place] = math.fsum(gamma ** (j - k) * reward[j] for j in range(k, len(places)))
        np.testing.assert_allclose(advantages[i], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(returns[i], expected, rtol=1e-9, atol=1e-12)


def test_every_estimator_per_token_is_compared_with_a_reference() -> None:
    known = {name for name in ADVANTAGE_ESTIMATORS.names() if estimator(name).per_token}
    assert known == {"gae", "reinforce_plus_plus"}
    assert all(estimator(name).whiten for name in known)


def test_tool_text_in_between_changes_nothing() -> None:
    """The row with its tool tokens and the row without them have the same advantages on what was sampled."""
    mask = np.array([1, 0, 0, 1, 1, 0])
    rewards, values = np.array([0.1, 0.0, 0.0, 0.2, 1.0, 0.0]), np.array([0.5, 9.0, -9.0, 0.4, 0.3, 9.0])
    [with_tools], _ = gae([rewards], [mask], [values], gamma=0.9, lam=0.8)
    kept = mask > 0
    [without], _ = gae([rewards[kept]], [mask[kept]], [values[kept]], gamma=0.9, lam=0.8)
    np.testing.assert_allclose(with_tools[kept], without)
    assert (with_tools[~kept] == 0).all()


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_a_trajectory_that_ends_on_tool_text_keeps_its_reward(name: str) -> None:
    mask, values = np.array([1, 1, 0, 0]), np.zeros(4)
    [at_end], _ = estimator(name).tokens([np.array([0.0, 0.0, 0.0, 1.0])], [mask], [values])
    [on_action], _ = estimator(name).tokens([np.array([0.0, 1.0, 0.0, 0.0])], [mask], [values])
    assert at_end.tolist() == on_action.tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_a_row_that_sampled_nothing_has_no_advantage(name: str) -> None:
    found = estimator(name).tokens([np.ones(3), np.zeros(0)], [np.zeros(3), np.zeros(0)], [np.ones(3), np.zeros(0)])
    assert [[each.tolist() for each in column] for column in found] == [[[0.0] * 3, []]] * 2


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="token 1 is nan"):
        reinforce_plus_plus([np.array([0.0, np.nan])], [np.ones(2)])


def test_gae_without_a_critic_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'gae' needs values"):
        estimator("gae").tokens([np.zeros(2)], [np.ones(2)])


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        gae([np.zeros(2)], [np.ones(3)], [np.zeros(3)])
    with pytest.raises(ValueError, match="values"):
        gae([np.zeros(3)], [np.ones(3)], [np.zeros(2)])


@pytest.mark.parametrize("seed", range(5))
def test_whitening_is_over_the_counting_tokens_of_the_whole_set_however_it_is_split(seed: int) -> None:
    rows = Ragged(seed)
    column = rows.column(scale=3.0, shift=1.5)
    counting = [float(v) for v, m in zip(np.concatenate(column), np.concatenate(rows.masks), strict=True) if m]
    mean, variance = statistics.fmean(counting), statistics.variance(counting)
    for split in rows.splits():
        total = sum(moments([column[i] for i in part], [rows.masks[i] for i in part]) for part in split)
        for part in split:
            found = whitened([column[i] for i in part], [rows.masks[i] for i in part], np.asarray(total))
            for i, values in zip(part, found, strict=True):
                expected = [
                    (v - mean) / math.sqrt(variance + 1e-8) if m else 0.0
                    for v, m in zip(column[i], rows.masks[i], strict=True)
                ]
                np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.3, 1000.0])
def test_equal_advantages_whiten_to_nothing_even_with_float_residue(value: float) -> None:
    values = [np.array([value, np.nextafter(np.float32(value), np.float32(2 * value)), value]), np.array([value])]
    masks = [np.ones(3), np.ones(1)]
    assert [each.tolist() for each in whitened(values, masks, moments(values, masks))] == [[0.0] * 3, [0.0]]


def test_one_value_or_none_whitens_to_nothing() -> None:
    for values, masks in (([np.array([5.0, 2.0])], [np.array([1, 0])]), ([np.array([5.0])], [np.zeros(1)])):
        [found] = whitened(values, masks, moments(values, masks))
        assert (found == 0).all()
