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


QUEUES = """
import asyncio, os, sys, ray
import transfer_queue as tq
from transfer_queue.errors import Invalid
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)

@ray.remote
def run_of_init(conf):
    assert "TQ_ADDRESS" not in os.environ
    try:
        return tq.init(conf).address.run
    except Invalid as error:
        return str(error)
    finally:
        tq.close()

async def main(first, second):
    one, other = (tq.RayQueue(d, network=False, unit_budget_bytes=64 << 20) for d in (first, second))
    address = await one.astart()
    print(await run_of_init.remote(None) == address["run"])
    await other.astart()
    told = await run_of_init.remote(None)
    print(one.run in told and other.run in told and "2 queues" in told, told)
    print(await run_of_init.remote({"directory": second}) == other.run)
    print(await run_of_init.remote({"address": address}) == one.run)
    await one.astop(clean=True)
    print(await run_of_init.remote(None) == other.run)
    await other.astop(clean=True)
    async with tq.RayQueue(first, network=False, unit_budget_bytes=64 << 20) as third:
        print(await run_of_init.remote(None) == third.run)

asyncio.run(main(*sys.argv[1:]))
second = sys.argv[2]
with tq.RayQueue(second, network=False, unit_budget_bytes=64 << 20) as fourth:
    print(ray.get(run_of_init.remote({"directory": second})) == fourth.run)
"""


def test_a_task_finds_the_one_ray_queue_of_its_cluster_and_has_to_say_which_if_there_are_two(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("TQ_ADDRESS", "RAY_ADDRESS")}
    command = [sys.executable, "-c", QUEUES, str(tmp_path / "one"), str(tmp_path / "two")]
    env |= {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=110)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["True"] * 7, done.stdout + done.stderr[-3000:]
