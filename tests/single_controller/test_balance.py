"""Sharing work evenly."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.single_controller.balance import balanced_partitions, row_cost

COSTS = st.lists(st.integers(0, 1000), max_size=24)


def loads(costs: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


@given(COSTS, st.integers(1, 6))
def test_every_index_is_in_one_part_and_each_part_ascends(costs: list[int], parts: int) -> None:
    found = balanced_partitions(costs, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    assert len(found) == parts
    assert all(part == sorted(part) for part in found)
    assert loads(costs, found) == sorted(loads(costs, found), reverse=True)


@given(COSTS, st.integers(1, 6))
def test_parts_of_equal_size_have_as_many_each(costs: list[int], parts: int) -> None:
    costs = costs[: len(costs) - len(costs) % parts]
    found = balanced_partitions(costs, parts, equal_size=True)
    assert {len(part) for part in found} == {len(costs) // parts}
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))


def test_differencing_finds_what_the_greedy_rule_misses() -> None:
    """Largest to the least loaded would give 17 and 13."""
    costs = [8, 7, 6, 5, 4]
    assert loads(costs, balanced_partitions(costs, 2)) == [16, 14]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_many_rows_of_uneven_length_are_shared_within_a_tenth_of_a_percent(parts: int) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    costs = [row_cost(min(8192, max(16, int(rng.lognormvariate(6.5, 0.8))))) for _ in range(512)]
    mean = sum(costs) / parts
    assert max(loads(costs, balanced_partitions(costs, parts))) < 1.001 * mean, f"seed {seed}"
    assert max(loads(costs, balanced_partitions(costs, parts, equal_size=True))) < 1.02 * mean, f"seed {seed}"


def test_a_few_rows_are_shared_as_well_as_can_be() -> None:
    """Against all assignments of 7 rows to 3 parts: never above 7/6 of the best."""
    rng = random.Random(0)
    for _ in range(20):
        costs = [rng.randint(1, 100) for _ in range(7)]
        best = min(
            max(sum(c for c, part in zip(costs, chosen, strict=True) if part == p) for p in range(3))
            for chosen in itertools.product(range(3), repeat=7)
        )
        assert max(loads(costs, balanced_partitions(costs, 3))) <= best * 7 / 6


def test_equal_costs_and_fewer_rows_than_parts_have_defined_results() -> None:
    assert balanced_partitions([5, 5, 5, 5], 2) == balanced_partitions([5, 5, 5, 5], 2)
    assert balanced_partitions([7], 3) == [[0], [], []]
    assert balanced_partitions([], 2) == [[], []]
    assert balanced_partitions([], 2, equal_size=True) == [[], []]


def test_no_parts_and_sizes_that_do_not_divide_are_errors() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        balanced_partitions([1.0], 0)
    with pytest.raises(ValueError, match="3 items do not divide into 2 parts"):
        balanced_partitions([1, 2, 3], 2, equal_size=True)
