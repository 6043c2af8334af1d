"""`python -m transfer_queue ...`: what each verb shows of a running queue, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.__main__ import main
from transfer_queue.client import SyncQueueClient
from transfer_queue.net.messages import GroupSpec, TaskSpec
from transfer_queue.operations.terminal import plain, size
from transfer_queue.service.queue_service import QueueService


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli")
    with QueueService(directory / "queue", storage_dir=directory, unit_budget_bytes=64 << 20) as service:
        with SyncQueueClient(service.address, "writer") as client:
            client.put(
                "train", ["a"], {"ids": [np.arange(1000)], "note": ["\x1b[31mred\x1b[0m"]}, tags=[{"score": 0.5}]
            )
            client.open_partition("jobs", tasks=[TaskSpec("generate", "prompt", "clock", 60.0, max_deliver=1)])
            client.admit("jobs", [GroupSpec("u0", 1, 0), GroupSpec("u1", 1, 1)], {"raw_prompt": ["?", "!"]})
            leased = client.lease("jobs", "generate", uids=["u0"])
            client.nack("jobs", leased.token, ["u0"], reason="poison\x07", poison=True)
        yield service


@pytest.fixture
def run(capsys, service):
    """(exit status, what it wrote) of a command line on the queue's directory."""

    def run(*words: str) -> tuple[int, str]:
        status = main([*words, "-q", str(service.directory)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_stat_shows_partitions_units_and_clients(run):
    status, out = run("stat")
    assert status == 0
    assert re.search(r"train +1 +[\d.]+ KiB", out)
    assert re.search(r"unit +state +held", out)
    assert re.search(r"held, on disk: whole segments.*; [\d.]+ KiB of them are live rows", out)
    assert "epoch 1, 1 client\n" in out
    assert out.count("serves") == 2
    assert json.loads(run("stat", "--json")[1])["partitions"]["train"]["rows"] == 1


def test_peek_shows_tags_and_truncated_fields_without_control_signs(run):
    status, out = run("peek", "a", "-w", "30")
    assert status == 0
    assert re.search(r"tag +score = 0.5", out)
    assert re.search(r"field ids +<i8\[n\] +\[ *0 +1 .*\.\.\.\n", out)
    assert "\x1b" not in out
    assert r"\x1b[31mred" in out
    assert run("peek", "nobody")[0] == 2


def test_dead_groups_are_listed_and_replayed(run, service, capsys):
    _, out = run("dead")
    assert re.search(r"jobs +u0 +poison\\x07", out)
    assert "u0" in run("dead", "-p", "jobs")[1]
    assert run("dead", "-p", "train")[1] == "no group ended dead\n"
    assert run("dead", "-p", "nowhere") == (2, "no partition 'nowhere'; there are jobs, train\n")
    assert run("replay", "u0") == (2, "which partition? give it (-p NAME); there are jobs, train\n")
    assert main(["replay", "u0", "-p", "jobs", "-q", str(service.directory)]) == 0
    capsys.readouterr()
    assert run("dead")[1] == "no group ended dead\n"
    assert main(["replay", "u0", "-p", "jobs", "-q", str(service.directory)]) == 2
    assert "not dead" in capsys.readouterr().err


def test_tail_follows_what_becomes_of_groups(service):
    command = [sys.executable, "-m", "transfer_queue", "tail", "-p", "jobs", "-n", "2", "-q", str(service.directory)]
    tail = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with SyncQueueClient(service.address, "worker") as client:
        deadline = time.monotonic() + 20
        while client.stats().clients < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        leased = client.lease("jobs", "generate", uids=["u1"])
        client.nack("jobs", leased.token, ["u1"])
        out, _ = tail.communicate(timeout=20)
    lines = out.splitlines()
    assert lines[0].startswith("2 groups in jobs; what becomes of them follows")
    assert [line.split()[0] for line in lines[1:3]] == ["u0", "u1"]
    assert lines[-1].startswith("u1  pending, attempt 1")


def test_without_a_directory_the_environment_names_the_queue(service, monkeypatch, capsys):
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    assert main(["stat"]) == 2
    assert "set TQ_DIRECTORY" in capsys.readouterr().err
    monkeypatch.setenv("TQ_DIRECTORY", str(service.directory))
    assert main(["stat"]) == 0
    monkeypatch.setenv("TQ_ADDRESS", "{")
    assert main(["stat"]) == 2
    monkeypatch.setenv("TQ_ADDRESS", json.dumps(service.address))
    assert main(["stat"]) == 0


def test_a_queue_that_is_none_is_one_line(tmp_path, capsys):
    assert main(["stat", "-q", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"`serve {tmp_path}` starts one there" in said


def test_a_queue_that_does_not_run_is_told_at_once(tmp_path, capsys):
    QueueService(tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=64 << 20)
    began = time.monotonic()
    for verb in (["stat"], ["peek", "a"], ["tail"]):
        assert main([*verb, "-q", str(tmp_path / "queue")]) == 2
        assert "does not run" in capsys.readouterr().err
    assert time.monotonic() - began < 4


def test_serve_runs_a_queue_and_prints_how_to_connect(tmp_path):
    directory = tmp_path / "queue"
    command = [
        sys.executable, "-m", "transfer_queue", "serve", str(directory), "--storage-dir", str(tmp_path), "--units", "1",
        "--unit-budget", "64M", "--clean", "--metrics", "--polling",
        "--sampler", '{"name": "GRPOGroupNSampler", "n_samples_per_prompt": 2}',
    ]  # fmt: skip
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    printed = [serving.stdout.readline() for _ in range(6)]
    assert f"export TQ_DIRECTORY={directory}" in printed[1]
    assert json.loads(shlex.split(printed[2])[2].removeprefix("TQ_ADDRESS="))["key_file"] == str(directory / "key")
    code = "import transfer_queue as tq; tq.init(); tq.kv_put('a', 'p', tag={'x': 1}); print(tq.kv_list())"
    environment = {k: v for k, v in os.environ.items() if k != "TQ_ADDRESS"} | {"TQ_DIRECTORY": str(directory)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{'p': {'a': {'x': 1}}}\n", done.stderr
    found = re.search(r"metrics +(http://127.0.0.1:\d+/metrics), with the bearer key in (\S+)\n", printed[5])
    assert found is not None
    assert os.stat(found[2]).st_mode & 0o077 == 0
    with open(found[2]) as file:
        ask = urllib.request.Request(found[1], headers={"Authorization": f"Bearer {file.read().strip()}"})
    assert b'tq_partition_rows{partition="p"} 1.0' in urllib.request.urlopen(ask, timeout=10).read()
    arguments = [
        Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for children in Path(f"/proc/{serving.pid}/task").glob("*/children")
        for pid in children.read_text().split()
    ]
    assert sum(b"--polling" in words and any(b"GRPO" in word for word in words) for words in arguments) == 1
    serving.send_signal(signal.SIGINT)
    assert serving.wait(20) == 0
    assert not list(tmp_path.glob("tq-*"))


@pytest.mark.parametrize(
    "words",
    [["serve"], ["serve", "x", "--unit-budget", "much"], ["serve", "x", "--metrics-port", "-1"], ["what"], ["peek"]],
)
def test_a_wrong_command_line_says_how_to_use_it(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert "usage" in capsys.readouterr().err


def test_text_for_a_terminal_holds_no_signs_that_act_on_it():
    assert plain("a\x1b[2Jb\u202ec\x7f\n") == "a\\x1b[2Jb\\u202ec\\x7f\\n"
    assert plain("x" * 200, 10) == "xxxxxxx..."
    assert plain(b"\x00" + bytes(range(97, 110)), 8).startswith("\\x00a")
    assert [size(n) for n in (0, 1023, 1 << 20, 3 << 40)] == ["0 B", "1023 B", "1 MiB", "3.0 TiB"]
