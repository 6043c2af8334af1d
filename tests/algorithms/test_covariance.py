"""Which tokens clip_cov and kl_cov treat apart: from the definition, and the same on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from streamrl.algorithms.policy_losses import PolicyLossSettings, select_by_covariance, token_draws
from tests.algorithms.ragged import Ragged

SETTINGS = PolicyLossSettings(clip_cov_ratio=0.15, clip_cov_lb=0.0, clip_cov_ub=3.0, kl_cov_ratio=0.15)
Columns = list[list[np.ndarray]]


def batch(seed: int) -> tuple[Ragged, Columns]:
    """log_probs, advantages, masks, draws."""
    rows = Ragged(seed, rows=12)
    draws = token_draws([f"row {i}" for i in range(rows.rows)], rows.lengths, seed=seed)
    return rows, [rows.log_probs(), rows.column(), rows.masks, draws]


def by_definition(loss: str, columns: Columns) -> list[list[float]]:
    log_probs, advantages, masks, draws = columns
    tokens = [(i, t) for i, mask in enumerate(masks) for t, m in enumerate(mask) if m]
    mean_p = sum(log_probs[i][t] for i, t in tokens) / len(tokens)
    mean_a = sum(advantages[i][t] for i, t in tokens) / len(tokens)
    cov = {(i, t): (log_probs[i][t] - mean_p) * (advantages[i][t] - mean_a) for i, t in tokens}
    count = max(int(0.15 * len(tokens)), 1)
    if loss == "kl_cov":
        chosen = sorted(tokens, key=lambda token: cov[token])[-count:]
    else:
        eligible = [token for token in tokens if 0.0 < cov[token] < 3.0]
        chosen = sorted(eligible, key=lambda token: draws[token[0]][token[1]])[-count:]
    return [[float((i, t) in chosen) for t in range(len(mask))] for i, mask in enumerate(masks)]


def select(loss: str, columns: Columns, **ranks: object) -> list[np.ndarray]:
    *columns, draws = columns
    return select_by_covariance(loss, *columns, settings=SETTINGS, draws=draws, **ranks)  # type: ignore[arg-type]


def together(parts: list[list[int]], columns: Columns, loss: str) -> dict[int, np.ndarray]:
    """Each part on a rank of its own."""
    barrier, slots = threading.Barrier(len(parts), timeout=30), [np.zeros(0)] * len(parts)
    found: dict[int, np.ndarray] = {}

    def all_sum(rank: int) -> Callable[[np.ndarray], np.ndarray]:
        def add(values: np.ndarray) -> np.ndarray:
            slots[rank] = values
            barrier.wait()
            total = np.sum(slots, axis=0)
            barrier.wait()
            return total

        return add

    def work(rank: int) -> None:
        part = parts[rank]
        own = [[column[i] for i in part] for column in columns]
        chosen = select(loss, own, all_sum=all_sum(rank), rank=rank, world_size=len(parts))
        found.update(zip(part, chosen, strict=True))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_selection_is_that_of_the_mini_batch_on_any_number_of_ranks(loss: str, seed: int) -> None:
    rows, columns = batch(seed)
    expected = by_definition(loss, columns)
    assert sum(map(sum, expected)) >= 1
    assert [each.tolist() for each in select(loss, columns)] == expected
    for split in rows.splits():
        found = together(split, columns, loss)
        assert [found[i].tolist() for i in range(rows.rows)] == expected


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_mini_batch_without_counting_tokens_selects_none(loss: str) -> None:
    columns = [[np.zeros(3)], [np.zeros(3)], [np.zeros(3)], [np.zeros(3)]]
    assert select(loss, columns)[0].tolist() == [0.0] * 3


def test_clip_cov_takes_all_that_are_eligible_if_they_are_few() -> None:
    log_probs, advantages = [np.array([-4.0, -0.1, -2.0, -2.0])], [np.array([0.0, 2.0, 1.0, 1.0])]
    settings = PolicyLossSettings(clip_cov_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=5.0)
    draws = token_draws(["a"], [4], seed=0)
    [found] = select_by_covariance("clip_cov", log_probs, advantages, [np.ones(4)], settings=settings, draws=draws)
    assert found.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_tokens_draw_depends_on_its_row_place_and_seed_alone() -> None:
    [a, b], [again] = token_draws(["a", "b"], [5, 3], seed=1), token_draws(["a"], [4], seed=1)
    np.testing.assert_array_equal(a[:4], again)
    assert not np.array_equal(a[:3], b)
    assert not np.array_equal(token_draws(["a"], [4], seed=2)[0], again)


def test_clip_cov_without_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="token_draws"):
        select_by_covariance("clip_cov", [np.zeros(1)], [np.zeros(1)], [np.ones(1)], settings=SETTINGS)
