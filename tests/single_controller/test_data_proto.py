"""DataProto: rows of tensors and of anything else."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from streamrl import DataProto
from streamrl.protocol import DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto
from streamrl.single_controller import Mean, Total
from streamrl.single_controller.values import same


def data(rows: int = 5, **meta: Any) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(rows * 3).reshape(rows, 3), "score": torch.arange(rows) / 2},
        {"uid": [f"u{i}" for i in range(rows)], "turns": [list(range(i)) for i in range(rows)]},
        meta or {"temperature": 0.7},
    )


def uids(proto: DataProto) -> list[str]:
    return [str(uid) for uid in proto.non_tensor_batch["uid"]]


def assert_rows_go_together(proto: DataProto) -> None:
    assert proto.batch is not None
    rows = [int(uid[1:]) for uid in uids(proto)]
    assert (proto.batch["ids"][:, 0] // 3).tolist() == rows
    assert [len(turns) for turns in proto.non_tensor_batch["turns"]] == rows


# --- making ---------------------------------------------------------------------------------------------------------


def test_lists_become_object_arrays_of_rows_even_if_the_rows_are_equally_long() -> None:
    proto = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4]], "text": np.array(["a", "b"])})
    assert (proto.non_tensor_batch["pairs"].shape, proto.non_tensor_batch["pairs"].dtype) == ((2,), object)
    assert len(proto) == 2
    assert len(DataProto(meta_info={"metrics": {}})) == 0


def test_one_dict_is_sorted_by_kind() -> None:
    proto = DataProto.from_single_dict({"ids": torch.zeros(2, 3), "uid": np.array(["a", "b"], dtype=object)})
    assert proto.fields() == ["ids", "uid"]
    with pytest.raises(TypeError, match=r"takes tensors and numpy arrays; got \{'n': 'int'\}"):
        DataProto.from_single_dict({"n": 3})


@pytest.mark.parametrize(
    ("tensors", "others", "error", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, None, ValueError, r"differ in their number of rows: .*'b': 3"),
        ({"a": torch.tensor(1.0)}, None, TypeError, r"tensors\['a'\]"),
        ({"a": [1, 2]}, None, TypeError, r"tensors\['a'\] is list"),
        ({"a": torch.zeros(2)}, {"uid": ["x"]}, ValueError, r"non_tensor_batch\['uid'\] has 1 rows, the others have 2"),
        (None, {"uid": "ab"}, TypeError, "not str"),
    ],
)
def test_what_does_not_fit_together_is_refused(tensors: Any, others: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        DataProto.from_dict(tensors, others)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_an_int_gives_one_row() -> None:
    item = data()[-1]
    assert isinstance(item, DataProtoItem)
    assert (item.batch["ids"].tolist(), item.non_tensor_batch["uid"]) == ([12, 13, 14], "u4")
    assert item.meta_info == {"temperature": 0.7}
    with pytest.raises(IndexError, match="row 5 of 5"):
        data()[5]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, 3), ["u1", "u2"]),
        (slice(None, None, -2), ["u4", "u2", "u0"]),
        ([3, 3, 0], ["u3", "u3", "u0"]),
        ([-1], ["u4"]),
        (np.array([2]), ["u2"]),
        (torch.tensor([4, 1]), ["u4", "u1"]),
        ([True, False, False, True, False], ["u0", "u3"]),
        (torch.tensor([False, True, False, False, False]), ["u1"]),
        ([], []),
    ],
)
def test_rows_are_selected_by_slice_index_and_mask(rows: Any, expected: list[str]) -> None:
    chosen = data()[rows]
    assert uids(chosen) == expected
    assert chosen.meta_info == {"temperature": 0.7}
    assert_rows_go_together(chosen)


@pytest.mark.parametrize("rows", [[5], [-6], [True, False], [0.5], [[0, 1]]])
def test_rows_that_are_not_there_are_an_error(rows: Any) -> None:
    with pytest.raises(IndexError, match=r"row|mask"):
        data()[rows]


def test_reorder_takes_permutations_only() -> None:
    proto = data(3)
    proto.reorder(torch.tensor([2, 0, 1]))
    assert uids(proto) == ["u2", "u0", "u1"]
    assert_rows_go_together(proto)
    with pytest.raises(ValueError, match="not a permutation of the 3 rows"):
        proto.reorder([0, 0, 1])


def test_repeat_interleaves_or_tiles() -> None:
    assert uids(data(2).repeat(2)) == ["u0", "u0", "u1", "u1"]
    assert uids(data(2).repeat(2, interleave=False)) == ["u0", "u1", "u0", "u1"]
    with pytest.raises(ValueError, match="0 times"):
        data(2).repeat(0)


def test_chunks_are_of_one_size_and_split_may_end_short() -> None:
    assert [uids(part) for part in data(4).chunk(2)] == [["u0", "u1"], ["u2", "u3"]]
    assert [len(part) for part in data(5).split(2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="5 rows do not divide into 2 pieces.*pad_dataproto_to_divisor"):
        data(5).chunk(2)


@given(st.integers(1, 9), st.integers(1, 6))
def test_padding_then_chunks_then_concat_then_unpadding_is_the_identity(rows: int, parts: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data(rows), parts)
    assert len(padded) % parts == 0
    assert pad_size < parts
    back = unpad_dataproto(DataProto.concat(padded.chunk(parts)), pad_size)
    assert uids(back) == uids(data(rows))
    assert_rows_go_together(back)


def test_no_rows_need_no_padding_and_more_padding_than_rows_is_refused() -> None:
    assert pad_dataproto_to_divisor(DataProto(), 4)[1] == 0
    with pytest.raises(ValueError, match="3 rows of padding in 2 rows"):
        unpad_dataproto(data(2), 3)


def test_the_iterator_visits_every_row_once_an_epoch_in_an_order_its_seed_decides() -> None:
    def order(seed: int) -> list[list[str]]:
        return [uids(part) for part in data(6).make_iterator(2, 2, seed, {"shuffle": True})]

    first = order(1)
    assert len(first) == 6
    for epoch in (first[:3], first[3:]):
        assert sorted(uid for part in epoch for uid in part) == uids(data(6))
    assert first == order(1) != order(2)
    assert [uids(part) for part in data(4).make_iterator(2, 1)] == [["u0", "u1"], ["u2", "u3"]]
    with pytest.raises(ValueError, match="5 rows do not divide into mini-batches of 2"):
        data(5).make_iterator(2, 1)
    with pytest.raises(ValueError, match="num_workers"):
        data(4).make_iterator(2, 1, dataloader_kwargs={"num_workers": 3})


def test_jagged_tensors_keep_their_rows() -> None:
    jagged = torch.nested.as_nested_tensor([torch.arange(i + 1) for i in range(4)], layout=torch.jagged)
    proto = DataProto.from_dict({"ids": jagged, "row": torch.arange(4)})
    back = DataProto.concat([proto[[3, 1]], proto[[0, 2]]])
    assert back.batch is not None
    assert [len(row) - 1 for row in back.batch["ids"].unbind()] == back.batch["row"].tolist() == [3, 1, 0, 2]


def test_no_rows_of_a_jagged_field_are_rows_of_its_kind(tmp_path: Path) -> None:
    rows = [torch.ones(length, 3, dtype=torch.float16) for length in (1, 2)]
    proto = DataProto.from_dict({"x": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    proto[:0].save_to_disk(tmp_path / "rows")
    empty = [proto[2:], proto[[]], *proto[:0].chunk(2), DataProto.load_from_disk(tmp_path / "rows")]
    for none in empty:
        assert none.batch is not None
        assert (len(none), none.batch["x"].dtype, none.batch["x"].values().shape) == (0, torch.float16, (0, 3))
        whole = DataProto.concat([none, proto])
        assert whole.batch is not None
        assert [row.shape[0] for row in whole.batch["x"].unbind()] == [1, 2]


# --- fields ---------------------------------------------------------------------------------------------------------


def test_select_and_pop_take_fields_by_kind() -> None:
    proto = data()
    chosen = proto.select(batch_keys=["ids"], non_tensor_batch_keys=[])
    assert chosen.fields() == ["ids"]
    assert chosen.meta_info == proto.meta_info
    taken = proto.pop(["score"], ["turns"], ["temperature"])
    assert (taken.fields(), taken.meta_info) == (["score", "turns"], {"temperature": 0.7})
    assert (proto.fields(), proto.meta_info) == (["ids", "uid"], {})
    assert proto.pop(non_tensor_batch_keys=["uid"]).fields() == ["uid"]
    with pytest.raises(KeyError, match=r"batch has no \['nope'\]; it has \['ids'\]"):
        proto.select(["nope"])
    with pytest.raises(KeyError, match="uid"):
        proto.pop(non_tensor_batch_keys=["uid"])


def test_a_selection_shares_no_dict_with_the_whole_and_with_deepcopy_no_memory() -> None:
    proto = data()
    shallow, deep = proto.select(), proto.select(deepcopy=True)
    shallow.meta_info["temperature"] = 1.0
    shallow.pop(["score"])
    assert proto.batch is not None
    assert deep.batch is not None
    deep.batch["ids"][0, 0] = 99
    deep.non_tensor_batch["turns"][4].append(7)
    assert proto.meta_info == {"temperature": 0.7}
    assert "score" in proto.batch
    assert proto.batch["ids"][0, 0] == 0
    assert_rows_go_together(proto)


def test_rename_is_in_place() -> None:
    proto = data()
    assert proto.rename("ids", "input_ids") is proto
    assert proto.rename(["score"], ["rm_scores"]).fields() == ["input_ids", "rm_scores", "uid", "turns"]
    with pytest.raises(ValueError, match="1 old names and 2 new"):
        proto.rename(["input_ids"], ["a", "b"])
    with pytest.raises(KeyError, match="nope"):
        proto.rename("nope", "a")


def test_union_keeps_the_metrics_of_both_the_newer_ones_first() -> None:
    whole = DataProto.from_dict(meta_info={"metrics": {"loss": 1.0, "lr": 0.1}})
    found = DataProto.from_dict(meta_info={"metrics": {"loss": 2.0}})
    assert whole.union(found).meta_info == {"metrics": {"loss": 2.0, "lr": 0.1}}
    assert found.meta_info == {"metrics": {"loss": 2.0}}


def test_union_takes_equal_jagged_fields_and_refuses_other_values_or_lengths() -> None:
    def jagged(*rows: list[float]) -> DataProto:
        values = torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
        return DataProto.from_dict({"x": values})

    whole = jagged([1.0], [2.0, 3.0]).union(jagged([1.0], [2.0, 3.0]))
    assert whole.batch is not None
    assert [row.tolist() for row in whole.batch["x"].unbind()] == [[1.0], [2.0, 3.0]]
    for other in (jagged([1.0], [2.0, 4.0]), jagged([1.0, 2.0], [3.0])):
        with pytest.raises(ValueError, match=r"union: both have \['x'\]"):
            jagged([1.0], [2.0, 3.0]).union(other)


def test_union_adds_what_is_new_and_refuses_what_differs() -> None:
    proto = data(2)
    proto.union(DataProto.from_dict({"values": torch.ones(2)}, {"uid": ["u0", "u1"]}, {"step": 3}))
    assert proto.fields() == ["ids", "score", "values", "uid", "turns"]
    assert proto.meta_info == {"temperature": 0.7, "step": 3}
    proto.union(DataProto(meta_info={"metrics": 1}))
    assert DataProto().union(data(2)).fields() == data(2).fields()
    for other in (
        DataProto.from_dict({"score": torch.ones(2)}),
        DataProto.from_dict(non_tensors={"uid": ["u0", "other"]}),
        DataProto(meta_info={"temperature": 0.8}),
    ):
        with pytest.raises(ValueError, match="union: both have"):
            data(2).union(other)
    with pytest.raises(ValueError, match="2 and 3 rows"):
        data(2).union(DataProto.from_dict({"values": torch.ones(3)}))


def test_to_moves_the_tensors() -> None:
    moved = data().to("meta")
    assert moved.batch is not None
    assert moved.batch["ids"].device.type == "meta"


# --- joining --------------------------------------------------------------------------------------------------------


def test_concat_refuses_other_fields_shapes_and_values() -> None:
    with pytest.raises(ValueError, match="fields differ"):
        DataProto.concat([data(2), DataProto.from_dict({"ids": torch.zeros(1, 3)})])
    with pytest.raises(ValueError, match="fields .*'values'"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(1)}), DataProto.from_dict({"values": torch.ones(1)})])
    with pytest.raises(ValueError, match=r"'ids'.*\[2\], \[3\].*pad them"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(1, n)}) for n in (2, 3)])
    with pytest.raises(ValueError, match=r"meta_info\['t'\] is 1 and 2"):
        DataProto.concat([data(2, t=1), data(2, t=2)])
    with pytest.raises(ValueError, match="nothing to join"):
        DataProto.concat([])


def test_metrics_are_merged_where_they_say_how_and_listed_where_not() -> None:
    typed = [data(1, metrics={"loss": Mean(2.0, 1), "rows": Total(1)}), data(1, metrics={"loss": Mean(2.0, 3)})]
    assert DataProto.concat(typed).meta_info["metrics"] == {"loss": 1.0, "rows": 1.0}
    plain = [data(1, metrics={"loss": 1.0}), data(1, metrics=[{"loss": 2.0}, {"lr": 3.0}])]
    assert DataProto.concat(plain).meta_info["metrics"] == {"loss": [1.0, 2.0], "lr": [3.0]}


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.zeros(2), np.zeros(2), False),
        (np.array([1, "a"], dtype=object), np.array([1, "a"], dtype=object), True),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        ({"a": [np.zeros(2)]}, {"a": [np.zeros(2)]}, True),
        ([1], [1, 2], False),
        (float("nan"), float("nan"), True),
    ],
)
def test_equality_looks_into_values(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal


# --- imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["streamrl", "streamrl.protocol", "streamrl.single_controller.data_proto"])
def test_dataproto_loads_torch_only_when_it_makes_tensors(first: str) -> None:
    code = (
        f"import sys, {first}; import streamrl; heavy = {{'torch', 'tensordict', 'ray'}};"
        "assert 'streamrl.single_controller' not in sys.modules or streamrl.__name__ != " + repr(first) + ";"
        "streamrl.DataProto.from_dict(non_tensors={'uid': ['a', 'b']})[1:];"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_what_is_saved_comes_back_as_it_was(tmp_path: Path, rows: int) -> None:
    given = data(rows, temperature=0.7, shape=(2, 3), seen={"a": [1, None, "x"]})
    assert given.batch is not None
    if rows:
        given.batch["ragged"] = torch.nested.as_nested_tensor([torch.arange(i + 1.0) for i in range(rows)],
                                                              layout=torch.jagged)  # fmt: skip
    given.batch["view"] = given.batch["ids"][:, 1:]
    given.batch["half"] = torch.zeros(rows, 2, dtype=torch.bfloat16)
    given.non_tensor_batch["length"] = np.arange(rows, dtype=np.int32)
    given.save_to_disk(tmp_path / "rows")
    found = DataProto.load_from_disk(tmp_path / "rows")
    assert found.batch is not None
    assert (len(found), found.fields(), found.meta_info) == (rows, given.fields(), given.meta_info)
    for name in given.batch.keys():  # noqa: SIM118
        expected, value = given.batch[name], found.batch[name]
        assert value.dtype == expected.dtype
        assert all(map(torch.equal, value.unbind(), expected.unbind()))
    for name, values in given.non_tensor_batch.items():
        assert found.non_tensor_batch[name].dtype == values.dtype
        assert found.non_tensor_batch[name].tolist() == values.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_rows_without_tensors_come_back_without_tensors(tmp_path: Path) -> None:
    DataProto.from_dict(non_tensors={"uid": ["a", "b"]}).save_to_disk(tmp_path / "rows")
    found = DataProto.load_from_disk(tmp_path / "rows")
    assert found.batch is None
    assert uids(found) == ["a", "b"]


def test_what_a_file_cannot_hold_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    class Mine: ...

    for unfit, named in [
        (DataProto.from_dict(non_tensors={"uid": [Mine()]}), r"Mine at value\[0\]\['uid'\]\['objects'\]\[0\]"),
        (data(2, hidden=Mine()), r"Mine at value\[1\]\['hidden'\]"),
    ]:
        with pytest.raises(TypeError, match=named):
            unfit.save_to_disk(tmp_path / "rows")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["empty", "pickle", "cut", "other"])
def test_another_file_is_refused_by_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rows"
    data().save_to_disk(path)
    whole = path.read_bytes()
    if damage == "other":
        save_file({"a": np.zeros(2)}, path)
    else:
        path.write_bytes({"empty": b"", "pickle": pickle.dumps([1]), "cut": whole[: len(whole) // 2]}[damage])
    with pytest.raises(ValueError, match=f"{path} holds no DataProto"):
        DataProto.load_from_disk(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "nowhere")
