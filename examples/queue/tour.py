"""The queue in five minutes, on one machine, without Ray. Run it from the root of the project:

    python examples/queue/tour.py

It starts a queue of three processes in a temporary directory and leaves nothing behind. Each part prints what it shows.
What it simplifies: producers and consumers are one process here. In a job each is a process of its own, and calls
`tq.init()` (or QueueClient.connect) with TQ_ADDRESS or TQ_DIRECTORY in its environment.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

import transfer_queue as tq
from transfer_queue import GroupSpec, QueueService, SessionClose, SyncQueueClient, TaskSpec


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="tq-tour-") as directory,
        QueueService(Path(directory) / "queue") as service,
    ):
        tq.init({"address": service.address})
        rows_by_key()
        with SyncQueueClient(service.address, "tour") as client:
            groups_and_leases(client)
            deaths(client, service)
            dead_letters(client)
        print("\n5. doctor: what listens, and who may use it")
        for one in tq.doctor(service.directory).listeners:
            print(f"   {one.process:12} {one.endpoint.partition(' ')[0]} socket, {one.auth}")
        tq.close()


def rows_by_key() -> None:
    """A row has a key, fields (any lengths, any objects) and tags. Whatever is put together appears together."""
    print("1. rows by key: nothing is padded, nothing is pickled")
    keys = ["a", "b", "c"]
    tokens = [np.arange(3), np.arange(5), np.arange(2)]
    tq.kv_batch_put(keys, "demo", {"tokens": tokens, "source": ["web", {"book": 7}, None]}, tags=[{"score": 0.5}] * 3)
    tq.kv_put("b", "demo", tag={"status": "read"})
    got = tq.kv_batch_get(["c", "b"], "demo")
    print(
        f"   lengths of c, b: {[len(row) for row in got['tokens'].unbind()]}; their sources: {got['source'].tolist()}"
    )
    print(f"   tags of b: {tq.kv_list('demo')['demo']['b']}")


def groups_and_leases(client: SyncQueueClient) -> None:
    """Two prompts, two samples of each. A worker leases a prompt, the trainer a group when all of it is there."""
    print("\n2. groups: leased whole, by one holder at a time")
    generate = TaskSpec("generate", stage="prompt", bind="clock", ttl=15.0)
    train = TaskSpec("train", stage="rows", bind="incarnation", fields=["response"])
    client.open_partition("train", tasks=[generate, train], max_groups=4)
    prompts = [GroupSpec(uid, n=2, order=i) for i, uid in enumerate(("p0", "p1"))]
    client.admit("train", prompts, {"prompt": ["6 * 7 = ?", "9 - 4 = ?"]})

    leased = client.lease("train", "generate", groups=1)
    uid = leased.groups[0].uid
    print(f"   a worker holds {uid}; the prompt is {client.get('train', [uid])['prompt'].rows_list()[0]!r}")
    for session in range(2):
        key = f"{uid}_{session}_0"
        row = {"response": [np.arange(4 + session)]}
        client.put("train", [key], row, tags=[{"score": float(session)}], token=leased.token,
                   closes=[SessionClose(uid, session, [key])])  # fmt: skip

    ready = client.watch("train", since=-1)
    print(f"   groups by state: { {state: n for state, n in ready.depth.items() if n} }")
    batch = client.lease("train", "train", groups=1)
    rows = [row.key for row in batch.groups[0].rows]
    print(f"   the trainer reads {rows} and acks")
    client.get("train", rows)
    client.ack("train", batch.token, [uid], step=1)
    client.commit_step("train", 1)  # a checkpoint of step 1 is on disk: the rows may go


def deaths(client: SyncQueueClient, service: QueueService) -> None:
    """All three processes are killed. Calls wait a moment and go on; nothing that was acknowledged is lost."""
    print("\n3. kill -9 of every process of the queue")
    client.put("demo", ["kept"], {"x": np.arange(3)[None]})
    for pid in service.pids().values():
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    kept = client.get("demo", ["kept"])["x"].values.tolist()
    print(f"   read again after {time.monotonic() - began:.1f} s: {kept}; restarts: {sum(service.restarts().values())}")


def dead_letters(client: SyncQueueClient) -> None:
    """A prompt that is given back as poison three times is dead, with its reason, until somebody replays it."""
    print("\n4. dead letters")
    for _ in range(3):
        leased = client.lease("train", "generate", uids=["p1"])
        client.nack("train", leased.token, ["p1"], reason="the tool crashed", poison=True)
    print(f"   dead: {client.stats().partitions['train'].dead}")
    client.replay("train", ["p1"])
    print(f"   replayed: {client.lease('train', 'generate', groups=1).groups[0].uid} is leased again")


if __name__ == "__main__":
    main()
