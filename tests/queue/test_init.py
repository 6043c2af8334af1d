"""init and close: who starts a queue, who finds it, and what a configuration may say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from transfer_queue.__main__ import main
from transfer_queue.errors import DeadlineExceeded, Disconnected, Invalid
from transfer_queue.service import attached
from transfer_queue.service.attached import ADDRESS_VARIABLE, DIRECTORY_VARIABLE
from transfer_queue.service.lifetime import wait_for_exit
from transfer_queue.settings import read_settings

OmegaConf = pytest.importorskip("omegaconf").OmegaConf


@pytest.fixture
def conf(tmp_path):
    """A queue that the test may start; whatever it did is closed."""
    yield {"directory": str(tmp_path / "queue"), "storage_dir": str(tmp_path), "units": 1}
    tq.close()


def child(code: str, **env: str) -> str:
    """What another process prints; it inherits no address but what `env` says."""
    clean = {name: value for name, value in os.environ.items() if name not in (ADDRESS_VARIABLE, DIRECTORY_VARIABLE)}
    code = f"import transfer_queue as tq\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean | env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


# --- who starts and who finds ----------------------------------------------------------------------------------------


def test_the_first_init_starts_a_queue_and_returns_the_whole_configuration(conf):
    whole: Any = tq.init(conf | {"controller": {"sampler": tq.SequentialSampler}})
    assert whole.address.run
    assert whole["units"] == 1
    assert whole.controller.sampler.name == "SequentialSampler"
    assert tq.get_metrics_endpoint() is None


def test_a_second_init_attaches_and_returns_its_configuration_with_the_address(conf, caplog):
    address = tq.init(conf).address
    tq.kv_put("a", "p", tag={"i": 1})
    other = {"units": 7}
    for _ in range(2):
        assert tq.init(other) == other | {"address": address, "metrics": {"endpoint": None}}
    assert tq.init().address == address
    hydras = OmegaConf.create({"queue": conf | {"also": 1}})
    OmegaConf.set_struct(hydras, True)
    assert tq.init(hydras.queue).address == address
    (warning,) = [record.message for record in caplog.records if "no effect" in record.message]
    assert warning.endswith("no effect: units=7 (it has 1)")
    with pytest.raises(Invalid, match="takes a dict"):
        tq.init("foo")  # pyright: ignore[reportArgumentType]
    assert tq.kv_list("p") == {"p": {"a": {"i": 1}}}


def test_another_process_finds_the_queue_by_environment_directory_or_address(conf):
    tq.init(conf)
    tq.kv_put("a", "p", tag={"i": 1})
    code = "tq.init({conf}); print(tq.kv_list('p')); tq.close()"
    expected = str({"p": {"a": {"i": 1}}})
    address = os.environ[ADDRESS_VARIABLE]
    assert child(code.format(conf="None"), **{ADDRESS_VARIABLE: address}) == expected
    assert child("print(tq.kv_list('p'))", **{DIRECTORY_VARIABLE: conf["directory"]}) == expected, "without init"
    assert child(code.format(conf={"address": json.loads(address)})) == expected
    assert child(code.format(conf={"directory": conf["directory"]})) == expected
    assert tq.kv_list("p") == {"p": {"a": {"i": 1}}}, "their close() ended nothing but themselves"


def test_a_client_is_connected_by_what_one_has_of_a_queue(conf, monkeypatch):
    address = tq.init(conf).address
    tq.kv_put("a", "p", tag={"i": 1})
    for queue in (address, dict(address), conf["directory"], Path(conf["directory"]), None):
        with tq.SyncQueueClient(queue) as client:
            assert client.list("p") == {"p": {"a": {"i": 1}}}
    monkeypatch.delenv(ADDRESS_VARIABLE)
    monkeypatch.setenv(DIRECTORY_VARIABLE, conf["directory"])
    with tq.SyncQueueClient() as one, tq.SyncQueueClient() as other:
        assert one.name != other.name
    code = f"print(tq.init().address.run, tq.init({{'directory': {conf['directory']!r}}}).address.run)"
    assert child(code, **{DIRECTORY_VARIABLE: conf["directory"]}) == f"{address.run} {address.run}"


@pytest.mark.parametrize(
    ("queue", "error", "match"),
    [
        ({"run": "x"}, Invalid, "address lacks key_file, socket; give the whole address"),
        ("/nowhere", Disconnected, "no queue in /nowhere: its run.json is missing"),
        (7, Invalid, "its address .a dict. or its directory, got int"),
        (None, Invalid, "which queue.*TQ_DIRECTORY or TQ_ADDRESS"),
    ],
)
def test_a_client_of_what_names_no_queue_is_told_what_does(queue, error, match, monkeypatch):
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    with pytest.raises(error, match=match):
        tq.SyncQueueClient(queue, "c")


def test_several_processes_that_begin_at_once_share_one_queue(conf, tmp_path):
    code = (
        "import transfer_queue as tq, sys\n"
        f"tq.init({conf})\n"
        "tq.kv_put(sys.argv[1], 'p', tag={})\n"
        "print('put', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(len(tq.kv_list('p')['p']), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (ADDRESS_VARIABLE, DIRECTORY_VARIABLE)}
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"k{i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean
        )
        for i in range(4)
    ]

    def all_say() -> list[str]:
        return [process.stdout.readline().strip() for process in crowd if process.stdout is not None]

    assert all_say() == ["put"] * 4
    for process in crowd:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert all_say() == ["4"] * 4
    for process in crowd:
        process.communicate("\n")


def test_close_ends_what_this_process_started_and_init_goes_on_in_its_directory(conf):
    tq.init(conf)
    tq.kv_put("a", "p", {"x": [1, 2]}, {"i": 1})
    tq.close()
    tq.close()
    assert ADDRESS_VARIABLE not in os.environ
    tq.init(conf)
    assert tq.kv_list("p") == {"p": {"a": {"i": 1}}}
    assert tq.kv_batch_get("a", "p")["x"] == [[1, 2]]


def test_a_close_that_is_interrupted_ends_all_the_same(conf, monkeypatch):
    tq.init(conf)
    pids, client = list(attached._process.service.pids().values()), tq.get_client()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tq.close()
    client.close()
    assert pids
    assert all(wait_for_exit(pid, 10) for pid in pids)
    tq.init(conf)
    tq.kv_put("a", "p", tag={"i": 1})


def test_without_a_directory_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    whole: Any = tq.init({"storage_dir": str(tmp_path), "units": 1})
    assert Path(whole.address.key_file).exists()
    tq.close()
    assert not Path(whole.address.key_file).exists()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_script_that_was_killed_leaves_nothing_that_clean_does_not_remove(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "t").mkdir()
    code = "import os, signal; tq.init({'storage_dir': %r, 'units': 1}); tq.kv_put('a', 'p', {'x': b'y' * 100_000})"
    with pytest.raises(AssertionError):
        child(code % str(tmp_path) + "; os.kill(os.getpid(), signal.SIGKILL)")
    assert list(tmp_path.rglob("*.seg")) != []
    (found,) = [one for one in tq.doctor(storage_dir=tmp_path).leftovers if one.path.parent == tmp_path]
    assert found.state == "dead"
    assert main(["doctor", "--clean", found.run, "--storage-dir", str(tmp_path)]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_public_names_are_listed():
    assert {"init", "kv_put", "GroupSpec", "TaskSpec", "SessionClose", "SyncQueueClient"} <= set(dir(tq))
    assert tq.SyncQueueClient.lease.__doc__ == tq.QueueClient.lease.__doc__


def test_init_takes_less_than_a_second(conf):
    """Where nothing else is to be done; ten times that is allowed for a machine that is busy."""
    began = time.monotonic()
    tq.init(conf)
    assert time.monotonic() - began < 10


def test_an_address_that_is_none_is_named(conf, monkeypatch):
    monkeypatch.setenv(ADDRESS_VARIABLE, "nonsense")
    with pytest.raises(Invalid, match="TQ_ADDRESS holds 'nonsense'"):
        tq.init(conf)
    monkeypatch.delenv(ADDRESS_VARIABLE)
    monkeypatch.setenv(DIRECTORY_VARIABLE, conf["directory"])
    with pytest.raises(Disconnected, match="run.json is missing"):
        tq.kv_list()


def test_the_sampler_and_polling_of_the_configuration_hold_in_the_controller(conf):
    tq.init(conf | {"controller": {"sampler": tq.GRPOGroupNSampler(2), "polling_mode": True}})
    client = tq.get_client()
    client.get_meta([], 3, "p", mode="insert")
    first = client.get_meta([], 2, "p", task_name="t")
    assert first.size == 2
    assert client.get_meta([], 2, "p", task_name="t").size == 0
    with pytest.raises(Invalid, match="whole groups of 2"):
        client.get_meta([], 1, "p", task_name="t")


def test_metrics_are_served_while_the_queue_lives(conf):
    whole: Any = tq.init(conf | {"metrics": {"enabled": True}})
    tq.kv_put("a", "p", tag={})
    endpoint = tq.get_metrics_endpoint()
    assert endpoint == whole.metrics.endpoint
    key = Path(whole.metrics.key_file).read_text().strip()
    ask = urllib.request.Request(f"http://{endpoint}/metrics", headers={"Authorization": f"Bearer {key}"})
    text = urllib.request.urlopen(ask, timeout=10).read().decode()
    assert 'tq_partition_rows{partition="p"} 1.0' in text
    assert 'tq_process_restarts_total{process="controller"} 0.0' in text
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10)
    assert [(x.endpoint, x.auth) for x in tq.doctor().listeners if x.process == "metrics"] == [
        (f"tcp {endpoint}", "bearer key in metrics.key")
    ]
    tq.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10)


# --- what a configuration may say ------------------------------------------------------------------------------------


VERL = {
    "enable": True,
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "RankAwareSampler", "polling_mode": True, "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": 100000, "num_data_storage_units": 8, "ssd_offload": {"enabled": False}},
    },
}


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_transfer_queues_tree_is_understood_and_the_rest_named_in_one_warning(make, caplog):
    settings = read_settings(make(VERL))
    assert (settings.sampler, settings.polling, settings.metrics) == ({"name": "RankAwareSampler"}, True, False)
    assert settings.units == 8
    assert [record.message for record in caplog.records] == [
        "init: these keys have no effect here: enable, controller.zmq_info, backend.SimpleStorage.total_storage_size, "
        "backend.SimpleStorage.ssd_offload.enabled"
    ]


def test_nothing_is_a_configuration_too(caplog):
    assert read_settings(None) == read_settings({}) == read_settings(OmegaConf.create({}))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"units": 0}, "units=0; expected a positive number"),
        ({"units": "2"}, "units='2'; expected int"),
        ({"units": True}, "units=True; expected int"),
        ({"fsync": 1}, "fsync=1; expected bool"),
        ({"units": None}, "units is None"),
        ({"unitz": 2}, "'unitz'; did you mean 'units'"),
        ({"addres": {"run": "x"}}, "'addres'; did you mean 'address'"),
        ({"metric": {"enabled": True}}, "'metric'; did you mean 'metrics'"),
        ({"unitz": {}}, "'unitz'; did you mean 'units'"),
        ({"controller": {"polling_mod": True}}, "did you mean 'controller.polling_mode'"),
        ({"controller": {"polling_mode": "yes"}}, "controller.polling_mode='yes'"),
        ({"controller": {"sampler": {}}}, "needs a `name`"),
        ({"controller": {"sampler": 3}}, "controller.sampler is a int"),
        ({"backend": {"storage_backend": "Redis"}}, "'Redis'; expected one of SimpleStorage"),
        ({"metrics": {"port": 70000}}, "ports go up to 65535"),
        ({"address": "here"}, "address='here'; expected dict"),
        ({"address": {"run": "x"}}, "address lacks key_file, socket; give the whole address"),
        ({"controller": 5}, "controller=5; expected a dict"),
        ({"backend": {"SimpleStorage": {"num_data_storage_units": "4"}}}, "num_data_storage_units='4'; expected int"),
        ("foo", "takes a dict or a DictConfig"),
        (["units"], "takes a dict or a DictConfig"),
    ],
)
def test_a_value_that_cannot_be_meant_is_an_error_that_names_it(wrong, match):
    with pytest.raises(Invalid, match=match):
        read_settings(wrong)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"unit_budget_bytes": 1 << 20}, "unit_budget_bytes=1048576 is less than one segment, segment_bytes=8388608"),
        ({"sampler": {"name": "__main__:Mine"}}, "'__main__:Mine' is of the program's main module"),
    ],
)
def test_what_could_not_work_starts_no_process(conf, wrong, match):
    with pytest.raises(Invalid, match=match):
        tq.init(conf | wrong)
    assert not (Path(conf["directory"]) / "controller.log").exists()
    assert list(Path(conf["storage_dir"]).glob("tq-*/unit-*")) == []


def test_a_sampler_that_is_none_keeps_the_queue_from_starting(conf):
    with pytest.raises(Invalid, match="no sampler 'Sequential'"):
        tq.init(conf | {"controller": {"sampler": "Sequential"}})
    with pytest.raises(AssertionError):
        tq.get_client()


# --- the end of a queue that others use ------------------------------------------------------------------------------


def test_when_the_owner_closes_others_are_told_at_once_and_find_the_next_queue(conf, tmp_path):
    second = conf | {"directory": str(tmp_path / "second")}
    code = (
        "import transfer_queue as tq, sys, time\n"
        "from transfer_queue.errors import QueueClosed\n"
        "print(tq.kv_list('p'), flush=True)\n"
        "sys.stdin.readline()\n"
        "began = time.monotonic()\n"
        "for _ in range(3):\n"
        "    try: tq.kv_list('p')\n"
        "    except QueueClosed as error: why = str(error)\n"
        "assert time.monotonic() - began < 5\n"
        "print(why, flush=True)\n"
        "sys.stdin.readline()\n"
        "print(tq.kv_list('p'), flush=True)\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in (ADDRESS_VARIABLE, DIRECTORY_VARIABLE)}
    tq.init(conf)
    tq.kv_put("a", "p", tag={"i": 1})
    env |= {ADDRESS_VARIABLE: os.environ[ADDRESS_VARIABLE], DIRECTORY_VARIABLE: second["directory"]}
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline().strip() == "{'p': {'a': {'i': 1}}}"
    tq.close()
    other.stdin.write("\n")
    other.stdin.flush()
    assert "was closed by its owner" in other.stdout.readline()
    tq.init(second)
    tq.kv_put("b", "p", tag={})
    out, _ = other.communicate("\n", timeout=60)
    assert out.strip() == "{'p': {'b': {}}}"


HOLD = """
import sys
from transfer_queue.service.attached import _only_one
with _only_one(sys.argv[1]):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_init_does_not_wait_for_ever_for_a_process_that_is_stopped_while_it_starts_a_queue(conf, monkeypatch):
    monkeypatch.setattr(attached, "INIT_WAIT", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, conf["directory"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=rf"waited 0.2 s for process {holder.pid}.*kill -CONT {holder.pid}"):
            tq.init(conf)
    finally:
        holder.kill()
        holder.communicate()
    monkeypatch.setattr(attached, "INIT_WAIT", 10.0)
    tq.init(conf)  # what had waited in vain holds nothing
    assert tq.kv_list() == {}


@pytest.mark.parametrize("path", ["", "/proc/nope", "/dev/null/x", "a\0b", "x" * 300])
@pytest.mark.parametrize("key", ["directory", "storage_dir", "spill_dir"])
def test_a_path_that_can_be_no_directory_is_named_with_its_remedy(conf, key, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match="give the path|name another|make it, or set") as refused:
        tq.init(conf | {key: path})
    assert repr(path[:80])[1:-1] in str(refused.value) or key in str(refused.value)
    assert not Path("None").exists()
