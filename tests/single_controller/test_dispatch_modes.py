"""How arguments become shares and results one value: every mode that splits rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from agent_loop.plugins import PluginError
from streamrl import DataProto
from streamrl.single_controller import ClassWithInitArgs, Dispatch, Execute, Mean, Worker, WorkerFailed, register
from streamrl.single_controller.functions import NamedFunction
from tests.single_controller.inline import InlineWorkerGroup
from tests.single_controller.test_mesh import batch_of
from transfer_queue.metadata import KVBatchMeta


class Rows(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, data: Any, note: str = "") -> Any:
        self.got = len(data)
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def times(self, data: Any, n: int) -> Any:
        return data[torch.arange(len(data)).repeat_interleave(n)] if n else data[torch.arange(0)]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def shorter(self, data: DataProto) -> DataProto:
        return data[: max(0, len(data) - self.rank.rank)]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scores(self, batch: KVBatchMeta) -> DataProto:
        """Rows for references."""
        return DataProto.from_dict({"length": torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.long)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def both(self, batch: KVBatchMeta, data: DataProto) -> DataProto:
        assert data.non_tensor_batch["key"].tolist() == batch.keys
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def measured(self, data: Any) -> dict[str, Mean]:
        return {"mean": Mean(float(self.rank.rank), 1)}

    @register(Dispatch.DP_COMPUTE_METRIC)
    def mean_row(self, data: DataProto) -> dict[str, Mean]:
        assert data.batch is not None
        return {"mean": Mean(float(data.batch["row"].sum()), len(data))}

    @register(Dispatch.DP_COMPUTE_METRIC)
    def seen(self, data: Any) -> DataProto:
        return DataProto(meta_info={"rows": len(data)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def mixed(self, data: DataProto) -> Any:
        return data if self.rank.rank else KVBatchMeta()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def lengths(self, data: Any) -> int:
        return len(data)


def group_of(world_size: int) -> InlineWorkerGroup:
    return InlineWorkerGroup(world_size, ClassWithInitArgs(Rows))


def proto(rows: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(rows)}, {"name": [f"r{i}" for i in range(rows)]})


def jagged(rows: int) -> TensorDict:
    ids = torch.nested.as_nested_tensor([torch.full((i + 1,), i) for i in range(rows)], layout=torch.jagged)
    return TensorDict({"row": torch.arange(rows), "ids": ids}, batch_size=[rows])


# --- rows in, rows out ----------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5))
def test_rows_come_back_as_they_were_and_shares_are_of_one_size(rows: int, ranks: int) -> None:
    group = group_of(ranks)
    assert group.same(proto(rows), note="the same to all").batch["row"].tolist() == list(range(rows))
    assert {worker[""].got for worker in group._ranks.workers} == {-(-rows // ranks)}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.integers(1, 5))
def test_references_come_back_as_they_were_from_balanced_shares(lengths: list[int], ranks: int) -> None:
    batch = batch_of(lengths, advantages={f"p{i}_0_0": i for i in range(len(lengths))}, mini_batch_size=2)
    back = group_of(ranks).same(batch)
    assert (back.keys, back.tags, back.extra_info) == (batch.keys, batch.tags, batch.extra_info)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.integers(1, 5))
def test_rows_computed_for_references_are_in_the_order_of_the_references(lengths: list[int], ranks: int) -> None:
    assert group_of(ranks).scores(batch_of(lengths)).batch["length"].tolist() == lengths


def test_ragged_tensordicts_are_split_padded_and_joined() -> None:
    back = group_of(2).same(jagged(3))
    assert [row.tolist() for row in back["ids"].unbind()] == [[0], [1, 1], [2, 2, 2]]
    assert back["row"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_n_rows_for_each_row_stay_together_and_without_the_paddings(n: int) -> None:
    back = group_of(2).times(proto(5), n)
    assert back.batch["row"].tolist() == [row for row in range(5) for _ in range(n)]


def test_another_number_of_rows_is_joined_by_rank_but_not_if_some_were_padding() -> None:
    assert group_of(2).shorter(proto(4)).batch["row"].tolist() == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"shorter: results of \[2, 1\] rows for shares of \[2, 2\]; 1 of these repeat"
    ):
        group_of(2).shorter(proto(3))


def test_references_and_rows_in_one_call_are_split_by_the_same_rows() -> None:
    batch = batch_of([5, 100, 7, 80, 9])
    data = DataProto.from_dict(non_tensors={"key": batch.keys})
    assert group_of(2).both(batch, data=data).non_tensor_batch["key"].tolist() == batch.keys
    with pytest.raises(ValueError, match=r"both: batches of \[4, 5\] rows in one call"):
        group_of(2).both(batch, data[:4])


def test_results_that_are_no_rows_are_metrics_or_a_list() -> None:
    assert group_of(2).measured(proto(2)) == {"mean": 0.5}
    assert group_of(2).lengths(proto(3)) == [2, 2]
    with pytest.raises(TypeError, match="different kinds: KVBatchMeta, DataProto"):
        group_of(2).mixed(proto(2))


@given(st.integers(0, 9), st.integers(1, 5))
def test_figures_of_rows_count_every_row_once(rows: int, ranks: int) -> None:
    expected = sum(range(rows)) / rows if rows else 0.0
    assert group_of(ranks).mean_row(proto(rows)) == {"mean": pytest.approx(expected)}
    seen = [each.meta_info["rows"] for each in group_of(ranks).seen(proto(rows))]
    assert (sum(seen), len(seen)) == (rows, ranks)
    assert max(seen) - min(seen) <= 1
    assert sum(each.meta_info["rows"] for each in group_of(ranks).seen(batch_of([3] * rows))) == rows


def test_no_rows_are_given_to_every_rank() -> None:
    assert group_of(2).lengths(proto(0)) == [0, 0]
    assert group_of(2).lengths(batch_of([])) == [0, 0]


# --- functions by name ----------------------------------------------------------------------------------------------


def test_a_function_of_a_file_runs_on_each_share(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def plus(worker, data, by):\n    data.batch['row'] += by\n    return data\n")
    back = group_of(2).execute_with_func_generator(f"{file}:plus", proto(3), by=10)
    assert back.batch["row"].tolist() == [10, 11, 12]


@pytest.mark.parametrize("function", [len, lambda worker, data: data, 3, None])
def test_code_is_never_sent(function: Any) -> None:
    with pytest.raises(TypeError, match="sent to the ranks by name"):
        group_of(2).execute_with_func_generator(function, proto(2))


@pytest.mark.parametrize("name", ["no_colon", "os:", ":f", "a.b:c:d", "a b:c"])
def test_a_bad_name_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(ValueError, match="expected 'package.module:function'"):
        group_of(2).execute_with_func_generator(name, proto(2))
    with pytest.raises(TypeError, match="first argument is a function"):
        group_of(2).execute_with_func_generator()


def test_a_name_without_a_function_is_an_error_of_the_rank() -> None:
    functions = "tests.single_controller.functions"
    with pytest.raises(WorkerFailed, match=r"functions has no 'nope'"):
        group_of(1).execute_with_func_generator(f"{functions}:nope", proto(1))
    with pytest.raises(PluginError, match="not callable but int"):
        NamedFunction.of(f"{functions}:NO_FUNCTION").load()


# --- registering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode for mode in Dispatch if mode.name not in ("RANK_ZERO", "ONE_TO_ALL")])
def test_what_is_split_over_all_ranks_cannot_run_on_one(mode: Dispatch) -> None:
    with pytest.raises(ValueError, match="the rest would be lost"):
        register(mode, Execute.RANK_ZERO)


def test_a_decorator_without_parentheses_is_noticed() -> None:
    with pytest.raises(TypeError, match="parentheses"):

        class Wrong(Worker):
            @register  # type: ignore[arg-type]
            def method(self) -> None: ...
