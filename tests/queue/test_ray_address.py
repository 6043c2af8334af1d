"""Processes of one Ray cluster find the queue by the name of an actor, without an environment variable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")

PROGRAM = """
import os, ray
import transfer_queue as tq
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)

@ray.remote(num_cpus=1)
class Worker:
    def put(self, key):
        assert "TQ_ADDRESS" not in os.environ
        tq.init()
        tq.kv_put(key, "p", tag={"pid": os.getpid() > 0})

    def close(self):
        tq.close()

    def begin(self, directory):
        return dict(tq.init({"directory": directory, "units": 1}).address)["run"]

os.environ.pop("TQ_ADDRESS", None)
whole = tq.init({"units": 1})
os.environ.pop("TQ_ADDRESS")
worker = Worker.remote()
ray.get(worker.put.remote("a"))
ray.get(worker.close.remote())
tq.kv_put("b", "p", tag={})
print(sorted(tq.kv_list("p")["p"]))
tq.close()
print(ray.get(worker.begin.remote(os.environ["QUEUE"])) != whole.address.run)
tq.init()
print(tq.get_client().queue.stats().partitions)
"""


def test_a_worker_finds_the_queue_of_the_driver_and_a_driver_that_of_a_worker(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("TQ_ADDRESS", "RAY_ADDRESS")}
    env |= {"QUEUE": str(tmp_path / "queue"), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=110)
    assert done.stdout.splitlines() == ["['a', 'b']", "True", "{}"], done.stderr[-3000:]
