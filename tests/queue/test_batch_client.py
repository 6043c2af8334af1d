"""TransferQueue's low-level client, on a real queue: rows by serial, consuming tasks, streams, checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_queue as tq
from transfer_queue.checkpoint import read_manifest, saving
from transfer_queue.clients import row_verbs
from transfer_queue.errors import Conflict, Corrupt, Invalid
from transfer_queue.net.messages import TaskSpec
from transfer_queue.service import attached as process

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    yield tq.init({"directory": str(directory / "queue"), "storage_dir": str(directory), "units": 1})
    tq.close()


@pytest.fixture
def client(queue):
    return tq.get_client()


@pytest.fixture
def p(queue, request):
    return request.node.name


def data(rows: int, first: int = 0) -> Any:
    values = range(first, first + rows)
    jagged = torch.nested.as_nested_tensor([torch.full((i % 3 + 1,), i) for i in values], layout=torch.jagged)
    return TensorDict(
        {"x": torch.tensor(values), "j": jagged, "s": NonTensorStack(*map(str, values))}, batch_size=[rows]
    )


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_without_keys_are_put_read_written_and_cleared(client, p):
    meta = client.put(data(4), partition_id=p)
    assert (meta.size, meta.is_ready, meta.field_names, meta.partition_ids) == (4, True, ["j", "s", "x"], [p] * 4)
    back = client.get_data(meta.select_samples([3, 1]))
    assert (back["x"].tolist(), list(back["s"])) == ([3, 1], ["3", "1"])
    meta = client.put(TensorDict({"y": back["x"].new_ones(4)}, batch_size=[4]), metadata=meta)
    assert client.get_data(meta.select_fields(["y"]))["y"].tolist() == [1] * 4
    assert client.kv_list(p) == {p: {}}, "they have no keys to list"
    client.clear_samples(meta[:3])
    client.clear_samples(meta[:3])
    assert client.get_meta(["x"], None, p, "force_fetch").global_indexes == meta.global_indexes[3:]


def test_serials_are_never_used_again_so_that_a_stale_batch_finds_nothing(client, p):
    meta = client.put(data(2), partition_id=p)
    tq.kv_batch_put(["a"], p, {"x": np.arange(1)})
    old = client.kv_retrieve_meta(["a"], p)
    client.clear_partition(p)
    tq.kv_batch_put(["a"], f"{p}2", {"x": np.arange(1)})
    tq.kv_batch_put(["a"], p, {"x": np.arange(1)})
    for stale in (meta, old):
        with pytest.raises(tq.StorageKeyNotFoundError, match="cleared since"):
            client.get_data(stale)
        with pytest.raises(KeyError):
            client.put(TensorDict({"x": torch.zeros(len(stale))}, batch_size=[len(stale)]), metadata=stale)
        with pytest.raises(RuntimeError):
            client.kv_retrieve_keys(stale.global_indexes, p)
        client.clear_samples(stale)
    assert tq.kv_batch_get("a", p)["x"].tolist() == [0]


def test_rows_inserted_first_are_filled_later(client, p):
    meta = client.get_meta(["x"], 3, p, mode="insert")
    assert (meta.size, meta.production_status.tolist(), meta.field_names) == (3, [0, 0, 0], [])
    assert not client.check_production_status(["x"], p)
    client.put(data(2), metadata=meta[:2])
    index, status = client.get_production_status(["x", "nothing"], p)
    assert (index.tolist(), status.tolist()) == (meta.global_indexes, [[1, 0], [1, 0], [0, 0]])
    client.put(data(1, 2), metadata=meta[2:])
    assert client.check_production_status(["x", "j", "s"], p)


def test_keys_and_serials_name_the_same_rows(client, p):
    tq.kv_batch_put(["b", "a"], p, {"x": np.arange(2)}, [{"i": 0}, {"i": 1}])
    tq.kv_put("a", p, {"only": 1})
    meta = client.kv_retrieve_meta(["a", "zz", "b"], p)
    assert (meta.size, meta.field_names, meta.custom_meta) == (2, ["x"], [{"i": 1}, {"i": 0}])
    assert client.kv_retrieve_keys(meta.global_indexes, p) == ["a", "b"]
    assert client.kv_retrieve_meta("a", p).field_names == ["only", "x"]
    assert client.kv_retrieve_meta(["a"], f"no {p}").size == 0
    made = client.kv_retrieve_meta(["a", "c"], p, create=True)
    assert client.kv_retrieve_keys(made.global_indexes, p) == ["a", "c"]


def test_custom_meta_are_the_tags(client, p):
    tq.kv_batch_put(["a", "b"], p, tags=[{"i": 0}, {"i": 1}])
    meta = client.kv_retrieve_meta(["b", "a"], p)
    meta.update_custom_meta([{"n": 1}, {"n": torch.tensor(2)}])
    client.set_custom_meta(meta)
    assert tq.kv_list(p) == {p: {"a": {"i": 0, "n": 2}, "b": {"i": 1, "n": 1}}}


def test_rows_of_several_partitions_are_read_and_written_together(client, p):
    both = tq.BatchMeta.concat([client.put(data(2), partition_id=p), client.put(data(2, 2), partition_id=f"{p}2")])
    mixed = both.select_samples([3, 0, 2, 1])
    assert client.get_data(mixed)["x"].tolist() == [3, 0, 2, 1]
    client.put(TensorDict({"y": torch.arange(4)}, batch_size=[4]), metadata=mixed)
    written = both.select_fields([]).add_fields(TensorDict({"y": torch.zeros(4)}, [4]))
    assert client.get_data(written)["y"].tolist() == [1, 3, 2, 0]


def test_all_rows_of_a_partition_are_listed_page_by_page(client, p, monkeypatch):
    monkeypatch.setattr(row_verbs, "PAGE_ROWS", 3)
    meta = client.put(data(7), partition_id=p)
    tq.kv_put("late", p, {"z": 1})
    every = client.get_meta(["x", "z"], None, p, "force_fetch")
    assert every.global_indexes[:7] == meta.global_indexes
    assert (every.field_names, every.production_status.tolist()) == (["x", "z"], [0] * 8)
    _, status = client.get_production_status(["x", "z"], p)
    assert status.tolist() == [[1, 0]] * 7 + [[0, 1]]


def test_an_empty_batch_has_no_data(client):
    assert client.get_data(tq.BatchMeta()).batch_size == torch.Size([0])


other = TensorDict({"q": torch.ones(1)}, batch_size=[1])

WRONG = {
    "no partition": (lambda c, p: c.put(data(1)), "partition_id"),
    "another size": (lambda c, p: c.put(data(2), metadata=c.put(data(1), partition_id=p)), "batch size 2"),
    "no mode": (lambda c, p: c.get_meta(["x"], 1, p, mode="take"), "mode='take'"),
    "no task": (lambda c, p: c.get_meta(["x"], 1, p), "task_name"),
    "no size": (lambda c, p: c.get_meta(["x"], None, p, task_name="t"), "batch_size=None"),
    "more rows than there can be": (lambda c, p: c.get_meta(["x"], 1 << 70, p, "insert"), "batch_size=.* 1 to 1048576"),
    "fields in one string": (lambda c, p: c.get_meta("xy", 1, p, "insert"), "list of names"),
    "a field that is not there": (lambda c, p: c.get_data(c.put(data(1), partition_id=p).add_fields(other)), "'q'"),
    "rows of no partition": (lambda c, p: c.get_meta(["x"], 1, f"no {p}", "force_fetch"), "no partition"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_runtime_errors_that_say_what_is_wrong(client, p, what):
    call, match = WRONG[what]
    with pytest.raises(TypeError if "list of names" in match else RuntimeError, match=match):
        call(client, p)


async def test_the_async_verbs_work_from_any_loop(client, p):
    meta = await client.async_put(data=data(2), partition_id=p)
    threads = [asyncio.to_thread(asyncio.run, client.async_get_data(meta)) for _ in range(4)]
    assert [one["x"].tolist() for one in await asyncio.gather(*threads)] == [[0, 1]] * 4


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_a_task_consumes_each_row_once_and_may_begin_again(client, p):
    client.put(data(4), partition_id=p)
    first = client.get_meta(["x", "j"], 3, p, task_name="t")
    assert (first.is_ready, first.field_names) == (True, ["j", "x"])
    index, status = client.get_consumption_status("t", p)
    assert (index[:3].tolist(), status.tolist()) == (first.global_indexes, [1, 1, 1, 0])
    assert not client.check_consumption_status("t", p)
    client.get_meta(["x"], 1, p, task_name="t")
    assert client.check_consumption_status("t", p)
    assert client.reset_consumption(p, "t")
    assert client.get_meta(["x"], 3, p, task_name="t").global_indexes == first.global_indexes


def test_an_unknown_partition_has_no_status(client, p):
    assert client.get_consumption_status("t", p) == (None, None)
    assert client.get_production_status(["x"], p) == (None, None)
    assert (client.check_consumption_status("t", p), client.check_production_status(["x"], p)) == (False, False)
    assert client.reset_consumption(p) is False
    client.clear_partition(p)
    assert p not in client.get_partition_list()


def test_a_fetch_waits_for_the_put_that_completes_it_and_holds_nobody_up(client, p):
    """TransferQueue's controller sleeps meanwhile: a put took 4.7 s, and the fetch failed."""
    found: list[Any] = []
    fetch = threading.Thread(
        target=lambda: found.append((client.get_meta(["x"], 4, p, task_name="t"), time.monotonic()))
    )
    fetch.start()
    for first in (0, 2):
        client.put(data(2, first), partition_id=p)
        put = time.monotonic()
    fetch.join(10)
    meta, woken = found[0]
    assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
    assert woken - put < 1.0


def test_a_fetch_that_waits_in_vain_ends_at_its_deadline(client, p):
    client.put(data(1), partition_id=p)
    with pytest.raises(TimeoutError, match="waited 0.2 s for 2 rows"):
        client.get_meta(["x"], 2, p, task_name="t", wait=0.2)


# --- streams ---------------------------------------------------------------------------------------------------------


def dataset(p: str, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "config": None, "batch_size": 4, "micro_batch_size": 3, "data_fields": ["x", "j", "s"], "partition_id": p,
        "task_name": "loader", "dp_rank": 0, "should_check_consumption_status": True,
    }  # fmt: skip
    return tq.StreamingDataset(**options | changes)


def test_a_stream_yields_micro_batches_until_all_rows_are_consumed(client, p):
    client.put(data(8), partition_id=p)
    stream = dataset(p)
    loader = tq.StreamingDataLoader(stream)
    seen = [(td["x"].tolist(), [row.tolist() for row in td["j"].unbind()], meta.size) for td, meta in loader]
    assert [x for x, _, _ in seen] == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert seen[1] == ([3], [[3]], 1)
    assert len(loader.get_buffer()) == 2
    loader.reset()
    assert [td["x"].tolist() for td, _ in loader] == [[0, 1, 2], [3], [4, 5, 6], [7]], "from memory"
    client.put(data(4, 20), partition_id=f"{p}2")
    loader.step(f"{p}2")
    assert [list(td["s"]) for td, _ in loader] == [["20", "21", "22"], ["23"]]


def test_a_stream_waits_for_rows_that_come_later(client, p):
    stream = dataset(p, should_check_consumption_status=False)
    put = threading.Timer(0.2, lambda: client.put(data(4), partition_id=p))
    put.start()
    assert next(iter(stream))[0]["x"].tolist() == [0, 1, 2]
    put.join()


def test_the_workers_of_a_loader_share_the_rows(queue, client, p):
    client.put(data(16), partition_id=p)
    stream = dataset(p, config=queue, micro_batch_size=4)
    loader = tq.StreamingDataLoader(stream, num_workers=2, multiprocessing_context="fork")
    assert sorted(x for td, _ in loader for x in td["x"].tolist()) == list(range(16))


def test_a_stream_takes_functions_for_its_steps(client, p):
    client.put(data(4), partition_id=p)
    calls: list[Any] = []

    def fetch(*arguments: Any) -> Any:
        calls.append(arguments[1:])
        meta = arguments[0].get_meta(["x"], 4, p, task_name="loader", wait=5.0, drained=True)
        return (arguments[0].get_data(meta), meta) if meta.size else (None, meta)

    stream = dataset(p, fetch_batch_fn=fetch, process_batch_fn=lambda td, meta, size: iter([(td, meta)]))
    assert [td["x"].tolist() for td, _ in stream] == [[0, 1, 2, 3]]
    assert calls == [(["x", "j", "s"], 4, p, "loader", {"dp_rank": 0}, index) for index in (0, 1)]


def test_a_stream_of_no_size_is_an_error(queue, p):
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        dataset(p, micro_batch_size=0)
    with pytest.raises(TypeError, match="StreamingDataset"):
        tq.StreamingDataLoader([1])  # pyright: ignore


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(client, p):
    """Two partitions: rows with and without keys, fields that not all have, one consumed."""
    tq.kv_batch_put([f"k{i}" for i in range(5)], p, data(5), [{"i": i} for i in range(5)])
    tq.kv_put("k1", p, {"only": {"a": [1]}})
    client.put(data(3, 10), partition_id=f"{p}2")
    client.get_meta(["x"], 2, p, task_name="t")
    return p


def state(client: Any, p: str) -> Any:
    return (
        tq.kv_list(p),
        tq.kv_batch_get([f"k{i}" for i in range(5)], p)["j"].values().tolist(),
        list(tq.kv_batch_get("k1", p)["only"]),
        client.get_consumption_status("t", p)[1].tolist(),
        client.get_data(client.get_meta(["s"], None, f"{p}2", "force_fetch"))["s"],
    )


def test_a_checkpoint_brings_everything_back_in_place_of_what_is_there(client, filled, tmp_path):
    before = state(client, filled)
    tq.save_checkpoint(tmp_path / "c", metadata={"global_steps": 7})
    assert read_manifest(tmp_path / "c").metadata == {"global_steps": 7}
    stale = client.kv_retrieve_meta(["k0"], filled)
    tq.kv_clear(["k0", "k1"], filled)
    tq.kv_put("other", filled, {"x": 1})
    client.clear_partition(f"{filled}2")
    tq.load_checkpoint(tmp_path / "c")
    assert state(client, filled) == before
    assert client.get_meta(["x"], 3, filled, task_name="t").size == 3
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(stale)


def test_large_rows_make_small_pages(client, filled, tmp_path, monkeypatch):
    before = state(client, filled)
    monkeypatch.setattr(saving, "BYTES", 100)
    tq.save_checkpoint(tmp_path / "c")
    entry = next(one for one in read_manifest(tmp_path / "c").partitions if one.name == filled)
    assert (len(entry.pages) > 1, entry.rows) == (True, 5)
    client.clear_partition(filled)
    tq.load_checkpoint(tmp_path / "c")
    assert state(client, filled) == before


def test_a_checkpoint_without_storage_has_keys_tags_and_consumption_only(client, filled, tmp_path):
    listed = tq.kv_list(filled)
    asyncio.run(tq.async_save_checkpoint(tmp_path / "c", include_storage=False))
    tq.kv_clear(["k0"], filled)
    asyncio.run(tq.async_load_checkpoint(tmp_path / "c"))
    assert tq.kv_list(filled) == listed
    assert client.get_consumption_status("t", filled)[1].tolist() == [1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="not ready"):
        tq.kv_batch_get("k0", filled)


def test_a_checkpoint_replaces_the_one_before_and_nothing_else(client, filled, tmp_path):
    for step in (1, 2):
        tq.save_checkpoint(tmp_path / "c", metadata={"step": step})
    assert read_manifest(tmp_path / "c").metadata == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(Invalid, match="no checkpoint of a queue"):
        tq.save_checkpoint(tmp_path / "mine")
    with pytest.raises(Invalid, match="JSON"):
        tq.save_checkpoint(tmp_path / "d", metadata={"x": object()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "mine"]


MIXED = {
    "dtypes": [torch.ones(2).bfloat16(), torch.ones(2), torch.ones(3).bfloat16()],
    "kinds": [torch.ones(2).bfloat16(), "text", None],
    "shapes": [torch.ones(2).bfloat16(), torch.ones(2, 2).bfloat16(), torch.tensor(1.0).bfloat16()],
}


@pytest.mark.parametrize("values", MIXED.values(), ids=MIXED)
def test_rows_of_one_field_in_several_forms_are_saved_as_they_were_put(client, p, tmp_path, values):
    keys = [f"k{i}" for i in range(len(values))]
    for key, value in zip(keys, values, strict=True):
        tq.kv_put(key, p, {"x": value})
    tq.save_checkpoint(tmp_path / "c")
    client.clear_partition(p)
    tq.load_checkpoint(tmp_path / "c")
    got = tq.kv_batch_get(keys, p)["x"]
    for value, back in zip(values, got, strict=True):
        assert type(back) is type(value)
        assert not isinstance(value, torch.Tensor) or (back.dtype is value.dtype and torch.equal(back, value))


def test_a_place_that_cannot_be_a_checkpoint_is_named(client, tmp_path):
    (tmp_path / "file").write_text("x")
    for verb in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(Invalid, match=r"/file is (a file|no checkpoint of a queue: it is no directory); name"):
            verb(tmp_path / "file")
    with pytest.raises(Invalid, match=r"directory /proc/x cannot be made \(.*\); name another"):
        tq.save_checkpoint("/proc/x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: flip(c / "manifest.json", 40),
        lambda c: flip(max(c.glob("*.rows")), 3),
        lambda c: flip(max(c.glob("*.rows")), -1),
        lambda c: max(c.glob("*.rows")).unlink(),
        lambda c: os.truncate(max(c.glob("*.rows")), 100),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(client, filled, tmp_path, damage):
    before = state(client, filled)
    tq.save_checkpoint(tmp_path / "c")
    damage(tmp_path / "c")
    names = set(client.queue.stats().partitions)
    with pytest.raises(Corrupt, match=r"take another checkpoint|manifest.json"):
        tq.load_checkpoint(tmp_path / "c")
    assert state(client, filled) == before
    assert set(client.queue.stats().partitions) == names


def test_no_checkpoint_is_an_error(queue, tmp_path):
    with pytest.raises(Invalid, match=r"manifest.json is missing"):
        tq.load_checkpoint(tmp_path)


def test_a_load_over_prompt_groups_is_refused_and_leaves_nothing(client, filled, tmp_path):
    tq.save_checkpoint(tmp_path / "c")
    client.queue.open_partition(f"{filled}2", tasks=[TaskSpec("train", "rows")])
    tq.kv_clear(["k0"], filled)
    with pytest.raises(Conflict, match="has tasks or groups"):
        tq.load_checkpoint(tmp_path / "c")
    assert "k0" not in tq.kv_list(filled)[filled]
    assert not [name for name in client.queue.stats().partitions if name.startswith("\0")]


# --- a restart -------------------------------------------------------------------------------------------------------


def test_a_fetch_that_waits_outlives_the_controller(client, p):
    client.put(data(2), partition_id=p)
    client.get_meta(["x"], 1, p, task_name="t")
    found: list[Any] = []
    fetch = threading.Thread(target=lambda: found.append(client.get_meta(["x"], 3, p, task_name="t")))
    fetch.start()
    service = process._process.service
    assert service is not None
    os.kill(service.pids()["controller"], signal.SIGKILL)
    client.put(data(2, 2), partition_id=p)
    fetch.join(30)
    assert client.get_data(found[0])["x"].tolist() == [1, 2, 3]


def test_the_address_is_all_that_a_client_needs(queue):
    client = tq.TransferQueueClient("mine", json.loads(os.environ["TQ_ADDRESS"]))
    client.initialize_storage_manager("SimpleStorage", {})
    client.put(data(1), partition_id="mine")
    client.close()
    with pytest.raises(Invalid, match="controller_info"):
        tq.TransferQueueClient("mine", None)
