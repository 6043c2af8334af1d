"""docs/transfer_queue_reference.md: its programs run, its tables are complete, the packages it names are enough."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks
from transfer_queue.client import QueueClient, SyncQueueClient
from transfer_queue.controller.account import BOUNDS
from transfer_queue.net import messages as m

PAGE = "transfer_queue_reference.md"
TEXT = (ROOT / "docs" / PAGE).read_text()
FILES = {block.file: block.text for block in blocks(PAGE) if block.file}


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TQ_")}
    return kept | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}


@pytest.fixture
def queue(tmp_path, environment):
    """The directory of a queue that `serve` runs."""
    directory = str(tmp_path / "queue")
    command = [sys.executable, "-m", "transfer_queue", "serve", directory, "--storage-dir", str(tmp_path), "--clean"]
    serving = subprocess.Popen([*command, "--unit-budget", "64M"], env=environment, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    assert serving.stdout.readline()
    yield directory
    serving.send_signal(signal.SIGINT)
    assert serving.wait(20) == 0


def test_the_two_processes_train_what_they_generate(tmp_path, queue, environment):
    programs = {}
    for name in ("worker.py", "trainer.py"):
        (tmp_path / name).write_text(FILES[name])
        programs[name] = subprocess.Popen(
            [sys.executable, str(tmp_path / name)], env=environment | {"TQ_DIRECTORY": queue},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    said = {name: program.communicate(timeout=60) for name, program in programs.items()}
    assert said["worker.py"] == ("", "")
    assert said["trainer.py"] == ("1 p0 [9, 10] [0.0, 1.0]\n2 p1 [9, 10] [0.0, 1.0]\n", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_for_a_cluster_runs(tmp_path, environment):
    (tmp_path / "cluster.py").write_text(FILES["cluster.py"])
    del environment["TMPDIR"]  # Ray's sockets need a short path
    done = subprocess.run(
        [sys.executable, str(tmp_path / "cluster.py"), str(tmp_path / "queue")],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.stdout == "{'train': {'a': {'score': 1.0}}}\n", done.stderr


@pytest.mark.parametrize(
    "struct",
    [
        m.TaskSpec,
        m.GroupSpec,
        m.SessionClose,
        m.Leased,
        m.Group,
        m.Changes,
        m.QueueStats,
        m.UnitStats,
        m.PartitionStats,
    ],
)
def test_every_field_of_what_callers_give_and_get_is_explained(struct):
    lines = [line for line in TEXT.splitlines() if not line.startswith(("    ", "```"))]
    missing = [name for name in struct.__struct_fields__ if not any(f"`{name}`" in line for line in lines)]
    assert missing == []


def test_the_table_of_verbs_has_all_of_a_blocking_client_and_their_defaults():
    table = TEXT.partition("## Verbs of a client")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"`(\w+)\(([^`]*)\)`", table))
    here = {name for name, verb in vars(SyncQueueClient).items() if inspect.isfunction(verb) and name[0] != "_"}
    assert here - {"close", "start", "stop"} <= set(listed)
    for name in ("admit", "lease", "watch"):
        assert inspect.signature(getattr(QueueClient, name)).parameters["wait"].default == 60.0
    defaults = {field.name: field.default for field in m.msgspec.structs.fields(m.TaskSpec)}
    for name in ("ttl", "max_deliver", "bind"):
        assert re.search(rf'^\| `{name}` \| `?"?{defaults[name]}"?`? \|', TEXT, re.MULTILINE), name


def test_the_table_of_metrics_names_each_with_its_labels():
    pytest.importorskip("prometheus_client")
    from transfer_queue.operations.metrics import families

    part = m.PartitionStats({"ready": 1}, 1, 1, 1, {"stale": 1}, 1, {}, {"ready": 1.0})
    asked = {"Lease": m.RequestStats([1] * (len(BOUNDS) + 1), 0.0, {"fenced": 1})}
    stats = m.QueueStats(1, {"p": part}, [m.UnitStats(0, True, 1, 1, 1)], 1, asked)
    served = {}
    for family in families(stats, {"controller": 1}):
        name = family.name + "_total" * (family.type == "counter")
        served[name] = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    table = TEXT.partition("| metric | labels |")[2].partition("\n\n")[0]
    told = {}
    for line in table.splitlines()[2:]:
        names, labels = line.split("|")[1:3]
        told |= dict.fromkeys(re.findall(r"`(tq_\w+)`", names), sorted(filter(None, labels.replace(",", " ").split())))
    assert told == served


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{name}} is not among the packages that the page names", name=name)
sys.meta_path.insert(0, Blocked())
"""

ALONE = """
import importlib.util
import os

import numpy as np
import transfer_queue as tq
from transfer_queue.__main__ import main

try:
    importlib.util.find_spec("omegaconf")
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("nothing is blocked")

with tq.QueueService("queue", storage_dir=".", unit_budget_bytes=64 << 20) as service:
    with tq.SyncQueueClient(service.address, "alone") as client:
        client.put("p", ["a"], {"ids": [np.arange(3)], "note": ["x"]}, tags=[{"score": 1.0}])
        assert client.get("p", ["a"])["ids"].rows_list()[0].tolist() == [0, 1, 2]
    os.environ["TQ_DIRECTORY"] = "queue"
    assert tq.kv_list("p") == {"p": {"a": {"score": 1.0}}}
    assert main(["stat", "-q", "queue"]) == 0
    assert tq.doctor("queue").listeners
    tq.close()
"""


def test_the_packages_that_are_named_are_enough_for_the_queue_alone(tmp_path, environment):
    named = {name.lower() for name in re.search(r"^pip install (numpy .*)$", TEXT, re.MULTILINE)[1].split()}  # type: ignore[index]
    packages = importlib.metadata.packages_distributions()
    ours = {"transfer_queue", "agent_loop", "streamrl"}
    blocked = {top for top, owners in packages.items() if not named & {one.lower() for one in owners}} - ours
    assert {"torch", "ray", "tensordict", "omegaconf", "prometheus_client", "psutil"} <= blocked
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=blocked))  # its children have it, too
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment | {"PYTHONPATH": path}, cwd=tmp_path, timeout=100,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
