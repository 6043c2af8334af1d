"""docs/metrics.md, from the table of metrics and the trackers.

python -m streamrl.monitor.document > docs/metrics.md
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator

from streamrl.monitor.registry import PROMETHEUS_TABLE, STEP_TABLE, Metric
from streamrl.monitor.trackers import CLOSE_SECONDS, LIBRARIES
from streamrl.monitor.trackers.lane import CAPACITY

NOT_HERE = {
    "response/aborted_ratio": "a session without a sampled token is a failed one, and no row",
    "response_length_non_aborted/*": "the same: response_length/* is of those that were not",
    "global_seqlen/{min,max,minmax_diff}": "rows are dealt out by tokens; there is no other split to compare with",
    "timing_s/{reward,dump_rollout_generations}": "agents score while others generate; files are written by a rank",
    "timing_s/switch_*, separate_async/*": "no servers change sides between generation and training",
    "training/rollout_probs_diff_valid": "it is 1 always: without rollout log-probs there is no row",
    "training/off_policy/evicted_samples_staleness/*": "not kept of what left; token_age/* is of what is trained",
    "training/filter_groups/discarded_surplus_samples": "groups/dropped/surplus, in the one mode that has a surplus",
    "agent_loop/{compute_score,num_preempted,slowest/*}": "beside each row, in its column `metrics`",
    "fully_async/*": "overlap/*, lost_s/*, waste/*",
    "variance_proxy/*, rollout/moe/*, rollout/spec_accept_*": "what they measure is not here",
}
"""verl's metric -> why there is none of this name."""

_HEAD = """\
# Metrics

Generated from `streamrl/monitor/registry.py` by `python -m streamrl.monitor.document > docs/metrics.md`.

Every run writes `metrics.jsonl` in its directory: one line per training step, and one per validation (`"validation"` is
before, during or after). Both go on to Prometheus (below), the terminal, and the trackers that `trainer.logger` names.
A metric that verl has, with the same meaning, has verl's name.

## Trackers

`trainer.logger=[console,tensorboard]` is a list of these; `file` (metrics.jsonl) is always there, `console` is the
terminal view.

| name | needs | where it goes |
|---|---|---|
"""

_TRACKING = f"""
Libraries are optional; one that is named and not installed is an error before the start. Keys are taken from the
environment, never from the configuration. A tracker gets the resolved configuration at its start, each step's and each
validation's numbers (those that are finite), and with `trainer.log_val_generations` answers as text. A resumed run goes
on under the same name and logs the steps after its checkpoint again.

Each tracker has a thread and a queue of {CAPACITY} calls of its own. One that fails, is slow or hangs stops nothing:
the oldest calls leave, the first trouble is told, and the rest counted at the end, which waits {CLOSE_SECONDS:g} s for
all of them together. `metrics.jsonl` has everything.

`path/to/file.py:Class` is a tracker of your own: [extending.md](extending.md#a-tracker).
"""

_VALIDATION = """
## Validation

`val-core/<source>/<quantity>/...` for each data source. `<quantity>` is `acc` if the reward returns one for every
answer, else `reward`, the score (a session that failed counts as 0 in both); with `_greedy` behind it in the greedy
pass. Of n answers to each question (`rollout.val_kwargs.n`): `mean@n`, `best@n/mean`, and `maj@n/mean` where the reward
returns `pred`, the answer it found. Everything else (`std@n`, fewer answers than n, worst, other numbers that the
reward returned) is `val-aux/...`. best, worst and maj of k answers are those of 1000 draws with replacement, with the
seed 42: the same draws as verl's. The table at the end of a run and `summary.json` (`val_*`, `val_quantity`) show the
mean over all data sources: of `acc`, if all answers have one, else of the score.

In `sync` and `colocate_async`, and in deterministic mode, a validation stops training. Otherwise, in `separate_async`,
it goes on beside it, one at a time (one that is due meanwhile is left out, and said), with the weights of its step or
with whatever the servers have meanwhile, as `trainer.v1.separate_async.validation_weights` says
([async.md](async.md#a-validation-beside-training)); `val-aux/versions/{min,max}` tell which ones sampled any answer. A
resumed run does none again.
"""


def page() -> str:
    """Markdown."""
    return _HEAD + "".join(_trackers()) + _TRACKING + _VALIDATION + _steps() + _not_here() + _prometheus()


def _trackers() -> Iterator[str]:
    for name, tracker in LIBRARIES.items():
        where = _cell(inspect.getdoc(tracker) or "")
        yield f"| `{name}` | `pip install {name}`, or `streamrl[{name}]` | {where} |\n"


def _steps() -> str:
    head = (
        "\n## Of a step\n\n`{a,b}` stands for either, `<x>` for a free part.\n\n"
        "| metric | unit | what it is | verl |\n|---|---|---|---|\n"
    )
    return head + _rows(STEP_TABLE, lambda metric: metric.verl or "–")


def _prometheus() -> str:
    head = "\n## Prometheus\n\n| metric | unit | what it is | labels |\n|---|---|---|---|\n"
    return head + _rows(PROMETHEUS_TABLE, lambda metric: ", ".join(metric.labels) or "–")


def _rows(table: Iterable[Metric], last: Callable[[Metric], str]) -> str:
    return "".join(f"| `{m.name}` | {m.unit or '–'} | {_cell(m.help)} | {_cell(last(m))} |\n" for m in table)


def _not_here() -> str:
    rows = "".join(f"| `{name}` | {_cell(why)} |\n" for name, why in NOT_HERE.items())
    return f"\n## verl's that have no counterpart\n\n| metric | why |\n|---|---|\n{rows}"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    sys.stdout.write(page())
