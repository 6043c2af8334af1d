"""The stages that a prompt passes, each with what it did lately: busy, starved or held up, and by what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamrl.dashboard.state.verdict import STEPS
from streamrl.monitor.schema import CAUSES

if TYPE_CHECKING:
    from streamrl.dashboard.state.run_state import RunState

BUSY = 0.5
"""Share of the time in which the mean engine works from which generation is busy."""

LONG = 5.0
"""Seconds of a wait from which that counts for more than the last steps."""

TRAINED = (
    ("reward_model", "reward model"), ("old_log_prob", "old log-probs"), ("ref", "reference"), ("teacher", "teacher"),
    ("values", "values"), ("reward", "KL reward"), ("advantage", "advantages"), ("update_critic", "critic"),
    ("train", "update"),
)  # fmt: skip
"""The stages of an update, by their spans."""


def stages(state: RunState, now: float) -> dict[str, Any]:
    """Nodes in order, each with shares of the last steps' time, and the edges between them with depth and rate."""
    steps = state.steps.last(STEPS)
    whole = sum(step.get("overlap/step_s", 0.0) for step in steps)

    def share(name: str) -> float:
        return round(sum(step.get(name, 0.0) for step in steps) / whole, 3) if whole > 0 else 0.0

    live = state.health(now).alive
    depth, credit = state.queue.depth.get("train", {}), state.queue.credit.get("train", 0)
    out, rates = state.queue.out(), state.queue.rates()
    no_credit = bool(credit) and out >= credit
    waits = state.timeline.waits_now(now) if live else ""
    busy, stalled = share("overlap/generation_busy_s"), share("overlap/generation_stalled_s")
    training = share("overlap/train_s")
    lost = {cause: share(f"lost_s/{cause}") for cause in CAUSES}
    generate = "busy" if busy > BUSY else "blocked" if no_credit and not depth.get("pending", 0) else "starved"
    train = "starved" if lost["wait_data"] >= max(lost.values()) else "blocked"
    train = "busy" if training >= max(lost.values()) else train
    since = state.waits_since(now)
    if waits in ("wait_data", "wait_order") and since is not None and now - since > LONG:
        train = "starved" if waits == "wait_data" else "blocked"
    held = live and state.timeline.open_since("wait_credit") is not None and generate != "busy"
    nodes = [
        _node("prompts", "Prompts", "blocked" if held else "idle", 0.0,
              f"{out} of {credit} out" if credit else f"{out} out"),
        _node("generate", "Generate", generate if steps or depth else "idle", busy, _engines(state)),
        *_stages(state, whole),
        _node("train", "Train", train if steps else "idle", training, _waits(lost)),
        _node("publish", "Weights", "busy" if lost["sync"] > 0.3 else "idle", share("overlap/sync_s"), _served(state)),
    ]  # fmt: skip
    edges = [
        {"from": "prompts", "to": "generate", "label": "pending", "depth": depth.get("pending", 0),
         "rate": rates.get("admitted")},
        {"from": "generate", "to": "train", "label": "ready", "depth": depth.get("ready", 0),
         "rate": rates.get("generated")},
        {"from": "train", "to": "publish", "label": "trained", "depth": depth.get("training", 0),
         "rate": rates.get("trained")},
    ]  # fmt: skip
    return {
        "nodes": nodes, "edges": edges, "generating": depth.get("generating", 0), "stalled": stalled, "lost": lost,
        "dropped": rates.get("dropped"), "live": live,
    }  # fmt: skip


def _node(identity: str, label: str, state: str, busy: float, note: str) -> dict[str, Any]:
    return {"id": identity, "label": label, "state": state, "busy": busy, "note": note}


def _stages(state: RunState, whole: float) -> list[dict[str, Any]]:
    """The stages before the update that this run has, by their time in the last steps."""
    recent = state.timeline.steps[-STEPS:]
    seconds = sum(step.end - step.start for step in recent)
    if not seconds:
        return []
    shares = {name: sum(step.drawn.get(name, 0.0) for step in recent) / seconds for name, _ in TRAINED}
    return [
        _node(name, label.capitalize(), "busy" if shares[name] > 0.3 else "idle", round(shares[name], 3), "")
        for name, label in TRAINED
        if name != "train" and shares[name] > 0.0005
    ]


def _engines(state: RunState) -> str:
    running = sum(int(engine.get("running") or 0) for engine in state.fleet.engines.values())
    slots = sum(int(engine.get("slots") or 0) for engine in state.fleet.engines.values())
    count = len(state.fleet.engines)
    return f"{count} engine{'s' if count > 1 else ''}, {running}/{slots} slots" if slots else ""


def _waits(lost: dict[str, float]) -> str:
    worst = max(lost, key=lambda cause: lost[cause])
    return f"{100 * lost[worst]:.0f} % {worst.replace('_', ' ')}" if lost[worst] > 0.01 else ""


def _served(state: RunState) -> str:
    trainer, served = state.view.versions.get(("trainer", "")), state.view.served_versions
    if trainer is None and not served:
        return ""
    oldest = f", served {served[0]}" if served else ""
    return f"v{'?' if trainer is None else trainer}{oldest}"
