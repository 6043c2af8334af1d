"""The routes: history as JSON, and a stream that goes on where a client left it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from streamrl.dashboard.access import Access, names_of
from streamrl.dashboard.app import _Routes, build_app
from streamrl.dashboard.hub import Hub
from streamrl.monitor.metrics_log import read_metrics
from tests.dashboard.scripted import Scripted

KEY = "k" * 43


@pytest.fixture
def run(tmp_path: Path) -> Scripted:
    run = Scripted(tmp_path / "run")
    run.steps(10)
    return run


@pytest.fixture
def client(run: Scripted):
    with TestClient(build_app(Hub(run.path), access()), base_url="http://127.0.0.1") as client:
        yield client


def access() -> Access:
    return Access(KEY, names_of("127.0.0.1"), open_reading=True)


def test_the_columns_of_metrics_are_those_of_the_file(client: TestClient, run: Scripted) -> None:
    shown = client.get("/api/steps", params={"names": "critic/score/mean,lost_s/sync,unknown"}).json()
    lines = list(read_metrics(run.path))
    assert shown["step"] == [line["step"] for line in lines]
    assert shown["lost_s/sync"] == [line["lost_s/sync"] for line in lines]
    assert "unknown" not in shown


def test_the_names_come_with_what_they_are(client: TestClient) -> None:
    names = client.get("/api/names").json()
    assert names["lost_s/sync"]["unit"] == "seconds"
    assert names["overlap/efficiency"]["help"]


def test_the_timeline_of_a_stretch_has_its_steps_and_lanes(client: TestClient, run: Scripted) -> None:
    window = client.get("/api/timeline", params={"from": run.at - 2.0, "to": run.at, "width": 500}).json()
    assert [lane["kind"] for lane in window["lanes"]] == ["trainer", "engine", "worker"]
    assert window["steps"][-1]["step"] == 10


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/api/timeline", {"from": "x"}), ("/api/timeline", {"from": "nan"}), ("/api/timeline", {"from": "inf"}),
        ("/api/timeline", {"from": 5, "to": 4}), ("/api/timeline", {"width": 10**9}), ("/api/timeline", {"width": -1}),
        ("/api/steps", {"points": 10**12}), ("/api/steps", {"names": ",".join("abcdefgh" * 20)}),
        ("/api/sessions", {"from": "1e999"}),
    ],
)  # fmt: skip
def test_a_wrong_question_is_told_what_was_wrong(client: TestClient, path: str, parameters: dict) -> None:
    answer = client.get(path, params=parameters)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_the_sessions_of_a_worker(client: TestClient, run: Scripted) -> None:
    found = client.get("/api/sessions", params={"worker": "agent-0", "from": run.at - 0.3, "to": run.at}).json()
    assert {one["uid"] for one in found} == {"g10"}
    assert client.get("/api/sessions", params={"worker": "nobody"}).json() == []


# --- the stream ---------------------------------------------------------------------------------------------------


async def events(routes: _Routes, known: int | None, count: int) -> list[tuple[str, str, dict]]:
    """The next `count` events: (name, id, data)."""
    found: list[tuple[str, str, dict]] = []
    stream: AsyncIterator[bytes] = routes._events(known)
    async with asyncio.timeout(10):
        async for chunk in stream:
            fields = dict(line.split(": ", 1) for line in chunk.decode().strip().split("\n"))
            if "event" in fields:
                found.append((fields["event"], fields["id"], json.loads(fields["data"])))
            if len(found) == count:
                break
    await stream.aclose()  # type: ignore[attr-defined]
    return found


@pytest.fixture
async def hub(run: Scripted):
    hub = Hub(run.path, wall=lambda: run.at)
    running = asyncio.create_task(hub.run())
    await hub.ready.wait()
    yield hub
    running.cancel()
    await asyncio.wait([running])


async def test_a_new_client_gets_a_snapshot_and_then_what_changes(hub: Hub, run: Scripted) -> None:
    routes = _Routes(hub, access())

    async def go_on() -> None:
        await asyncio.sleep(0.1)
        run.steps(1)

    (first, second), _ = await asyncio.gather(events(routes, None, 2), go_on())
    assert first[0] == "snapshot"
    assert first[2]["steps"]["step"] == list(range(1, 11))
    assert second[0] == "delta"
    assert second[2]["steps"]["step"] == [11]
    assert second[2]["overview"]["step"] == 11


async def test_a_client_that_comes_again_misses_nothing_and_sees_nothing_twice(hub: Hub, run: Scripted) -> None:
    routes = _Routes(hub, access())
    (snapshot,) = await events(routes, None, 1)
    steps, points = list(snapshot[2]["steps"]["step"]), list(snapshot[2]["charts"]["depth"])
    known = snapshot[1]
    for _ in range(6):  # it is away while each of these frames is made
        run.steps(2)
        hub.look()
        run.steps(1)
        hub.look()
        for name, identity, data in await events(routes, hub.frames.number_of(known), 2):
            known = identity
            assert name == "delta"
            steps += data.get("steps", {}).get("step", [])
            points += data.get("charts", {}).get("depth", [])
    assert steps == list(range(1, 29))
    assert len(points) == len({point[0] for point in points}) == 29
    assert points == [list(row) for row in hub.state.queue.series.rows]


async def test_a_client_of_an_earlier_server_gets_a_snapshot(hub: Hub) -> None:
    routes = _Routes(hub, access())
    ((name, _, _),) = await events(routes, hub.frames.number_of("otherlife.3"), 1)
    assert name == "snapshot"


async def test_a_client_that_reads_slowly_gets_a_snapshot_and_holds_up_nobody(hub: Hub, run: Scripted) -> None:
    stream = _Routes(hub, access())._events(None)
    async with asyncio.timeout(20):
        await anext(stream)
        assert (await anext(stream)).startswith(b"event: snapshot")
        for step in range(400):  # more frames than are kept, while it takes none
            run.depth(pending=step)
            run.at += 1
            hub.look()
        assert (await anext(stream)).startswith(b"event: snapshot")
    await stream.aclose()


async def test_a_change_of_a_file_is_a_frame_within_a_second(hub: Hub, run: Scripted) -> None:
    await asyncio.sleep(0.7)
    before = hub.frames.last
    run.steps(1)
    async with asyncio.timeout(1.5):
        assert await hub.news(before, 1.5)
