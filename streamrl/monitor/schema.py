"""The one table of all events: what a process of a run may write to the event log, and with which fields.

Views (terminal, Prometheus, overlap accounting, later the dashboard and the trace) know events by these names only.
`check_events` makes an unknown name, or a missing field, an error; tests run it over the log of a whole run.

Times are seconds. A *span* has a start and an end and is written when it ends; an announced span also writes a
`begin` line when it starts, so that a stall and a crash show what was under way. A *counter* is a sampled number:
a level (`queue_groups`) or a running total (`server_tokens`). A *state* is a fact that holds until the next one of
the same name and labels. *metrics* is the dictionary of one training step, the same as its line of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from streamrl.monitor.event_file import Event

Kind = Literal["process", "begin", "span", "counter", "state", "metrics"]

Cause = Literal["wait_data", "wait_order", "sync", "hand_off", "checkpoint", "validation", "bookkeeping", "unaccounted"]
"""What a second of a step in which the trainer's devices do not train can be lost to."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class EventSpec(NamedTuple):
    """One row of the table. `fields` are required (labels, for counters and states); more may be given."""

    kind: Kind
    name: str
    writer: str
    fields: tuple[str, ...]
    help: str
    announced: bool = False


def _span(name: str, writer: str, fields: tuple[str, ...], help: str, announced: bool = True) -> EventSpec:
    return EventSpec("span", name, writer, fields, help, announced)


TABLE: tuple[EventSpec, ...] = (
    # The trainer's step. Consecutive steps touch: the next one starts when the last one ended.
    _span(
        "step",
        "trainer",
        ("step", "groups", "samples", "dropped"),
        "One training step: prompt groups and samples trained, groups dropped since the last step.",
    ),
    # What the trainer waits for, inside (or between) steps.
    _span("wait_data", "trainer", ("step",), "Nothing is ready."),
    _span("wait_order", "trainer", ("step",), "Groups are ready, but held back by dispatch order or the age policy."),
    _span("hand_off", "trainer", ("step",), "From taking groups to the workers starting on them: lease and dispatch."),
    _span(
        "publish",
        "trainer",
        ("version",),
        "Weight sync: from the first byte written until every server serves the version. "
        "Also `bytes`, `digest` (the trainer's checksum) and `checksums` (by server), `generation_stalled` (seconds in "
        "which generation stood still), the stages `gather_s`, `transfer_s`, `apply_s`, `commit_s`, `pause_s` "
        "(docs/rollout.md), and `missing`: servers without it, and why.",
    ),
    _span("checkpoint", "trainer", ("step",), "The trainer writes a checkpoint."),
    _span("wait_credit", "trainer", (), "The feeder has prompts, and waits until the queue gives credit for them."),
    _span("validate", "trainer", ("step",), "Validation in training's place; also `when` (before, during, after)."),
    _span("validate_beside", "trainer", ("step",), "Validation beside training, with the weights of `step` and later."),
    _span(
        "hold", "trainer", ("step",), "The servers' weights are held for a validation; what would go on needs newer."
    ),
    _span(
        "select",
        "trainer",
        ("step",),
        "Choosing what is trained and dropping what is too old; what it waits for counts as waiting.",
        announced=False,
    ),
    _span(
        "close_step", "trainer", ("step",), "The step is written down: acks, batch log, state of all parts, metrics."
    ),
    # What the trainer's devices do. Everything else in a step is lost time.
    _span("reward_model", "trainer", ("step",), "The reward model scores the rows."),
    _span("old_log_prob", "trainer", ("step",), "Log-probs of the rows under pi_old."),
    _span("ref", "trainer", ("step",), "Log-probs of the rows under the reference policy."),
    _span("teacher", "trainer", ("step",), "Log-probs of the rows under the teacher."),
    _span("values", "trainer", ("step",), "The critic's values of the rows."),
    _span("reward", "trainer", ("step",), "Token-level rewards with the KL penalty."),
    _span("advantage", "trainer", ("step",), "Advantages, in the trainer process or on the ranks."),
    _span("update_critic", "trainer", ("step",), "The critic's optimizer steps."),
    _span("train", "trainer", ("step",), "Forward, backward, optimizer step of a mini-batch; also `rows`, `tokens`."),
    _span("rank", "training rank", ("task",), "A training rank does what it was told; also `role`."),
    # Generation.
    _span(
        "session",
        "agent worker",
        ("partition", "uid", "session", "status"),
        "One session of a prompt group. `status` is success, failed, interrupted (its group goes back) or cancelled: "
        "its group was dropped, or its worker stopped, while it was under way; what it cost until then is told. Also "
        "`tokens` (sampled), `turns`, `engine_seconds` (holding a slot), `queue_seconds` (waiting for one), "
        "`tool_seconds`, `score`, `reason` (when failed); with teacher servers `teacher_seconds` (until the rows were "
        "scored), `teacher_queue_seconds` (of that, waiting for a turn).",
        announced=False,
    ),
    _span("tool", "agent worker", ("tool",), "One tool call; also `uid`, `session`."),
    _span(
        "server_busy",
        "LLM server",
        ("server",),
        "The engine had running requests; also `tokens` (sampled) and `scored` (log-probs of given tokens).",
        announced=False,
    ),
    _span("server_weights", "LLM server", ("server", "version"), "The engine loaded new weights.", announced=False),
    EventSpec("state", "server", "LLM server", ("server",), "started, or died with the reason."),
    EventSpec("state", "service", "trainer", ("server",), "A server went out of service, and why, or is back in it."),
    EventSpec("counter", "server_running", "trainer", ("server",), "Requests in a slot."),
    EventSpec("counter", "server_waiting", "trainer", ("server",), "Requests waiting for a slot."),
    EventSpec("counter", "server_slots", "trainer", ("server",), "Slots of the server."),
    EventSpec("counter", "server_tokens", "trainer", ("server",), "Tokens generated since the server started."),
    EventSpec(
        "counter",
        "server_busy_seconds",
        "trainer",
        ("server",),
        "Time with at least one running request, since the server started.",
    ),
    EventSpec("counter", "server_first_tokens", "trainer", ("server",), "Requests with a first token, in all."),
    EventSpec("counter", "server_queue_seconds", "trainer", ("server",), "What these waited for a slot, in all."),
    EventSpec(
        "counter", "server_first_token_seconds", "trainer", ("server",), "From their arrival to that token, in all."
    ),
    EventSpec(
        "counter",
        "server_prompt_tokens",
        "trainer",
        ("server",),
        "Tokens with which requests got their slots, since its start; only of servers that know their prefix cache.",
    ),
    EventSpec("counter", "server_cached_tokens", "trainer", ("server",), "Of these: found in the prefix cache."),
    EventSpec("counter", "server_preemptions", "trainer", ("server",), "Requests that lost their cache, in all."),
    EventSpec("counter", "server_cache_usage", "trainer", ("server",), "Share of the KV cache that is in use."),
    EventSpec("counter", "server_weights_seconds", "trainer", ("server",), "Age of its weights: since it took them."),
    EventSpec("counter", "teacher_waiting", "trainer", ("server",), "Rows that wait to be scored, or are."),
    EventSpec("counter", "teacher_tokens", "trainer", ("server",), "Tokens scored since the teacher server started."),
    EventSpec("counter", "teacher_busy_seconds", "trainer", ("server",), "Time in which it scored, since it started."),
    EventSpec(
        "counter",
        "weight_version",
        "trainer",
        ("role", "engine"),
        "Version held by the trainer (role=trainer, engine='') and by each server (role=rollout).",
    ),
    # The queue.
    EventSpec(
        "counter",
        "queue_groups",
        "trainer",
        ("partition", "state"),
        "Prompt groups by state; terminal states count since the start.",
    ),
    EventSpec("counter", "queue_bytes", "trainer", ("partition",), "Live bytes."),
    EventSpec("counter", "queue_rows", "trainer", ("partition",), "Live rows."),
    EventSpec("counter", "queue_credit", "trainer", ("partition",), "Prompt groups that may be out; 0: any number."),
    EventSpec("counter", "queue_redelivered", "trainer", ("partition",), "Groups leased again, since the start."),
    EventSpec(
        "counter", "queue_oldest_age", "trainer", ("partition", "state"), "Seconds of the oldest group in a state."
    ),
    EventSpec(
        "counter",
        "unit_bytes",
        "trainer",
        ("unit",),
        "Bytes that it holds in memory; also `budget`, `spilled`, `alive`.",
    ),
    # The run.
    EventSpec("counter", "heartbeat", "trainer", (), "The process lives; the number of the beat, every two seconds."),
    EventSpec("metrics", "step_metrics", "trainer", (), "The metrics of one step; `value` is the step."),
    EventSpec("state", "run", "trainer", (), "starting, validating, training, finished, interrupted or failed."),
    EventSpec("state", "prometheus", "trainer", ("key_file",), "The URL of the metrics endpoint; its bearer key."),
    EventSpec("state", "total_steps", "trainer", (), "Steps that this run will have."),
    EventSpec(
        "state",
        "validation",
        "trainer",
        ("step",),
        "Validation ended; `value` is before, during or after, the fields are val-core/* and val-aux/* numbers.",
    ),
    EventSpec(
        "counter", "cpu_seconds", "trainer", ("cores",), "CPU time of the run's processes here, since they started."
    ),
    EventSpec("state", "note", "trainer", (), "Something worth a line on the screen."),
    EventSpec(
        "state", "sample", "trainer", ("step", "input", "output", "score"), "An answer of a validation, cut; its mode."
    ),
    EventSpec("state", "part", "trainer, launcher", (), "While starting: what is there now."),
    EventSpec("state", "restart", "any", ("role",), "A process was started again; `value` says which and why."),
    EventSpec("state", "dropped", "trainer", ("uid", "reason"), "A prompt group was dropped; `value`: in which state."),
)

EVENTS: dict[str, EventSpec] = {spec.name: spec for spec in TABLE}

TRAIN_SPANS = (
    "train", "reward_model", "old_log_prob", "ref", "teacher", "values", "reward", "advantage", "update_critic",
)  # fmt: skip
"""Time in these is training; all other time of a step is lost to a cause."""

CAUSE_OF_SPAN: dict[str, Cause] = {
    "wait_data": "wait_data",
    "wait_order": "wait_order",
    "publish": "sync",
    "hand_off": "hand_off",
    "checkpoint": "checkpoint",
    "validate": "validation",
    "hold": "validation",
    "select": "bookkeeping",
    "close_step": "bookkeeping",
}
"""The cause under which the time of a span counts as lost."""


def check_events(events: Iterable[Event]) -> int:
    """How many events there are. Raises ValueError for a name, kind or missing field that the table does not know.

    A span that an exception ended (it has the field `error`) may lack fields.
    """
    count = 0
    for event in events:
        count += 1
        if event.kind == "process":
            continue
        spec = EVENTS.get(event.name)
        if spec is None:
            near = get_close_matches(event.name, EVENTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"event {event.name!r} of process {event.process!r} is not in monitor/schema.py{hint}")
        if event.kind != spec.kind and not (event.kind == "begin" and spec.kind == "span"):
            raise ValueError(f"event {event.name!r} is a {spec.kind}, but was written as a {event.kind}")
        cut_short = event.kind == "begin" or "error" in event.fields
        missing = [f for f in spec.fields if f not in event.fields and not cut_short]
        if missing:
            raise ValueError(f"{event.kind} {event.name!r} of process {event.process!r} lacks the fields {missing}")
    return count
