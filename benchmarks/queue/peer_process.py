"""Runs in the peer's environment, as a script: this repository comes last on the path, so that `transfer_queue` is the
installed one and `benchmarks` is ours."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

sys.path[0] = ""
sys.path.remove("")
sys.path.append(str(Path(__file__).parents[2]))

LOGICAL_CPUS = 16
"""Each of the peer's processes reserves one: with two it would wait for ever."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    import ray

    import transfer_queue

    assert Path(transfer_queue.__file__).is_relative_to(sys.prefix), transfer_queue.__file__
    from benchmarks.queue.all import WORKLOADS
    from benchmarks.queue.drivers import Queue

    ray.init(address="local", num_cpus=LOGICAL_CPUS, include_dashboard=False, logging_level=logging.WARNING)
    began = time.perf_counter()
    transfer_queue.init()
    driver = Queue("peer", init_seconds=time.perf_counter() - began)
    print(json.dumps({"init": driver.init_seconds}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        figures = WORKLOADS[request["workload"]].run(driver, request["quick"], request["seed"])
        print(json.dumps(figures), file=answers, flush=True)
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
