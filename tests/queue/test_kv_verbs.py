"""The key-value verbs: what programs written for TransferQueue rely on."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

import transfer_queue as tq
from transfer_queue.process import NoQueue

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kv")
    conf = tq.init({"directory": str(directory / "queue"), "storage_dir": str(directory), "units": 1, "metrics": {}})
    assert conf is not None
    yield conf
    tq.close()


@pytest.fixture
def partition(queue, request):
    return request.node.name


def batch() -> TensorDict:
    jagged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    fields = {
        "responses": jagged,
        "dense": torch.arange(4.0).reshape(2, 2),
        "score": torch.tensor([0.5, 1.0]),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "raw_prompt": NonTensorStack([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]),
        "uid": NonTensorStack("u0", "u1"),
    }
    return TensorDict(fields, batch_size=[2])


def test_a_batch_comes_back_as_jagged_tensors_numbers_and_object_stacks(partition):
    meta = tq.kv_batch_put(["a", "b"], partition, fields=batch(), tags=[{"status": "success"}, {}])
    assert meta.fields == sorted(batch().keys())
    got = tq.kv_batch_get(["b", "a"], partition)
    assert got.batch_size == torch.Size([2])
    assert got["responses"].layout is torch.jagged
    assert got["responses"].offsets().diff().tolist() == [1, 3]
    assert [row.tolist() for row in got["dense"].unbind()] == [[2, 3], [0, 1]]
    assert got["dense"].is_nested
    assert got["score"].tolist() == [1.0, 0.5]
    assert got["half"].dtype is torch.bfloat16
    assert got["half"].to_padded_tensor(0).sum() == 6
    assert list(got["raw_prompt"]) == [[{"role": "user", "content": "b"}], [{"role": "user", "content": "a"}]]
    assert got.pop("uid").tolist() == ["u1", "u0"]


def test_returned_tensors_are_writable_copies(partition):
    tq.kv_batch_put(["a"], partition, fields=TensorDict({"x": torch.zeros(1, 3)}, batch_size=[1]))
    tq.kv_batch_get("a", partition)["x"].values().fill_(7)
    assert tq.kv_batch_get("a", partition)["x"].values().tolist() == [0, 0, 0]


def test_a_put_upserts_fields_and_merges_tags(partition):
    tq.kv_put("a", partition, fields={"x": torch.arange(2)}, tag={"i": 0})
    meta = tq.kv_put("a", partition, fields={"y": "text"}, tag={"j": 5})
    assert (meta.tags, meta.fields) == ([{"i": 0, "j": 5}], ["x", "y"])
    assert tq.kv_batch_put(["a"], partition, fields={"x": np.array([[7, 8, 9]])}).tags == [{"i": 0, "j": 5}]
    assert tq.kv_batch_get(["a"], partition)["x"].values().tolist() == [7, 8, 9]


def test_fields_that_not_all_rows_have_and_unknown_ones_are_left_out(partition):
    tq.kv_batch_put(["a", "b"], partition, fields={"x": np.arange(2)})
    tq.kv_put("a", partition, fields={"extra": np.arange(3)})
    assert set(tq.kv_batch_get(["a", "b"], partition).keys()) == {"x"}
    assert set(tq.kv_batch_get(["a"], partition, select_fields=["x", "nothing"]).keys()) == {"x"}
    assert tq.kv_batch_get(["a"], partition, select_fields="nothing").batch_size == torch.Size([0])


def test_missing_keys_are_left_out_and_none_at_all_is_an_error(partition):
    tq.kv_batch_put(["a", "b"], partition, fields={"x": np.arange(2)})
    assert tq.kv_batch_get(["a", "zz", "b", "a"], partition)["x"].tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(["zz"], partition)
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(["a"], "no such partition")
    tq.kv_put("tagged", partition, tag={"status": "running"})
    with pytest.raises(ValueError, match="not ready"):
        tq.kv_batch_get(["tagged"], partition)


def test_a_batch_is_read_by_its_meta(partition):
    meta = tq.kv_batch_put(["a", "b"], partition, fields=batch())
    assert set(tq.kv_batch_get_by_meta(meta, ["uid", "score"]).keys()) == {"uid", "score"}
    with pytest.raises(ValueError, match=r"select_fields.*not found"):
        tq.kv_batch_get_by_meta(meta, ["nothing"])


def test_listing_and_clearing(partition):
    tq.kv_batch_put(["b", "a"], partition, tags=[{"i": 0}, {}])
    assert tq.kv_list(partition) == {partition: {"b": {"i": 0}, "a": {}}}
    assert list(tq.kv_list()[partition]) == ["b", "a"]
    tq.kv_clear(["b", "unknown"], partition)
    assert tq.kv_list(partition) == {partition: {"a": {}}}
    tq.kv_clear("x", "no such partition")
    assert tq.kv_list("no such partition") == {}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda p: tq.kv_batch_get([], p), ValueError),
        (lambda p: tq.kv_clear([], p), ValueError),
        (lambda p: tq.kv_batch_put([1], p, tags=[{}]), TypeError),
        (lambda p: tq.kv_put("a", p), ValueError),
        (lambda p: tq.kv_batch_put(["a", "b"], p, fields=TensorDict({}, batch_size=[3])), ValueError),
        (lambda p: tq.kv_batch_put(["a"], p, tags=[{}, {}]), ValueError),
        (lambda p: tq.kv_batch_put(["a", "a"], p, tags=[{}, {}]), ValueError),
        (lambda p: tq.kv_put("a", p, fields=batch()), ValueError),
        (lambda p: tq.kv_put("a", p, fields={"x": batch()["responses"]}), ValueError),
        (lambda p: tq.kv_put("a", p, fields={"x": {1, 2}}), TypeError),
    ],
)
def test_wrong_arguments_are_errors_and_store_nothing(partition, call, error):
    with pytest.raises(error):
        call(partition)
    assert tq.kv_list(partition) == {}


def test_the_async_verbs_work_from_a_fresh_loop_per_call(partition):
    meta = asyncio.run(tq.async_kv_batch_put(["a", "b"], partition, fields=batch(), tags=[{}, {"t": 1}]))
    assert asyncio.run(tq.async_kv_put("a", partition, tag={"status": "running"})).tags == [{"status": "running"}]
    assert asyncio.run(tq.async_kv_batch_get("b", partition, "score"))["score"].tolist() == [1.0]
    assert asyncio.run(tq.async_kv_batch_get_by_meta(meta, "uid"))["uid"] == ["u0", "u1"]
    asyncio.run(tq.async_kv_clear("a", partition))
    assert asyncio.run(tq.async_kv_list(partition)) == {partition: {"b": {"t": 1}}}


async def test_the_plain_verbs_may_be_called_inside_a_running_loop(partition):
    tq.kv_put("a", partition, tag={"i": 1})
    assert tq.kv_list(partition) == {partition: {"a": {"i": 1}}}


def test_rows_ragged_in_several_dimensions_come_back(partition):
    rows = [torch.ones(2, 3), torch.ones(1, 5)]
    tq.kv_batch_put(["a", "b"], partition, fields={"x": torch.nested.as_nested_tensor(rows)})
    got = tq.kv_batch_get(["b", "a"], partition)["x"]
    assert [tuple(row.shape) for row in got.unbind()] == [(1, 5), (2, 3)]


def test_child_processes_attach_to_the_same_queue(partition):
    code = f"import transfer_queue as tq; tq.init(); tq.kv_put('spawned', {partition!r}, tag={{'i': 1}}); tq.close()"
    subprocess.run([sys.executable, "-c", code], check=True)
    child = multiprocessing.get_context("fork").Process(target=tq.kv_put, args=("forked", partition, None, {"i": 2}))
    child.start()
    child.join()
    assert tq.kv_list(partition) == {partition: {"spawned": {"i": 1}, "forked": {"i": 2}}}


def test_without_a_queue_a_verb_says_what_to_do():
    code = "import transfer_queue as tq; tq.kv_list()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert NoQueue.__name__ in done.stderr
    assert "call transfer_queue.init()" in done.stderr


def test_meta_keeps_tags_apart_and_can_be_cut_joined_and_reordered():
    meta = tq.KVBatchMeta(["a", "b", "c"], [{"i": i} for i in range(3)], "p", ["x"])
    assert [piece.keys for piece in meta.chunk(2)] == [["a", "b"], ["c"]]
    assert tq.KVBatchMeta.concat(meta.chunk(5)).keys == ["a", "b", "c"]
    assert meta.select_keys(["c", "a"]).tags == [{"i": 2}, {"i": 0}]
    meta.reorder([2, 0, 1])
    assert (meta.keys, meta.tags[0]) == (["c", "a", "b"], {"i": 2})
    for wrong in (lambda: meta.reorder([0, 0, 1]), lambda: tq.KVBatchMeta(["a", "a"], [{}, {}])):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(RuntimeError, match="not in this batch"):
        meta.select_keys(["zz"])
