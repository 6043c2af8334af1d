"""The key-value verbs: what programs written for TransferQueue 0.1.11 rely on, line by line.

Each behaviour is checked twice, with the plain verbs and with their async twins in a fresh event loop per call.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import transfer_queue as tq
from transfer_queue import interface
from transfer_queue.clients import tensordicts
from transfer_queue.service.attached import NoQueue

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
TensorDict, NonTensorStack, NonTensorData = tensordict.TensorDict, tensordict.NonTensorStack, tensordict.NonTensorData


class Plain:
    """The verbs, and the partition of this test."""

    put = staticmethod(tq.kv_put)
    batch_put = staticmethod(tq.kv_batch_put)
    get = staticmethod(tq.kv_batch_get)
    get_by_meta = staticmethod(tq.kv_batch_get_by_meta)
    list = staticmethod(tq.kv_list)
    clear = staticmethod(tq.kv_clear)


def _awaited(verb: Callable[..., Any]) -> Callable[..., Any]:
    return staticmethod(lambda *args, **kwargs: asyncio.run(verb(*args, **kwargs)))


class Async:
    put = _awaited(tq.async_kv_put)
    batch_put = _awaited(tq.async_kv_batch_put)
    get = _awaited(tq.async_kv_batch_get)
    get_by_meta = _awaited(tq.async_kv_batch_get_by_meta)
    list = _awaited(tq.async_kv_list)
    clear = _awaited(tq.async_kv_clear)


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kv")
    yield tq.init({"directory": str(directory / "queue"), "storage_dir": str(directory), "units": 1, "metrics": {}})
    tq.close()


@pytest.fixture(params=[Plain, Async])
def kv(request, queue):
    return request.param


@pytest.fixture
def p(queue, request):
    """A partition of its own for each test."""
    return request.node.name


def batch() -> Any:
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


def rows(nested: Any) -> list[Any]:
    return [row.tolist() for row in nested.unbind()]


# --- keys, partitions, upserts ---------------------------------------------------------------------------------------


def test_one_key_in_two_partitions_is_two_rows(kv, p):
    kv.put("a", p, {"x": torch.tensor(1)})
    kv.put("a", f"{p}2", {"x": torch.tensor(2)})
    assert kv.get("a", p)["x"].tolist() == [1]
    assert kv.get("a", f"{p}2")["x"].tolist() == [2]


def test_a_partition_appears_with_its_first_put_and_stays_listed_when_it_is_empty(kv, p):
    assert kv.list(p) == {}
    kv.put("a", p, tag={"i": 0})
    kv.clear("a", p)
    assert kv.list(p) == {p: {}}
    assert kv.list()[p] == {}


def test_a_put_replaces_its_fields_and_keeps_the_others(kv, p):
    assert kv.put("a", p, {"x": torch.arange(2)}).fields == ["x"]
    meta = kv.put("a", p, {"y": "text", "b": 1})
    assert meta.fields == ["b", "x", "y"]
    kv.batch_put(["a"], p, {"x": np.array([[7, 8, 9]])})
    got = kv.get("a", p)
    assert (rows(got["x"]), got["y"]) == ([[7, 8, 9]], ["text"])


def test_a_field_that_not_all_rows_have_is_left_out(kv, p):
    kv.batch_put(["a", "b"], p, {"x": np.arange(2)})
    kv.put("a", p, {"extra": np.arange(3)})
    assert set(kv.get(["a", "b"], p).keys()) == {"x"}
    assert set(kv.get(["a"], p).keys()) == {"x", "extra"}


def test_missing_keys_make_the_result_shorter(kv, p):
    kv.batch_put(["a", "b"], p, {"x": np.arange(2)})
    assert kv.get(["a", "zz", "b"], p)["x"].tolist() == [0, 1]


def test_the_result_has_the_order_of_the_keys_and_a_row_for_each_time_a_key_is_asked_for(kv, p):
    kv.batch_put(["a", "b", "c"], p, {"x": np.arange(3), "s": ["0", "1", "2"]})
    got = kv.get(["c", "a", "b", "a"], p)
    assert got["x"].tolist() == [2, 0, 1, 0]
    assert list(got["s"]) == ["2", "0", "1", "0"]
    assert got.batch_size == torch.Size([4])


def test_unknown_fields_are_left_out_and_only_unknown_ones_give_an_empty_result(kv, p):
    kv.batch_put(["a", "b"], p, {"x": np.arange(2)})
    assert set(kv.get(["a"], p, select_fields=["x", "nothing"]).keys()) == {"x"}
    got = kv.get(["a"], p, select_fields="nothing")
    assert (list(got.keys()), got.batch_size) == ([], torch.Size([0]))


def test_a_batch_is_read_by_its_meta_with_known_fields_only(kv, p):
    meta = kv.batch_put(["a", "b"], p, batch())
    kv.batch_put(["a", "b"], p, {"later": np.arange(2)})
    assert set(kv.get_by_meta(meta).keys()) == set(batch().keys())
    assert set(kv.get_by_meta(meta, ["uid", "score"]).keys()) == {"uid", "score"}
    with pytest.raises(ValueError, match=r"select_fields.*not found"):
        kv.get_by_meta(meta, ["nothing"])


# --- what comes back -------------------------------------------------------------------------------------------------


def test_a_batch_comes_back_as_jagged_tensors_numbers_and_object_stacks(kv, p):
    meta = kv.batch_put(["a", "b"], p, fields=batch(), tags=[{"status": "success"}, {}])
    assert meta.fields == sorted(batch().keys())
    got = kv.get(["b", "a"], p)
    assert got.batch_size == torch.Size([2])
    assert got["responses"].layout is torch.jagged
    assert got["responses"].offsets().diff().tolist() == [1, 3]
    assert got["dense"].is_nested, "equal rows are jagged, too"
    assert rows(got["dense"]) == [[2, 3], [0, 1]]
    assert (got["score"].is_nested, got["score"].tolist()) == (False, [1.0, 0.5])
    assert got["half"].dtype is torch.bfloat16
    assert got["half"].to_padded_tensor(0).sum() == 6
    assert list(got["raw_prompt"]) == [[{"role": "user", "content": "b"}], [{"role": "user", "content": "a"}]]
    assert got.pop("uid").tolist() == ["u1", "u0"]


@pytest.mark.parametrize("lengths", [[3, 5], [5, 3], [4, 4], [0, 0], [0, 2], [7]])
def test_a_jagged_column_is_padded_to_its_longest_row(kv, p, lengths):
    keys = [f"k{i}" for i in range(len(lengths))]
    ragged = [torch.arange(n) for n in lengths]
    fields: dict[str, Any] = {"ids": ragged, "wide": [row.repeat(2, 1).T for row in ragged]}
    kv.batch_put(keys, p, fields)
    got = kv.get(keys, p)
    expected = torch.nested.as_nested_tensor(ragged, layout=torch.jagged).to_padded_tensor(9)
    for padded in (
        got["ids"].to_padded_tensor(9),
        got.to_padded_tensor(9)["ids"],
        got.clone()["ids"].to_padded_tensor(9),
    ):
        assert padded.tolist() == expected.tolist()
    assert (got["ids"] + 1).to_padded_tensor(0).shape == (len(keys), max(lengths))
    assert got["wide"].to_padded_tensor(0).shape == (len(keys), max(lengths), 2)


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 2), (1, 0)])
def test_rows_of_every_shape_come_back(kv, p, shape):
    value = torch.arange(int(np.prod(shape))).reshape(shape)
    kv.put("a", p, {"x": value})
    assert kv.get("a", p)["x"].unbind()[0].tolist() == value.tolist()


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float16, torch.bfloat16]
)
def test_tensors_keep_their_dtype(kv, p, dtype):
    kv.batch_put(["a", "b"], p, TensorDict({"x": torch.ones(2, 3).to(dtype)}, batch_size=[2]))
    assert kv.get(["a", "b"], p)["x"].dtype is dtype


def test_numbers_of_numpy_come_back_as_tensors(kv, p):
    kv.batch_put(["a", "b"], p, {"n": np.array([1, 2], np.int32), "m": np.ones((2, 3), np.float32)})
    got = kv.get(["a", "b"], p)
    assert (got["n"].dtype, got["m"].dtype) == (torch.int32, torch.float32)


def test_none_and_mixed_values_survive_as_objects(kv, p):
    values = [None, {"a": [1, 2.5, "x", None]}]
    kv.batch_put(["a", "b"], p, {"x": values})
    assert kv.get(["a", "b"], p)["x"] == values


MIXED = {
    "other dtypes": [torch.ones(3), torch.arange(4)],
    "bfloat16 and float32": [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)],
    "other dimensions": [torch.ones(3), torch.ones(2, 2)],
    "numbers of other dtypes": [torch.tensor(1.0), torch.tensor(2)],
    "a number and a vector": [torch.tensor(1.0), torch.ones(2)],
    "no element and some": [torch.ones(0), torch.arange(2)],
}


@pytest.mark.parametrize("values", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("at_once", [True, False])
def test_tensors_of_several_dtypes_or_dimensions_come_back_as_a_stack_of_tensors(kv, p, values, at_once):
    if at_once:
        kv.batch_put(["a", "b"], p, {"x": values})
    else:
        for key, value in zip("ab", values, strict=True):
            kv.put(key, p, {"x": value})
    got = kv.get(["b", "a"], p).get("x")
    assert type(got).__name__ == "NonTensorStack"
    for one, value in zip(got.tolist(), reversed(values), strict=True):
        assert isinstance(one, torch.Tensor)
        assert one.dtype == value.dtype
        assert torch.equal(one, value)


def test_one_value_for_all_rows_becomes_one_per_row(kv, p):
    kv.batch_put(["a", "b"], p, TensorDict({"x": NonTensorData("same", batch_size=[2])}, batch_size=[2]))
    assert list(kv.get(["b"], p)["x"]) == ["same"]


def test_rows_ragged_in_several_dimensions_come_back(kv, p):
    ragged = [torch.ones(2, 3), torch.ones(1, 5)]
    kv.batch_put(["a", "b"], p, {"x": torch.nested.as_nested_tensor(ragged)})
    assert [tuple(row.shape) for row in kv.get(["b", "a"], p)["x"].unbind()] == [(1, 5), (2, 3)]


def test_results_are_writable_and_independent(kv, p):
    kv.batch_put(["a"], p, TensorDict({"x": torch.zeros(1, 3), "s": torch.zeros(1)}, batch_size=[1]))
    first = kv.get("a", p)
    first["x"].values().fill_(7)
    first["s"].fill_(7)
    again = kv.get("a", p)
    assert (rows(again["x"]), again["s"].tolist()) == ([[0, 0, 0]], [0])
    assert rows(first["x"]) == [[7, 7, 7]]


def test_what_is_changed_after_a_put_is_not_stored(kv, p):
    x, prompt = torch.zeros(1, 3), [{"role": "user"}]
    kv.batch_put(["a"], p, TensorDict({"x": x, "o": NonTensorStack(prompt)}, batch_size=[1]))
    x.fill_(7)
    prompt[0]["role"] = "changed"
    got = kv.get("a", p)
    assert (rows(got["x"]), list(got["o"])) == ([[0, 0, 0]], [[{"role": "user"}]])


def test_another_dtype_replaces_a_field(kv, p):
    kv.put("a", p, {"x": torch.arange(2)})
    kv.put("a", p, {"x": torch.ones(3)})
    assert kv.get("a", p)["x"].dtype is torch.float32


# --- one row as a dict -----------------------------------------------------------------------------------------------


def test_a_row_may_be_a_dict_of_values(kv, p):
    kv.put("a", p, {"t": torch.arange(3), "n": torch.tensor(5), "s": "text", "list": [1, 2], "none": None})
    got = kv.get("a", p)
    assert (rows(got["t"]), got["n"].tolist()) == ([[0, 1, 2]], [5])
    assert (got["s"], got["list"], got["none"]) == (["text"], [[1, 2]], [None])


def test_a_row_may_be_a_tensordict_of_batch_size_one_only(kv, p):
    kv.put("a", p, TensorDict({"x": torch.ones(1, 2)}, batch_size=[1]))
    with pytest.raises(ValueError, match=r"batch size \[1\]"):
        kv.put("b", p, batch())
    with pytest.raises(ValueError, match="nested"):
        kv.put("b", p, {"x": batch()["responses"]})
    assert list(kv.list(p)[p]) == ["a"]


# --- tags ------------------------------------------------------------------------------------------------------------


def test_tags_merge(kv, p):
    kv.put("a", p, tag={"i": 0, "k": 1})
    assert kv.put("a", p, tag={"j": 5, "k": 2}).tags == [{"i": 0, "k": 2, "j": 5}]
    assert kv.list(p) == {p: {"a": {"i": 0, "k": 2, "j": 5}}}


def test_a_put_without_tags_keeps_and_returns_them(kv, p):
    kv.batch_put(["a", "b"], p, tags=[{"i": 0}, {"i": 1}])
    meta = kv.batch_put(["b", "a", "c"], p, {"x": np.arange(3)})
    assert meta.tags == [{"i": 1}, {"i": 0}, {}]
    assert (meta.extra_info, meta.partition_id, meta.keys) == ({}, p, ["b", "a", "c"])


def test_a_key_without_tag_is_listed_with_an_empty_one(kv, p):
    kv.put("a", p, {"x": 1})
    assert kv.list(p) == {p: {"a": {}}}


def test_keys_are_listed_in_the_order_in_which_they_came(kv, p):
    kv.batch_put(["z", "a"], p, tags=[{}, {}])
    kv.put("m", p, tag={})
    kv.put("z", p, tag={"again": True})
    assert list(kv.list(p)[p]) == ["z", "a", "m"]


def test_tags_that_are_one_dict_are_apart_once_they_are_put(kv, p):
    meta = kv.batch_put(["a", "b"], p, tags=[{}] * 2)
    meta.tags[0]["x"] = 1
    assert meta.tags == [{"x": 1}, {}]


def test_numbers_of_numpy_and_torch_are_plain_in_tags(kv, p):
    tag = {"n": np.int64(3), "f": torch.tensor(0.5), "l": np.arange(2), "s": "x", "none": None, "d": {"k": [1]}}
    assert kv.put("a", p, tag=tag).tags == [{"n": 3, "f": 0.5, "l": [0, 1], "s": "x", "none": None, "d": {"k": [1]}}]


# --- clearing --------------------------------------------------------------------------------------------------------


def test_clearing_unknown_keys_and_partitions_does_nothing(kv, p):
    kv.batch_put(["b", "a"], p, tags=[{"i": 0}, {}])
    kv.clear(["b", "unknown", "b"], p)
    assert kv.list(p) == {p: {"a": {}}}
    kv.clear("x", f"no such {p}")
    assert kv.list(f"no such {p}") == {}


def test_a_cleared_key_may_be_put_again_and_has_nothing_of_before(kv, p):
    kv.put("a", p, {"x": 1, "y": 2}, {"i": 0})
    kv.clear("a", p)
    kv.put("a", p, {"x": 3})
    assert kv.list(p) == {p: {"a": {}}}
    assert list(kv.get("a", p).keys()) == ["x"]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_only_missing_keys_are_an_error(kv, p):
    kv.put("a", p, {"x": 1})
    for keys, partition in ((["zz"], p), (["a"], f"no such {p}")):
        with pytest.raises(ValueError, match="keys or partition were not found!"):
            kv.get(keys, partition)


def test_rows_without_a_common_field_are_not_ready(kv, p):
    kv.put("tagged", p, tag={"status": "running"})
    kv.put("a", p, {"x": 1})
    for keys in (["tagged"], ["tagged", "a"]):
        with pytest.raises(ValueError, match="not ready"):
            kv.get(keys, p)


SHARED: list = [1]
for _ in range(60):
    SHARED = [SHARED, SHARED]

WRONG: dict[str, tuple[Callable[[Any, str], Any], type[Exception], str]] = {
    "no keys to get": (lambda kv, p: kv.get([], p), ValueError, "at least one key"),
    "no keys to clear": (lambda kv, p: kv.clear([], p), ValueError, "at least one key"),
    "no keys to put": (lambda kv, p: kv.batch_put([], p, tags=[]), ValueError, "at least one key"),
    "a key that is no string": (lambda kv, p: kv.batch_put([1], p, tags=[{}]), TypeError, "keys are strings"),
    "a key to get that is none": (lambda kv, p: kv.get([1], p), TypeError, "keys are strings"),
    "neither fields nor tag": (lambda kv, p: kv.put("a", p), ValueError, "fields, tags, or both"),
    "another batch size": (
        lambda kv, p: kv.batch_put(["a", "b"], p, TensorDict({}, batch_size=[3])), ValueError, "2 keys .* size 3",
    ),
    "another length": (lambda kv, p: kv.batch_put(["a", "b"], p, {"x": np.arange(3)}), ValueError, "'x' has 3 rows"),
    "other lengths of tags": (lambda kv, p: kv.batch_put(["a"], p, tags=[{}, {}]), ValueError, "1 keys but 2 tags"),
    "a key twice": (lambda kv, p: kv.batch_put(["a", "a"], p, {"x": np.arange(2)}), ValueError, "given twice: 'a'"),
    "an object that cannot come back": (lambda kv, p: kv.put("a", p, {"x": {1, 2}}), TypeError, "'x'"),
    "an object in a batch": (lambda kv, p: kv.batch_put(["a", "b"], p, {"x": ["", object()]}), TypeError, "row 1"),
    "a tag that is no dict": (lambda kv, p: kv.put("a", p, tag="x"), TypeError, "the tag of 'a'"),
    "a tag that is an object": (lambda kv, p: kv.put("a", p, tag={"x": object()}), ValueError, "tag 'x' of 'a'"),
    "a partition that is none": (lambda kv, _: kv.put("a", None, {"x": 1}), ValueError, "put: partition: .*`str`"),
    "a partition that is a number": (lambda kv, _: kv.put("a", 5, {"x": 1}), ValueError, "put: partition: .*`str`"),
    "a partition to get that is none": (lambda kv, _: kv.get(["a"], 5), ValueError, "lookup: partition: .*`str`"),
    "a partition to list that is a number": (lambda kv, _: kv.list(5), ValueError, "list: partition: .*`str"),
    "a field that is no string": (lambda kv, p: kv.put("a", p, {5: 1}), TypeError, "field names are strings, got 5"),
    "a tag's name that is none": (lambda kv, p: kv.put("a", p, tag={1: 2}), ValueError, "'a' has a name 1"),
    "a tag beyond 64 bits": (lambda kv, p: kv.put("a", p, tag={"x": 2**70}), ValueError, "tag 'x' of 'a' .*64 bits"),
    "a tag of surrogates": (lambda kv, p: kv.put("a", p, tag={"x": "\udc80"}), ValueError, "tag 'x' of 'a' .*valid"),
    "a key of surrogates": (lambda kv, p: kv.put("\udc80", p, tag={}), ValueError, "keys.*surrogates"),
    "a key too long": (lambda kv, p: kv.put("a" * 600, p, tag={}), ValueError, "600 characters"),
    "a key of ours": (lambda kv, p: kv.put("\0a", p, tag={}), ValueError, "NUL"),
    "a partition of ours": (lambda kv, _: kv.put("a", "\0load.1", tag={}), ValueError, "partition .* NUL"),
    "a partition of ours to list": (lambda kv, _: kv.list("\0load.1"), ValueError, "partition .* NUL"),
    "keys of a batch in one string": (lambda kv, p: kv.batch_put("ab", p, {"x": [1, 2]}), TypeError, "list of names"),
    "a tag without end": (lambda kv, p: kv.put("a", p, tag={"x": SHARED}), ValueError, "tag 'x' of 'a' has more than"),
    "no partition": (lambda kv, p: kv.put("a", "", tag={}), ValueError, "partition ''"),
    "a parser that is a function": (
        lambda kv, p: kv.put("a", p, {"x": 1}, data_parser=dict), ValueError, "register_data_parser",
    ),
    "an unknown parser": (lambda kv, p: kv.put("a", p, {"x": 1}, data_parser="zz"), ValueError, "no data parser 'zz'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_errors_that_name_them_and_store_nothing(kv, p, what):
    call, error, match = WRONG[what]
    before = tq.get_client().queue.stats().partitions
    with pytest.raises(error, match=match):
        call(kv, p)
    assert kv.list(p) == {}
    after = tq.get_client().queue.stats().partitions
    assert {name: one.nbytes for name, one in after.items()} == {name: one.nbytes for name, one in before.items()}


# --- where TransferQueue is merely buggy -----------------------------------------------------------------------------


def test_rows_fields_and_tags_become_visible_together(queue, p):
    """A reader that lists all the time never sees a key without its tag, nor one whose fields are not there."""
    seen: list[Any] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for key, tag in tq.kv_list(p).get(p, {}).items():
                if tag != {"status": "success"} or key not in tq.kv_batch_get(key, p)["k"]:
                    seen.append((key, tag))

    reader = threading.Thread(target=look)
    reader.start()
    for i in range(50):
        tq.kv_put(f"k{i}", p, {"k": f"k{i}"}, {"status": "success"})
    done.set()
    reader.join()
    assert seen == []


async def test_no_tag_is_lost_when_many_are_put_at_once(queue, p):
    await asyncio.gather(*(tq.async_kv_put("a", p, tag={f"t{i}": i}) for i in range(100)))
    assert tq.kv_list(p)[p]["a"] == {f"t{i}": i for i in range(100)}


def test_a_put_that_failed_leaves_no_ghost(queue, p):
    tq.kv_put("old", p, {"x": 1}, {"i": 0})
    with pytest.raises(TypeError):
        tq.kv_batch_put(["old", "new"], p, {"x": [2, {3}]}, [{"i": 1}, {}])
    assert tq.kv_list(p) == {p: {"old": {"i": 0}}}
    assert tq.kv_batch_get("old", p)["x"] == [1]


def test_what_was_set_by_torch_set_num_threads_stays(queue, p):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    tq.kv_batch_put(["a", "b"], p, batch())
    tq.kv_batch_get(["a", "b"], p)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


# --- from anywhere ---------------------------------------------------------------------------------------------------


async def test_the_plain_verbs_may_be_called_inside_a_running_loop(queue, p):
    tq.kv_put("a", p, tag={"i": 1})
    assert tq.kv_list(p) == {p: {"a": {"i": 1}}}


def test_a_parser_is_named_and_sees_one_entry_per_row(kv, p):
    tq.register_data_parser("doubled", lambda fields: {"y": fields["x"] * 2, "s": [s + "!" for s in fields["s"]]})
    kv.batch_put(["a", "b"], p, {"x": np.arange(2), "s": ["a", "b"]}, data_parser="doubled")
    got = kv.get(["a", "b"], p)
    assert (got["y"].tolist(), list(got["s"]), "x" in got.keys()) == ([0, 2], ["a!", "b!"], False)  # noqa: SIM118


def test_child_processes_attach_to_the_same_queue_and_may_close_it_for_themselves(queue, p):
    code = f"import transfer_queue as tq; tq.init(); tq.kv_put('spawned', {p!r}, tag={{'i': 1}}); tq.close()"
    subprocess.run([sys.executable, "-c", code], check=True)
    child = multiprocessing.get_context("fork").Process(target=tq.kv_put, args=("forked", p, None, {"i": 2}))
    child.start()
    child.join()
    assert tq.kv_list(p) == {p: {"spawned": {"i": 1}, "forked": {"i": 2}}}


def test_without_a_queue_a_verb_says_what_to_do():
    code = "import transfer_queue as tq; tq.kv_list()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert NoQueue.__name__ in done.stderr
    assert "call transfer_queue.init()" in done.stderr
    assert issubclass(NoQueue, AssertionError), "as programs for TransferQueue expect"


def test_torch_is_not_imported_on_the_loop_of_a_client(kv, p, monkeypatch):
    loops: list[object] = []
    for module in (interface, tensordicts):
        monkeypatch.setattr(module, "load", lambda: loops.append(asyncio._get_running_loop()))
    monkeypatch.setattr(tensordicts, "_loaded", threading.Event())
    kv.put("a", p, {"x": 1})
    kv.get("a", p)
    tq.get_client().get_data(tq.get_client().kv_retrieve_meta("a", p))
    assert loops == [None, None]
