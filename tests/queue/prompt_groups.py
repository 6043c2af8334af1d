"""Prompt groups that are admitted, generated and looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.client import QueueClient
from transfer_queue.net.messages import Group, GroupSpec, SessionClose, TaskSpec

P = "train"
TASKS = [TaskSpec("generate", "prompt"), TaskSpec("train", "rows", "incarnation", fields=["ids"])]


async def admit(client: QueueClient, *orders: int, n: int = 2, least: int = 0) -> None:
    specs = [GroupSpec(f"g{order}", n, order, least, {"index": order}) for order in orders]
    await client.admit(P, specs, {"raw_prompt": [{"text": spec.uid} for spec in specs]})


async def generate(client: QueueClient, order: int, *, version: int = 0, failed: tuple[int, ...] = ()) -> None:
    """Session s ends with s + 1 rows; of fields that differ by session."""
    leased = await client.lease(P, "generate", uids=[f"g{order}"], holder="agent")
    [group] = leased.groups
    for session in range(group.n):
        if session in failed:
            close = SessionClose(group.uid, session, [], failed="broken")
            await client.put(P, [], {}, token=leased.token, closes=[close])
            continue
        keys = [f"{group.uid}_{session}_{index}" for index in range(session + 1)]
        rows = [np.arange(order + session + index, dtype=np.int64) for index in range(len(keys))]
        columns: dict[str, Any] = {"ids": rows, "turns": np.full(len(keys), session)}
        if session:
            columns["extra"] = [{"order": order, "row": index} for index in range(len(keys))]
        tags = [{"score": 0.5 * session, "max_global_steps": version} for _ in keys]
        close = SessionClose(group.uid, session, keys)
        await client.put(P, keys, columns, tags=tags, token=leased.token, closes=[close])


async def live(client: QueueClient) -> dict[str, Group]:
    return {group.uid: group for group in (await client.watch(P, -1)).groups}


async def content(client: QueueClient) -> dict[str, Any]:
    """All that readers see of ready groups, and their prompts."""
    found: dict[str, Any] = {}
    for uid, group in (await live(client)).items():
        if group.state != "ready":
            continue
        rows = {}
        for row in group.rows:
            fields = await client.get(P, [row.key])
            rows[row.key] = row.tag, {name: np.asarray(column[0]).tolist() for name, column in fields.items()}
        prompt = (await client.get(P, [uid], ["raw_prompt"]))["raw_prompt"][0]
        found[uid] = group.n, group.order, group.tag, group.sessions, prompt, rows
    return found
