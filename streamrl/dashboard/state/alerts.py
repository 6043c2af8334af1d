"""What is wrong or soon will be, as a list: recomputed from the state, never remembered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from streamrl.dashboard.state.health import Health

if TYPE_CHECKING:
    from streamrl.dashboard.state.run_state import RunState

STARVED_SECONDS = 30.0
WAITS = {"wait_data": "for data", "wait_order": "for groups that are ready, but held back"}


def alerts(state: RunState, now: float, condition: Health) -> list[dict[str, Any]]:
    """Each with a name, a severity (bad, warn), a text, the page that shows more, and since when, where it is known."""
    found: list[dict[str, Any]] = []

    def add(name: str, severity: str, text: str, page: str, since: float | None = None) -> None:
        found.append({"name": name, "severity": severity, "text": text, "page": page, "since": since})

    if condition.condition in ("dead", "stale"):
        add("silence", "bad", condition.why, "fleet", round(condition.since, 1))
    if state.view.status == "failed":
        add("failed", "bad", f"The run failed: {state.error}" if state.error else "The run failed.", "overview")
    if condition.alive:
        waits, since = state.timeline.waits_now(now), state.waits_since(now)
        if waits in WAITS and since is not None and now - since > STARVED_SECONDS:
            add("starved", "bad", f"The trainer waits {WAITS[waits]}.", "timeline", since)
        for call in [call for call in state.timeline.calls if call.hangs(now)][:5]:
            text = f"Tool {call.tool} hangs: session {call.session} of group {call.uid}, {call.worker}."
            add("tool", "bad", text, "timeline", round(call.since, 1))
        for process in state.fleet.processes.values():
            if process.alive is False and process.name not in ("trainer", "launcher"):
                add(
                    "process",
                    "warn",
                    f"Process {process.name} (pid {process.pid}) is gone.",
                    "fleet",
                    round(process.last, 1),
                )
    dead = len(state.queue.dead.get("train", {}))
    if dead:
        add("dead", "warn", f"{dead} prompt group{'s' if dead > 1 else ''} ended dead.", "queue")
    page = state.queue.live
    if page is not None and page.no_room:
        add("no_room", "bad", f"{page.no_room} writers wait for room: {page.first_without_room}", "queue")
    for unit, what in sorted(state.queue.units.items()):
        if what.get("alive") is False and condition.alive:
            add("unit", "bad", f"Storage unit {unit} does not answer.", "queue")
    last = state.steps.last(1)
    if last:
        _of_step(last[0], add, page="learning")
    if state.damaged:
        add("damaged", "warn", f"{state.damaged} lines of the event log could not be read.", "fleet")
    return found


def _of_step(metrics: dict[str, float], add: Any, *, page: str) -> None:
    if metrics.get("actor/steps_not_finite", 0.0) > 0:
        add("not_finite", "bad", "An optimizer step was left out: its loss or gradient was not finite.", page)
    if metrics.get("actor/grad_norm", 0.0) > 1e3:
        add("grad_norm", "warn", f"The gradient norm is {metrics['actor/grad_norm']:.3g}.", page)
    if metrics.get("response_length/clip_ratio", 0.0) > 0.5:
        share = math.floor(100 * metrics["response_length/clip_ratio"])
        add("clipped", "warn", f"{share} % of the answers were cut at their greatest length.", page)
