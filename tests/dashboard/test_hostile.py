"""Nothing that stands in a run directory ends the dashboard, or makes an answer that is no JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from streamrl.dashboard.hub import Hub
from streamrl.monitor.schema import EVENTS
from tests.dashboard.scripted import Scripted

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, -1e308, 2**63, "", "x", "nan", "\ud83d", "\x00", "a" * 5000, [], [1, "a"], {}, {"a": {}},
)  # fmt: skip


KINDS = ("begin", "span", "counter", "state", "metrics", "process")
FIELDS = ("step", "version", "engine_seconds", "server", "pid", "host", "tool", "session", "budget")
CONFIGS = ("[", "- 1", "trainer: 7", "trainer: {v1: [1]}", "!!python/object:os.system {}")
SUMMARIES = ('{"status": 3}', "[]", "{", '{"status": "failed", "error": {}}')


def odd_line(chance: random.Random) -> str:
    spec = chance.choice(list(EVENTS.values()))
    fields = {name: chance.choice(ODD) for name in (*spec.fields, chance.choice(FIELDS))}
    line = {
        "kind": chance.choice([*KINDS, spec.kind, spec.kind]),
        "name": spec.name,
        "start": chance.choice([0.0, 5.0, -1e300, 1e300, chance.uniform(0, 100)]),
        "end": chance.choice([0.0, 1e300, 7.0]),
        "value": chance.choice([None, 1, 1.5, -1e308, 2**60, "x", "a" * 5000]),
        "fields": fields,
    }
    return json.dumps(line)


@pytest.mark.parametrize("seed", [random.randrange(1 << 30) for _ in range(5)])
def test_whatever_stands_in_a_run_directory_is_shown_or_counted(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = Scripted(tmp_path / "run")
    run.steps(3)
    for process in ("trainer", "agent-0", "other"):
        lines = "\n".join(odd_line(chance) for _ in range(400))
        (run.path / f"events/{process}.0007.jsonl").write_text(lines + "\n")
    steps = [{"step": chance.choice([1, 2, 3, -5, 2**40, 1.5, "x"]), "a": chance.choice(ODD)} for _ in range(50)]
    (run.path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    (run.path / "summary.json").write_text(chance.choice(SUMMARIES))
    (run.path / "config.yaml").write_text(chance.choice(CONFIGS))
    hub = Hub(run.path)
    hub._take(hub._events.catch_up(), grown=False)
    hub.look()
    json.loads(hub.snapshot())
    timeline = hub.state.timeline
    for start, end in ((timeline.first, timeline.last), (-1e12, 1e12), (run.at - 5, run.at)):
        if end > start:
            json.dumps(timeline.window(start, end, 500, run.at))
    assert hub.state.damaged > 0
    assert [step.step for step in timeline.steps][:3] == [1, 2, 3]
