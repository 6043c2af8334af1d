"""What a person sees: the pages in a real browser, live, after a death, and whatever the run wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.schema import CAUSES
from tests.dashboard.browser import CHROMIUM, PAGES, Dashboard, Page, chromium
from tests.dashboard.scripted import Scripted
from transfer_queue.client import SyncQueueClient
from transfer_queue.net.messages import GroupSpec, TaskSpec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]
pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements/dev.txt)")

AXE = Path(__file__).parents[2] / "streamrl/dashboard/web/node_modules/axe-core/axe.min.js"

HOSTILE = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "\x1b[31mred\x1b[0m \x00 \x07",
    "\u202emoc.live\u202c \u2066x\u2069",
    "javascript:window.hacked=1",
    "{{constructor.constructor('window.hacked=1')()}}",
    "</bdi></div><svg onload='window.hacked=1'>",
    "x" * 100_000,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def scripted(tmp_path: Path, **step: float) -> Scripted:
    """A run of this process whose last step ended just now."""
    run = Scripted(tmp_path / "run", at=time.time() - 40)
    while run.at < time.time() - 1.2:
        run.one_step(**(step or {"train": 0.8, "wait_data": 0.15}))
    run.at = time.time()
    run.beat()
    return run


def test_every_page_asks_nobody_else_and_complains_of_nothing(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    run.trainer.state("run", "finished")
    with Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open()
        for name in PAGES:
            page.show(name)
            page.page.wait_for_timeout(400)
            assert page.page.inner_text("main").strip()
        assert page.elsewhere == []
        assert page.complaints == []
        assert any("/api/stream" in url for url in page.requests)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [(1280, 720), (400, 800)])
def test_no_page_is_wider_than_the_window_and_axe_finds_nothing_serious(
    browser: Any, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    run = scripted(tmp_path)
    run.trainer.state("dropped", "dead", uid="group-1", reason="killed three workers")
    run.trainer.state("run", "finished")
    with Dashboard(run.path) as dashboard, Page(browser, dashboard, size=size, dark=dark) as page:
        page.open()
        for name in PAGES:
            page.show(name)
            page.page.wait_for_timeout(300)
            assert page.page.evaluate("document.documentElement.scrollWidth") <= size[0], name
            if AXE.exists():
                page.page.evaluate(AXE.read_text())
                found = page.page.evaluate("axe.run().then(found => found.violations)")
                serious = [one for one in found if one["impact"] in ("serious", "critical")]
                told = [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in serious]
                assert not told, f"{name}: {told}"


# --- the first page names the cause ---------------------------------------------------------------------------------


def verdict_of(page: Page) -> tuple[str, str]:
    return page.page.get_attribute(".verdict", "data-cause"), page.text(".verdict h1")


def test_a_starved_trainer_is_named_on_the_first_page(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path, train=0.2, wait_data=0.8)
    with run.living(), Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        cause, headline = verdict_of(page.open())
        assert (cause, headline) == ("wait_data", "Rollout-bound")
        shown = int(page.text(".verdict .share").split()[0])
        last = list(read_metrics(run.path))[-10:]
        share = sum(line["lost_s/wait_data"] for line in last) / sum(line["overlap/step_s"] for line in last)
        assert abs(shown - 100 * share) <= 2


def test_a_rollout_that_waits_for_credit_is_named_on_the_first_page(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path, train=0.9, wait_data=0.02, idle=0.6)
    run.depth(pending=0, generating=0, ready=6, training=2)
    run.begin("wait_credit")
    with run.living(), Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        cause, headline = verdict_of(page.open())
        assert cause == "credit"
        assert "the rollout waits for credit" in headline
        assert "All 8 groups" in page.text(".verdict")
        page.show("queue")
        assert "All credit is used" in page.text("main")


def test_a_tool_that_hangs_is_named_on_the_first_page(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    for _ in range(10):
        run.tool(0.3, started=run.at - 30)
    run.begin("step", step=run.step + 1)
    run.begin("wait_data", step=run.step + 1)
    run.tool(None, started=run.at - 25)
    with run.living(), Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        cause, headline = verdict_of(page.open())
        assert (cause, headline) == ("tool", "A tool hangs: calculator")
        assert "agent-0" in page.text(".verdict")
        page.show("alerts")
        assert "calculator hangs" in page.text("main")


# --- live -----------------------------------------------------------------------------------------------------------


def test_a_step_is_seen_within_two_seconds(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    with run.living(), Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open()
        run.one_step()
        began = time.monotonic()
        page.wait_for(f"document.querySelector('.tile .value').innerText.startsWith('{run.step} /')", 5)
        assert time.monotonic() - began < 2


QUEUE = """
import sys, time
from pathlib import Path
from transfer_queue.service.queue_service import QueueService
with QueueService(Path(sys.argv[1]), units=1, unit_budget_bytes=64 << 20) as queue:
    print("up", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def queue_of(run: Scripted) -> Iterator[SyncQueueClient]:
    """A queue of its own processes in the run's directory, and a client of it."""
    command = [sys.executable, "-c", QUEUE, str(run.path / "queue")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            assert service.stdout.readline() == "up\n"
            with SyncQueueClient(run.path / "queue", "test") as client:
                client.open_partition("train", tasks=[TaskSpec("generate", "prompt", "clock", ttl=30.0)], max_groups=8)
                yield client
        finally:
            service.communicate("\n", timeout=30)


def admit(client: SyncQueueClient, *uids: str) -> None:
    client.admit("train", [GroupSpec(uid, 1, i) for i, uid in enumerate(uids)], {"x": [np.arange(3)] * len(uids)})


def test_a_put_is_seen_within_two_seconds(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    with queue_of(run) as client, Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open("queue")
        page.wait_for("document.querySelector('#source').innerText.includes('The queue answers')", 10)
        began = time.monotonic()
        admit(client, "a", "b", "c", "d", "e")
        page.wait_for("window.streamrl.known.queue.partitions[0].depth.pending === 5", 5)
        page.wait_for("[...document.querySelectorAll('td')].some(td => td.innerText === '5')", 5)
        assert time.monotonic() - began < 2
        client.lease("train", "generate", groups=2, holder="agent-7")
        page.wait_for("document.querySelector('main').innerText.includes('agent-7')", 5)


def test_a_dead_group_is_replayed_by_who_has_the_key(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    with queue_of(run) as client, Dashboard(run.path) as dashboard:
        admit(client, "poisoned")
        while not client.stats().partitions["train"].dead:
            token = client.lease("train", "generate", groups=1).token
            assert token is not None
            client.nack("train", token, ["poisoned"], reason="its prompt cannot be read", poison=True)
        with Page(browser, dashboard) as page:
            page.open("queue")
            page.wait_for("document.querySelector('main').innerText.includes('its prompt cannot be read')", 10)
            assert page.page.is_disabled("text=Replay")
        with Page(browser, dashboard) as page:
            page.open("queue", key=True)
            page.page.click("text=Replay", timeout=10_000)
            page.wait_for("window.streamrl.known.queue.partitions[0].depth.pending === 1", 10)
        assert client.stats().partitions["train"].dead == {}


TRIES = """async url => {
    const told = [];
    const json = {"Content-Type": "application/json"};
    for (const [path, how] of [
        ["/api/snapshot", {}],
        ["/api/snapshot", {mode: "no-cors"}],
        ["/api/replay", {method: "POST", body: "{}", headers: json}],
        ["/api/logout", {method: "POST", body: "{}", mode: "no-cors"}],
    ]) {
        try { told.push((await (await fetch(url + path, {credentials: "include", ...how})).text()).length); }
        catch (error) { told.push(-1); }
    }
    const frame = document.createElement("iframe");
    frame.src = url;
    document.body.append(frame);
    return told;
}"""
"""How many characters another page could read of each answer (-1: it was refused), and the dashboard in a frame."""


def test_a_page_of_another_origin_reads_and_changes_nothing(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/index.html").write_text("<title>evil</title>")
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "evil"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as other, Dashboard(run.path) as dashboard:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with Page(browser, dashboard) as page:
            page.open(key=True)  # the browser has the cookie
            page.page.goto(f"http://127.0.0.1:{other.server_address[1]}/")
            told = page.page.evaluate(TRIES, dashboard.url)
            assert [length <= 0 for length in told] == [True] * 4, told
            page.page.wait_for_timeout(500)
            assert [frame.url for frame in page.page.frames[1:]] == ["chrome-error://chromewebdata/"]
            page.open()
            assert page.page.evaluate("fetch('/api/whoami').then(answer => answer.json()).then(who => who.key)")
        other.shutdown()


TRAINER = """
import sys, time
from pathlib import Path
from streamrl.monitor.events import EventLog
from streamrl.monitor.heartbeat import heartbeat
with EventLog(Path(sys.argv[1]) / "events", "trainer") as log, heartbeat(log, 0.5):
    log.state("run", "training")
    print("up", flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize(("sign", "condition"), [(signal.SIGKILL, "dead"), (signal.SIGSTOP, "stale")])
def test_a_run_that_was_killed_or_stands_still_is_red_within_ten_seconds(
    browser: Any, tmp_path: Path, sign: int, condition: str
) -> None:
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "up\n"
            with Dashboard(tmp_path / "run") as dashboard, Page(browser, dashboard) as page:
                page.open()
                page.wait_for("document.querySelector('#condition').innerText.includes('live')", 5)
                os.kill(trainer.pid, sign)
                began = time.monotonic()
                if sign == signal.SIGKILL:
                    trainer.wait()
                page.wait_for(f"document.querySelector('#condition').innerText.includes('{condition}')", 15)
                assert time.monotonic() - began < 10
                assert page.page.get_attribute(".verdict", "data-cause") == condition
                assert "tone-bad" in page.page.get_attribute(".verdict", "class")
        finally:
            trainer.kill()


def test_after_a_restart_of_the_server_a_page_goes_on_without_a_gap_or_a_double(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    with Dashboard(run.path) as dashboard:
        page = Page(browser, dashboard).open()
        run.one_step()
        page.wait_for(f"window.streamrl.known.steps.step.at(-1) === {run.step}", 5)
    page.wait_for("document.querySelector('.lost') !== null", 10)
    run.one_step()
    with Dashboard(run.path, port=dashboard.port):
        run.one_step()
        page.wait_for(f"window.streamrl.known.steps.step.at(-1) === {run.step}", 15)
        run.one_step()
        page.wait_for(f"window.streamrl.known.steps.step.at(-1) === {run.step}", 5)
        steps = page.page.evaluate("window.streamrl.known.steps.step")
        times = page.page.evaluate("window.streamrl.known.charts.depth.map(row => row[0])")
        page.wait_for("document.querySelector('.lost') === null", 5)
    page.close()
    assert steps == list(range(1, run.step + 1))
    assert times == sorted(set(times))
    assert len(times) == run.step + 1


# --- after the end, and hostile runs --------------------------------------------------------------------------------


def test_the_numbers_of_the_gantt_are_those_of_the_metrics(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path, train=0.55, wait_data=0.3, sync=0.12, idle=0.2)
    run.trainer.state("run", "finished")
    with Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open("timeline")
        page.page.click("text=all")
        page.page.wait_for_selector("td >> nth=0")
        page.page.wait_for_timeout(500)
        head = [cell.inner_text() for cell in page.page.query_selector_all("th")]
        rows = [
            [cell.inner_text() for cell in row.query_selector_all("td")]
            for row in page.page.query_selector_all("tbody tr")
        ]
    told = {int(line["step"]): line for line in read_metrics(run.path)}
    names = {"training": "overlap/train_s", "waiting for data": "lost_s/wait_data", "weight sync": "lost_s/sync",
             "idle": "overlap/generation_idle_s", "bound T*": "overlap/bound_s"}  # fmt: skip
    assert len(rows) >= 20
    for row in rows:
        line = told[int(row[0])]
        for name, metric in names.items():
            assert float(row[head.index(name)]) == pytest.approx(line[metric], rel=0.01, abs=1e-3), (row[0], name)
        drawn = sum(float(row[head.index(name)]) for name in ("training", "waiting for data", "weight sync"))
        assert drawn == pytest.approx(line["overlap/train_s"] + sum(line[f"lost_s/{c}"] for c in CAUSES), rel=0.01)


def test_a_run_that_was_killed_can_be_looked_at_from_its_directory_alone(browser: Any, tmp_path: Path) -> None:
    run = Scripted(tmp_path / "run", at=time.time() - 9000, host="another-machine")
    run.steps(20, train=0.2, wait_data=0.8)
    run.beat()
    run.close()
    for path in (run.path / "events").iterdir():
        os.utime(path, (run.at, run.at))
    with Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open()
        assert page.page.get_attribute(".verdict", "data-cause") == "stale"
        assert "20" in page.text(".tile .value")
        page.show("queue")
        assert "does not answer" in page.text("#source")
        page.show("timeline")
        page.page.wait_for_selector("tbody tr")
        assert page.complaints == []


def test_whatever_a_run_wrote_stays_text(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    for text in HOSTILE:
        run.trainer.state("note", text)
        run.trainer.state("dropped", "dead", uid=text[:500], reason=text)
        run.trainer.state("restart", text, role=text[:100])
        run.trainer.state("validation", "during", step=1, **{f"val-core/{text[:200]}": 0.5})
        run.trainer.counter("server_running", 1, server=text[:200])
        run.worker.span_at("tool", run.at - 60, None, tool=text[:200], uid=text[:200], session=0)
    (run.path / "summary.json").write_text(json.dumps({"status": "failed", "error": HOSTILE[0] + HOSTILE[1]}))
    run.trainer.state("run", "failed")
    with Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open()
        for name in PAGES:
            page.show(name)
            page.page.wait_for_timeout(300)
        assert page.page.evaluate("window.hacked") is None
        assert page.page.query_selector_all("main script, main svg, main img, main iframe") == []
        page.show("overview")
        assert "<script>" in page.text("main")
        page.show("queue")
        assert "\u202e" not in page.text("main")
        assert page.elsewhere == []
        assert page.complaints == []


def test_where_the_key_is_needed_a_page_shows_nothing_without_it(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    with run.living(), Dashboard(run.path, "--key") as dashboard:
        with Page(browser, dashboard) as page:
            page.page.goto(dashboard.url)
            page.page.wait_for_selector("form")
            assert run.path.name not in page.text("body")
            page.page.fill("input", "wrong" * 10)
            page.page.keyboard.press("Enter")
            page.page.wait_for_selector("[role=alert]")
            page.page.fill("input", dashboard.key)
            page.page.keyboard.press("Enter")
            page.page.wait_for_selector(".verdict")
        with Page(browser, dashboard) as page:
            page.open(key=True)
            assert dashboard.key not in page.page.url
            assert "streamrl" in json.dumps(page.context.cookies())
            assert page.page.evaluate("document.cookie") == ""


def test_the_keyboard_reaches_every_page_and_moves_the_timeline(browser: Any, tmp_path: Path) -> None:
    run = scripted(tmp_path)
    run.trainer.state("run", "finished")
    with Dashboard(run.path) as dashboard, Page(browser, dashboard) as page:
        page.open()
        seen = set()
        for _ in range(len(PAGES) + 4):
            page.page.keyboard.press("Tab")
            seen.add(page.page.evaluate("document.activeElement.getAttribute('href')"))
        assert {f"#{name}" for name in PAGES} <= seen
        page.show("timeline")
        page.page.focus("canvas")
        before = page.text("main .card")
        page.page.keyboard.press("ArrowLeft")
        page.page.wait_for_timeout(200)
        assert page.text("main .card") != before
