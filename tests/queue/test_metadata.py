"""References to rows: KVBatchMeta by key, BatchMeta by serial."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from transfer_queue import BatchMeta, KVBatchMeta
from transfer_queue.metadata import extract_field_schema

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")


def kv(**changes: Any) -> KVBatchMeta:
    return KVBatchMeta(["a", "b", "c"], [{"i": i} for i in range(3)], "p", ["x"], **changes)


def data(rows: int) -> Any:
    jagged = torch.nested.as_nested_tensor([torch.zeros(i + 1, 2) for i in range(rows)], layout=torch.jagged)
    fields = {"j": jagged, "d": torch.zeros(rows, 4), "o": tensordict.NonTensorStack(*map(str, range(rows)))}
    return tensordict.TensorDict(fields, batch_size=[rows])


def batch(rows: int = 5, partition: str = "p") -> BatchMeta:
    tags = [{"i": i} for i in range(rows)]
    return BatchMeta(range(10, 10 + rows), [partition] * rows, custom_meta=tags).add_fields(data(rows))


# --- KVBatchMeta -----------------------------------------------------------------------------------------------------


def test_a_kv_batch_keeps_its_tags_apart_from_all_others():
    shared: dict[str, Any] = {"deep": [1]}
    meta = KVBatchMeta(["a", "b"], [shared] * 2, extra_info={"k": [1]})
    meta.tags[0]["deep"].append(2)
    assert (meta.tags, shared) == ([{"deep": [1, 2]}, {"deep": [1]}], {"deep": [1]})


def test_a_kv_batch_can_be_cut_joined_selected_and_reordered():
    meta = kv(extra_info={"t": 1})
    assert [piece.keys for piece in meta.chunk(2)] == [["a", "b"], ["c"]]
    assert [piece.size for piece in meta.chunk(5)] == [1, 1, 1, 0, 0]
    assert KVBatchMeta.concat(meta.chunk(5)) == meta
    assert meta.select_keys(["c", "a"]).tags == [{"i": 2}, {"i": 0}]
    meta.reorder([2, 0, 1])
    assert (meta.keys, meta.tags[0], len(meta)) == (["c", "a", "b"], {"i": 2}, 3)


def test_a_kv_batch_of_nothing_has_no_extra_info():
    assert KVBatchMeta.concat([KVBatchMeta(), KVBatchMeta()]).extra_info is None
    assert KVBatchMeta().extra_info == {}


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (lambda: KVBatchMeta(["a"], []), ValueError, "1 keys but 0 tags"),
        (lambda: KVBatchMeta(["a", "a"], [{}, {}]), ValueError, "duplicate keys"),
        (lambda: KVBatchMeta(fields=["x", "x"]), ValueError, "duplicate fields"),
        (lambda: kv().reorder([0, 0, 1]), ValueError, "permutation"),
        (lambda: kv().select_keys(["a", "a"]), ValueError, "duplicate"),
        (lambda: kv().select_keys(["zz"]), RuntimeError, "not in this batch"),
        (lambda: kv().chunk(0), ValueError, "0 pieces"),
        (lambda: KVBatchMeta.concat([kv(), KVBatchMeta(["d"], [{}], "q", ["x"])]), ValueError, "partition"),
        (lambda: KVBatchMeta.concat([kv(), KVBatchMeta(["d"], [{}], "p", ["y"])]), ValueError, "fields"),
        (
            lambda: KVBatchMeta.concat([kv(extra_info={"t": 1}), KVBatchMeta(["d"], [{}], "p", ["x"], {"t": 2})]),
            ValueError,
            "extra_info",
        ),
    ],
)
def test_what_a_kv_batch_cannot_be_is_an_error(wrong, error, match):
    with pytest.raises(error, match=match):
        wrong()


# --- BatchMeta -------------------------------------------------------------------------------------------------------


def test_a_batch_of_nothing_needs_no_arguments():
    for empty in (BatchMeta(), BatchMeta.empty({"k": 1}), BatchMeta.concat([])):
        assert (empty.size, empty.global_indexes, empty.partition_ids, empty.field_names) == (0, [], [], [])
        assert not empty.is_ready
        assert [piece.size for piece in empty.chunk(3)] == [0, 0, 0]


def test_a_batch_knows_its_fields_row_by_row():
    meta = batch(3)
    assert (meta.field_names, meta.is_ready, len(meta)) == (["d", "j", "o"], True, 3)
    assert meta.get_shapes("j") == [(1, 2), (2, 2), (3, 2)]
    assert meta.get_shapes("d") == [(4,)] * 3
    assert meta.get_dtypes("d") == [torch.float32] * 3
    assert meta.field_schema["o"]["is_non_tensor"]
    row = meta.samples[2]
    assert (row.global_index, row.partition_id, row.custom_meta, row.production_status) == (12, "p", {"i": 2}, 1)
    assert list(row.fields["j"]["per_sample_shapes"]) == [(3, 2)]
    assert extract_field_schema(data(3)) == meta.field_schema


def test_rows_of_a_batch_are_selected_with_all_that_belongs_to_them():
    meta = batch()
    picked = meta.select_samples([4, 0])
    assert (picked.global_indexes, picked.custom_meta) == ([14, 10], [{"i": 4}, {"i": 0}])
    assert picked.get_shapes("j") == [(5, 2), (1, 2)]
    assert meta[1:3] == meta.select_samples([1, 2])
    assert meta[-1] == meta.select_samples([4])
    meta.reorder([4, 3, 2, 1, 0])
    assert meta.select_samples([4, 0]).global_indexes == [10, 14]


def test_a_batch_is_cut_and_joined_again():
    meta = batch()
    meta.extra_info = {"k": 1}
    pieces = meta.chunk(3)
    assert [piece.size for piece in pieces] == [2, 2, 1]
    assert BatchMeta.concat(pieces) == meta
    assert BatchMeta.concat(meta.chunk(9)) == meta


def test_fields_of_a_batch_are_selected_and_unknown_ones_ignored():
    assert batch().select_fields(["d", "nothing"]).field_names == ["d"]


def test_rows_of_several_partitions_stand_in_one_batch():
    both = BatchMeta.concat([batch(2, "p"), batch(3, "q")])
    assert both.partition_ids == ["p", "p", "q", "q", "q"]
    mixed = both.select_samples([2, 0, 3, 1])
    assert [part.global_indexes for part in mixed.chunk_by_partition()] == [[10, 11], [10, 11]]
    assert [part.partition_ids[0] for part in mixed.chunk_by_partition()] == ["q", "p"]


def test_a_union_has_the_fields_of_both_and_is_ready_where_both_are():
    one, other = batch().select_fields(["d"]), batch().select_fields(["j"])
    other.production_status = np.array([1, 0, 1, 1, 1], np.int8)
    other.extra_info = {"k": 2}
    other.update_custom_meta([{"n": 1}] * 5)
    joined = one.union(other)
    assert (joined.field_names, joined.extra_info) == (["d", "j"], {"k": 2})
    assert joined.production_status.tolist() == [1, 0, 1, 1, 1]
    assert joined.custom_meta[0] == {"i": 0, "n": 1}
    assert one.custom_meta[0] == {"i": 0}


def test_extra_info_has_its_helpers():
    meta = batch()
    meta.set_extra_info("a", 1)
    meta.update_extra_info({"b": 2})
    assert (meta.get_extra_info("a"), meta.get_extra_info("zz", 7), meta.has_extra_info("b")) == (1, 7, True)
    assert meta.remove_extra_info("a") == 1
    assert meta.get_all_extra_info() == {"b": 2}
    meta.clear_extra_info()
    assert meta.extra_info == {}


def test_a_copy_of_a_batch_shares_nothing_with_it():
    meta = batch()
    other = meta.copy()
    other.custom_meta[0]["i"] = 99
    other.indexes[0] = 0
    assert (meta.custom_meta[0], meta.global_indexes[0]) == ({"i": 0}, 10)


def test_a_piece_of_a_batch_is_pickled_without_the_rest():
    meta = BatchMeta(range(10_000), ["p"] * 10_000)
    piece = meta.chunk(1000)[3]
    assert pickle.loads(pickle.dumps(piece)) == piece  # noqa: S301 (Ray does it)
    assert len(pickle.dumps(piece)) < 2000


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: BatchMeta([1, 2], ["p"]),
        lambda: BatchMeta([1], ["p"], production_status=[1, 1]),
        lambda: BatchMeta([1], ["p"], custom_meta=[]),
        lambda: batch().add_fields(data(3)),
        lambda: batch().update_custom_meta([{}]),
        lambda: batch().select_samples([5]),
        lambda: batch().reorder([0, 0, 1, 2, 3]),
        lambda: batch().chunk(0),
        lambda: batch().union(batch(4)),
        lambda: BatchMeta.concat([batch(), batch().select_fields(["d"])]),
    ],
)
def test_what_a_batch_cannot_be_is_an_error(wrong):
    with pytest.raises(ValueError):
        wrong()
