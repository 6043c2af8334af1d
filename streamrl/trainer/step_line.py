"""Parts of a step's line of metrics that follow from others: of mini-batches those of the step, under verl's names.

How a metric of several mini-batches becomes one of the step is said here by name, metric for metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import accumulate

from agent_loop.llm.protocol import ServerLoad
from streamrl.config import StreamRLConfig
from streamrl.monitor.registry import by_reason_class
from streamrl.workers.preparation import TOKENS_OF_AGE
from streamrl.workers.step_metrics import LOWS, PEAKS

SUMMED = (
    "actor/optimizer_steps", "actor/steps_not_finite", "critic/optimizer_steps", "critic/steps_not_finite",
    "data/bytes_read", "data/bytes_written", "rows/trained", "perf/total_num_tokens", "actor/computed/tokens",
)  # fmt: skip
"""Metrics of a mini-batch that add up over a step; of `actor/lr` the last one counts; the others are averaged."""
_OF_TOKENS = ("critic/rewards", "critic/advantages", "critic/returns", "critic/values")
LARGEST = frozenset((
    *PEAKS, *(f"training/off_policy/{age}/max" for age in ("token_staleness", "token_staleness_trained")),
    *(f"{name}/max" for name in _OF_TOKENS), "global_seqlen/balanced_max",
    "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb",
))  # fmt: skip
SMALLEST = frozenset((*LOWS, *(f"{name}/min" for name in _OF_TOKENS), "global_seqlen/balanced_min"))
PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""Stages whose time is also told per token."""


def evicted(dropped: Mapping[str, int]) -> dict[str, float]:
    """Groups that left untrained, under verl's names, which call them samples."""
    found = by_reason_class(dropped)
    names = {
        "training/off_policy/evicted_samples": ("stale", "cancelled"),
        "training/filter_groups/evicted_samples": ("filtered",),
        "training/rollout_failure/evicted_samples": ("failed", "dead"),
    }
    return {name: float(sum(found.get(reason, 0) for reason in reasons)) for name, reasons in names.items()}


def per_token(metrics: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a stage per token trained; of `gen` per token of the responses."""
    tokens = dict.fromkeys(PER_TOKEN, metrics.get("perf/total_num_tokens", 0.0))
    tokens["gen"] = metrics.get("response_length/mean", 0.0) * metrics.get("rows/trained", 0.0)
    return {
        f"timing_per_token_ms/{stage}": 1000.0 * metrics[f"timing_s/{stage}"] / count
        for stage, count in tokens.items()
        if count and f"timing_s/{stage}" in metrics
    }


class TeacherCounts:
    """What the teacher's servers scored between two steps. Their counts start again with each of them."""

    def __init__(self) -> None:
        self._last: dict[str, ServerLoad] = {}
        self._rows = self._tokens = 0
        self._waited = 0.0

    def look(self, loads: Mapping[str, ServerLoad]) -> None:
        for server, load in loads.items():
            before = self._last.get(server)
            if before is None or before.rows_scored > load.rows_scored:  # a new one, or one that was started again
                before = NOTHING_SCORED
            self._rows += load.rows_scored - before.rows_scored
            self._tokens += load.tokens_scored - before.tokens_scored
            self._waited += load.score_queue_seconds - before.score_queue_seconds
            self._last[server] = load

    def step_metrics(self) -> dict[str, float]:
        """Of what was seen since the last call."""
        metrics = {"teacher/tokens_scored": float(self._tokens), "teacher/queue_s": self._waited / max(self._rows, 1)}
        self._rows, self._tokens, self._waited = 0, 0, 0.0
        return metrics


def all_zero(steps: int, config: StreamRLConfig) -> str:
    """What to look at when every session scored 0: nothing is learned then, since all advantages are 0."""
    agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
    tools = "" if config.actor_rollout_ref.rollout.tools else ", and there are no tools (rollout.tools)"
    return (
        f"every session of the first {steps} steps scored 0, so nothing was learned. What the model said: "
        "trainer.rollout_data_dir=DIR writes it, trainer.log_val_generations=4 shows some of it. Usual causes: the "
        f"agent does not play what the reward expects (rollout.agent.default_agent_loop={agent}{tools}), answers are "
        f"cut at data.max_response_length={config.data.max_response_length}, or the reward looks for another format"
    )


class SampledTokens:
    """Tokens per second of all servers between two looks at them, which cover the same time as the tokens: with what
    the trainer did between its steps (a checkpoint, a validation). A server that is new or was restarted counts from
    its first, or from zero."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._looked: float | None = None
        self._tokens, self._seconds = 0, 0.0

    def look(self, counts: Mapping[str, int]) -> None:
        """`counts`: by server, the tokens it has sampled since it was started."""
        now = self._clock()
        if self._looked is not None:
            self._seconds += now - self._looked
            for server, count in counts.items():
                before = self._counts.get(server, count)
                self._tokens += count - before if count >= before else count
        self._looked = now
        self._counts.update(counts)

    def step_metrics(self) -> dict[str, float]:
        """Of what was seen since the last call; nothing where that is unknown."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens, self._seconds = 0, 0.0
        return {"perf/generated_tokens_per_s": tokens / seconds} if seconds > 0 and self._counts else {}


NOTHING_SCORED = ServerLoad(0, 0, 0, 0, 0, 0.0)


def merged_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of several mini-batches as those of one step."""
    columns: dict[str, list[float]] = defaultdict(list)
    for metrics in updates:
        for name, value in metrics.items():
            columns[name].append(float(value))
    merged: dict[str, float] = {}
    for name, values in columns.items():
        if name == "actor/lr":
            merged[name] = values[-1]
        elif name in LARGEST or name in SMALLEST:
            merged[name] = max(values) if name in LARGEST else min(values)
        else:
            adds_up = name in SUMMED or name.startswith(("timing_s/", "actor/seconds/", TOKENS_OF_AGE))
            merged[name] = sum(values) if adds_up else sum(values) / len(values)
    return merged | age_percentiles(merged)


def age_percentiles(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of how many tokens are of which age: the age that a share of the tokens does not exceed."""
    counts = sorted((int(n.removeprefix(TOKENS_OF_AGE)), c) for n, c in metrics.items() if n.startswith(TOKENS_OF_AGE))
    total, found = sum(count for _, count in counts), {}
    for share in (50, 90, 99) if total else ():
        reached = accumulate(count for _, count in counts)
        age = next(age for (age, _), seen in zip(counts, reached, strict=True) if 100 * seen >= share * total)
        found[f"training/off_policy/token_staleness/p{share}"] = float(age)
    return found
