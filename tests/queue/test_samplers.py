"""Which rows a fetch gets, sampler by sampler, without a queue."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.errors import Invalid
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    WeightedSampler,
    load_sampler,
    sampler_spec,
)
from transfer_queue.sampler.balance import balanced_partitions, get_seqlen_balanced_partitions, karmarkar_karp
from transfer_queue.sampler.priority import highest


class Tags:
    """A partition whose row i has the tags given for it."""

    partition_id = "p"

    def __init__(self, **tags: list) -> None:
        self.tags = tags

    @property
    def custom_meta(self) -> dict:
        return {}

    def tag_values(self, name: str, indexes) -> list:
        values = self.tags[name]
        return [values[i] if i < len(values) else None for i in np.asarray(indexes).tolist()]

    def tag_numbers(self, name: str, indexes) -> np.ndarray:
        return np.asarray([np.nan if value is None else value for value in self.tag_values(name, indexes)], float)


class NewestFirst(BaseSampler):
    """A sampler as a user writes it."""

    def __init__(self, skip: int = 0) -> None:
        super().__init__()
        self.skip = skip

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        chosen = sorted(ready_indexes, reverse=True)[self.skip : self.skip + batch_size]
        return chosen, chosen


def picked(answer) -> tuple[list[int], list[int]]:
    sampled, consumed = answer
    return list(map(int, sampled)), list(map(int, consumed))


def test_the_sequential_one_takes_the_oldest():
    assert picked(SequentialSampler()([3, 5, 8], 2)) == ([3, 5], [3, 5])


@pytest.mark.parametrize(
    ("ready", "batch", "expected"),
    [
        ([0, 1, 2, 3], 4, [0, 1, 2, 3]),
        ([0, 2, 3, 4, 6, 7], 4, [2, 3, 6, 7]),
        ([0, 1, 2, 4, 5, 6], 4, [0, 1, 4, 5]),
        ([5, 4, 1, 0], 2, [0, 1]),
        ([0, 2, 4], 2, []),
        ([0, 1], 4, []),
        ([], 2, []),
    ],
)
def test_the_group_sampler_takes_whole_runs_of_n_only(ready, batch, expected):
    assert picked(GRPOGroupNSampler(2)(ready, batch)) == (expected, expected)


def test_the_group_sampler_goes_by_a_tag_where_rows_of_groups_interleave():
    view = Tags(uid=["a", "b", "a", None, "b", "c"])
    assert picked(GRPOGroupNSampler(2, "uid")(range(6), 4, partition=view))[0] == [0, 2, 1, 4]
    assert picked(GRPOGroupNSampler(2, "uid")([1, 2, 3, 5], 2, partition=view))[0] == []


def test_groups_that_do_not_divide_the_batch_are_an_error():
    with pytest.raises(ValueError, match="whole groups of 2"):
        GRPOGroupNSampler(2)([0, 1, 2], 3)


def test_processes_of_one_rank_get_the_same_rows_and_ranks_get_others():
    sampler, of = RankAwareSampler(), {"partition_id": "p", "task_name": "t"}
    first = picked(sampler(list(range(8)), 2, dp_rank=0, batch_index=0, **of))
    other = picked(sampler(list(range(2, 8)), 2, dp_rank=1, batch_index=0, **of))
    again = picked(sampler(list(range(4, 8)), 2, dp_rank=0, batch_index=0, **of))
    assert (first, other, again) == (([0, 1], [0, 1]), ([2, 3], [2, 3]), ([0, 1], []))
    assert sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 0})
    sampler.clear_cache("p")
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 0})
    with pytest.raises(ValueError, match="dp_rank, batch_index"):
        sampler([1], 1, **of)


def test_ranks_get_rows_of_about_equal_length():
    rng = np.random.default_rng(5)
    lengths = rng.lognormal(6, 0.8, 64).astype(int).tolist()
    sampler, view = SeqlenBalancedSampler(4, dp_size=4), Tags(total_lengths=lengths)
    of = {"partition_id": "p", "task_name": "t", "partition": view, "batch_index": 0}
    answers = [picked(sampler(range(64), 16, dp_rank=rank, **of)) for rank in range(4)]
    loads = [sum(lengths[row] for row in sampled) for sampled, _ in answers]
    assert sorted(row for sampled, _ in answers for row in sampled) == list(range(64))
    assert (len(answers[0][1]), [len(consumed) for _, consumed in answers[1:]]) == (64, [0, 0, 0])
    assert (max(loads) - min(loads)) / np.mean(loads) < 0.05
    assert picked(SeqlenBalancedSampler(4, 4)(range(60), 16, dp_rank=0, **of)) == ([], [])


def test_a_row_without_its_length_is_named():
    of = {"partition_id": "p", "task_name": "t", "partition": Tags(total_lengths=[1]), "batch_index": 0, "dp_rank": 0}
    with pytest.raises(ValueError, match="row 1 has no tag 'total_lengths'"):
        SeqlenBalancedSampler()(range(2), 2, **of)


def test_the_priority_sampler_takes_the_highest_and_of_equal_ones_the_oldest():
    view = Tags(priority=[1.0, 3.0, None, 3.0, -1.0])
    assert picked(PrioritySampler(default=2.0)(range(5), 4, partition=view))[0] == [1, 3, 2, 0]


def test_the_weighted_sampler_takes_rows_as_often_as_they_weigh():
    view = Tags(weight=[8.0, 1.0, 1.0, 0.0])
    sampler = WeightedSampler(seed=3)
    counts = np.bincount([picked(sampler(range(4), 1, partition=view))[0][0] for _ in range(2000)], minlength=4)
    assert np.abs(counts / 2000 - [0.8, 0.1, 0.1, 0]).max() < 0.04
    assert picked(sampler(range(4), 4, partition=view)) == ([], [])
    with pytest.raises(ValueError, match="weights are not negative"):
        sampler(range(1), 1, partition=Tags(weight=[-1.0]))


def test_partitions_by_length_have_the_names_that_programs_call():
    for function in (karmarkar_karp, get_seqlen_balanced_partitions):
        assert sorted(map(sorted, function([5, 4, 3, 2], 2, equal_size=True))) == [[0, 3], [1, 2]]


def test_a_sampler_is_named_and_made_again_from_its_name():
    for sampler in (GRPOGroupNSampler(4), SeqlenBalancedSampler(2, 8), PrioritySampler("p", 1.5), WeightedSampler()):
        again = load_sampler(sampler_spec(sampler))
        assert (type(again), again.parameters()) == (type(sampler), sampler.parameters())
    assert type(load_sampler(sampler_spec(SequentialSampler))) is SequentialSampler


def test_a_sampler_of_a_user_is_named_by_its_module(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mine", __import__("types").SimpleNamespace(NewestFirst=NewestFirst))
    sampler = load_sampler({"name": "mine:NewestFirst", "skip": 1})
    assert picked(sampler([1, 2, 3, 4], 2)) == ([3, 2], [3, 2])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (NewestFirst(), r"objects are not sent .* its class by name .*:NewestFirst"),
        ({"n": 1}, "needs a `name`"),
        (5, "is a int"),
    ],
)
def test_what_cannot_be_named_is_an_error_with_a_remedy(given, match):
    with pytest.raises(Invalid, match=match):
        sampler_spec(given)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"name": "Sequential"}, "no sampler 'Sequential'"),
        ({"name": "no.such:Sampler"}, "cannot be imported"),
        ({"name": "os:getcwd"}, "no subclass"),
        ({"name": "GRPOGroupNSampler", "n": 3}, "unexpected keyword"),
        ({"name": "GRPOGroupNSampler", "n_samples_per_prompt": 0}, "at least 1"),
    ],
)
def test_a_name_or_parameter_that_is_none_is_an_error(spec, match):
    with pytest.raises(Invalid, match=match):
        load_sampler(spec)


@pytest.mark.parametrize("seed", range(10))
def test_the_highest_are_those_of_a_stable_sort(seed):
    random = np.random.default_rng(seed)
    values = random.integers(0, 5, 50) if seed % 2 else random.random(50)
    for count in (1, 7, 49, 50):
        assert highest(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


def differenced(costs: list[int], parts: int) -> list[list[int]]:
    """Largest differencing as it was written down: each partial solution has all its lists, empty or not."""
    items = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    solutions = [(place, [(costs[i], [i])] + [(0, [])] * (parts - 1)) for place, i in enumerate(items)]
    while len(solutions) > 1:
        solutions.sort(key=lambda one: (one[1][-1][0] - one[1][0][0], one[0]))
        (place, first), (_, second), *solutions = solutions
        joined = [(a + b, some + more) for (a, some), (b, more) in zip(first, second[::-1], strict=True)]
        solutions.append((place, sorted(joined, key=lambda part: -part[0])))
    found = sorted(solutions[0][1], key=lambda part: (-part[0], sorted(part[1])[:1]))
    return [sorted(indices) for _, indices in found]


@pytest.mark.parametrize("seed", range(20))
def test_largest_differencing_without_its_empty_lists_gives_the_same(seed):
    random = np.random.default_rng(seed)
    costs = random.integers(1, random.choice([5, 1000]), random.integers(1, 40)).tolist()
    for parts in (1, 2, 3, 8, 50):
        assert balanced_partitions(costs, parts) == differenced(costs, parts)
