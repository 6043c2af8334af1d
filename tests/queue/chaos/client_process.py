"""A client in a process of its own that can be killed: `python -m tests.queue.chaos.client_process ROLE ADDRESS LOG`.

What it tries and what was acknowledged stands in LOG, one JSON value a line, each on the disk before the next step; a
successor goes on from there. Roles: writer (plain rows), generator, trainer; all but the generator end by themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.errors import Conflict, DeadlineExceeded, Fenced, NotFound
from transfer_queue.keys import row_key
from transfer_queue.net.messages import Leased, SessionClose, TaskSpec

GROUPS, SESSIONS, ROWS = 12, 2, 120

TASKS = [TaskSpec("generate", "prompt", "clock", 5.0, max_deliver=99), TaskSpec("train", "rows", "incarnation")]


class Log:
    """Lines on the disk. The last one may be torn, by a death."""

    def __init__(self, path: Path) -> None:
        self.entries = read_log(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._fd, b"\n")

    def write(self, *entry: Any) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")
        os.fsync(self._fd)
        self.entries.append(list(entry))


def read_log(path: Path) -> list[list[Any]]:
    entries = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def digest(*arrays: np.ndarray) -> str:
    return hashlib.blake2b(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays), digest_size=12).hexdigest()


def value_of(rng: random.Random) -> np.ndarray:
    return np.frombuffer(rng.randbytes(rng.choice([50, 3000, 90_000])), np.uint8)


def writer(client: SyncQueueClient, log: Log) -> None:
    rng = random.Random(len(log.entries))
    done = {entry[1] for entry in log.entries if entry[0] == "ok"}
    for i in range(ROWS):
        key = f"k{i}"
        if key in done:
            continue
        value = value_of(rng)
        log.write("try", key, digest(value))
        client.put("plain", [key], {"v": [value]}, tags=[{"digest": digest(value)}])
        log.write("ok", key, digest(value))
        if i % 4 == 3:
            log.write("try_clear", f"k{i - 1}")
            client.clear("plain", [f"k{i - 1}"])
            log.write("cleared", f"k{i - 1}")
        if i % 5 == 4:
            got = client.get("plain", [key])
            assert digest(got["v"].rows_list()[0]) == digest(value), f"{key} has other bytes"


def generator(client: SyncQueueClient, log: Log) -> None:
    rng = random.Random(len(log.entries))
    while True:
        try:
            leased = client.lease("train", "generate", groups=1, wait=1.0)
        except (DeadlineExceeded, NotFound):
            continue
        try:
            generate(client, log, leased, rng)
        except (Fenced, Conflict) as error:
            log.write("refused", str(error))


def generate(client: SyncQueueClient, log: Log, leased: Leased, rng: random.Random) -> None:
    for group in leased.groups:
        prompt = client.get("train", [group.uid], ["raw_prompt"])["raw_prompt"].rows_list()
        assert prompt == [f"what is {group.uid}?"], f"{group.uid} has prompt {prompt}"
        for session in sorted(set(range(group.n)) - set(group.sessions)):
            client.renew("train", leased.token)
            value = value_of(rng)
            key = row_key(group.uid, session)
            log.write("try", key, digest(value))
            close = SessionClose(group.uid, session, [key])
            client.put("train", [key], {"x": [value]}, token=leased.token, closes=[close])
            log.write("ok", key, digest(value))


def trainer(client: SyncQueueClient, log: Log) -> None:
    step = max((entry[1] for entry in log.entries if entry[0] == "checkpoint"), default=0)
    log.write("restored", step)
    client.open_trainer("train", step)
    done = final_groups(log.entries)
    while len(done) < GROUPS:
        leased = client.lease("train", "train", groups=2, wait=60.0)
        step += 1
        uids = [group.uid for group in leased.groups]
        log.write("delivered", uids)
        for group in leased.groups:
            keys = sorted(row.key for row in group.rows)
            assert keys == [row_key(group.uid, s) for s in range(SESSIONS)], f"{group.uid} came with {keys}"
            for key, value in zip(keys, client.get("train", keys)["x"].rows_list(), strict=True):
                log.write("saw", key, digest(value))
        client.ack("train", leased.token, uids, step=step)
        log.write("ack", step, uids)
        if step % 2 == 0 or len(done) + len(uids) >= GROUPS - 2:
            log.write("checkpoint", step)
            client.commit_step("train", step)
            done = final_groups(log.entries)


def final_groups(entries: list[list[Any]]) -> list[str]:
    """Those trained in a step that a checkpoint has passed; each entry counts."""
    final: list[str] = []
    acked: dict[int, list[str]] = {}
    for kind, *values in entries:
        if kind == "restored":
            acked.clear()
        elif kind == "ack":
            acked[values[0]] = values[1]
        elif kind == "checkpoint":
            for step in sorted(s for s in acked if s <= values[0]):
                final += acked.pop(step)
    return final


ROLES = {"writer": writer, "generator": generator, "trainer": trainer}


def main() -> None:
    role, address, path = sys.argv[1:]
    log = Log(Path(path))
    with SyncQueueClient(json.loads(address), role) as client:
        ROLES[role](client, log)


if __name__ == "__main__":
    main()
