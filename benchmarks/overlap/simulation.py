"""The sweeps: which runs are simulated, side by side, and the bars they are held to.

lengths    η of length distributions x staleness (`num_warmup_batches`), without an age bound
policies   what each age policy costs: η, ages, waste, bias
ages       10^4 groups at S_min per policy: no token that counts is ever older than the bound, no bias where none leaves
sizes      from 64 slots on one engine to thousands of engines: does the loop keep up, what does a simulation cost
real       the same on the machine's clock, times / 20 and / 100: what queue, agents and loop themselves take
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from statistics import NormalDist
from typing import Any

from benchmarks.bars import Bar
from benchmarks.overlap.scenario import Expected, Policy, Scenario

Outcomes = list[dict[str, Any]]

BASE = Scenario(steps=36)
SIGMAS = (0.0, 0.4, 0.8, 1.2)
WARMUPS = (0.0, 0.5, 1.0, 2.0)
BIMODAL = {"sigma": 0.3, "long_share": 0.1, "long_times": 5.0}
"""One response in ten reasons on for five times as long, as measured of models that sometimes think."""
POLICIES: tuple[Policy, ...] = ("drop", "wait", "mask")
GROUPS = 10_000
CONFIDENCE = 0.999
"""Of the two-sided test that trained responses are as long as drawn ones."""


def at_s_min(scenario: Scenario) -> Scenario:
    return replace(scenario, warmup=float(Expected.of(scenario).s_min))


def lengths() -> list[Scenario]:
    shapes = [(f"σ={sigma:g}", {"sigma": sigma}) for sigma in SIGMAS] + [("bimodal", BIMODAL)]
    return [replace(BASE, name=name, warmup=warmup, **shape) for name, shape in shapes for warmup in WARMUPS]


def policies() -> list[Scenario]:
    return [
        replace(BASE, name=f"σ={sigma:g}", policy=policy, sigma=sigma, warmup=warmup)
        for sigma in (0.8, 1.2)
        for policy in (None, *POLICIES)
        for warmup in (1.0, 2.0, 4.0)
    ]


def ages() -> list[Scenario]:
    steps = -(-GROUPS // BASE.prompts)
    return [at_s_min(replace(BASE, name=policy or "null", policy=policy, steps=steps)) for policy in POLICIES]


def sizes() -> list[Scenario]:
    """A step trains as many samples as there are slots; the trainer takes three quarters of the time of generation."""
    shape = replace(BASE, train=6.0, sync=0.4, steps=6)
    cut = [(1, 64), (64, 8), (512, 4), (2048, 2)]
    return [
        at_s_min(
            replace(shape, name=f"{engines} x {slots}", prompts=engines * slots // 8, engines=engines, slots=slots)
        )
        for engines, slots in cut
    ]


def real() -> list[Scenario]:
    """One at a time: they take the machine's time."""
    at = at_s_min(replace(BASE, clock="real"))
    return [replace(at, name="1/20", scale=1 / 20, steps=40), replace(at, name="1/100", scale=1 / 100, steps=90)]


SWEEPS: dict[str, Callable[[], list[Scenario]]] = {
    "lengths": lengths, "policies": policies, "ages": ages, "sizes": sizes, "real": real,
}  # fmt: skip


def run_all(scenarios: Sequence[Scenario], jobs: int) -> Outcomes:
    """Each in a process of its own, `jobs` at a time; those that the configuration refuses are left out, and told."""
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(run_one, scenarios))
    return [outcome for outcome in outcomes if "refused" not in outcome]


def run_one(scenario: Scenario) -> dict[str, Any]:
    """Its outcome, as a mapping. Raises CalledProcessError for a run that failed."""
    command = [sys.executable, "-m", "benchmarks.overlap.scenario", json.dumps(asdict(scenario))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    outcome = json.loads(done.stdout)
    print(f"{scenario.name}: {line(outcome)}", file=sys.stderr)
    return outcome


def line(outcome: dict[str, Any]) -> str:
    if "refused" in outcome:
        return f"refused: {outcome['refused'].splitlines()[0]}"
    scenario = outcome["scenario"]
    lost = ", ".join(f"{cause} {s / outcome['step']:.1%}" for cause, s in outcome["lost"].items() if s)
    return (
        f"warmup {scenario['warmup']:g}, S_min {outcome['s_min']}: η {outcome['efficiency']:.3f} ({lost}), age "
        f"{outcome['age_mean']:.2f} mean {outcome['age_max']:.0f} max, wasted {sum(outcome['wasted'].values()):.1%}, "
        f"length x {outcome['length_ratio']:.3f} (z {outcome['length_z']:+.1f}), {outcome['cpu_seconds']:.0f} s of CPU"
    )


def bars(results: dict[str, Outcomes]) -> list[Bar]:
    found = [
        *_efficiency(results.get("lengths", ())),
        *_policies(results.get("ages", ())),
        *(
            Bar(f"sizes: {each['scenario']['name']}, CPU of the simulation", each["cpu_seconds"], "s", 75, "at most")
            for each in results.get("sizes", ())
        ),
    ]
    for each in results.get("real", ()):
        name, bar = each["scenario"]["name"], {"1/20": 0.95, "1/100": 0.85}[each["scenario"]["name"]]
        late = each["efficiency"] - each["efficiency_nominal"]
        over = (each["step"] - each["bound"]) / each["step"]
        found += [
            Bar(f"real clock, {name}: η by nominal costs", each["efficiency_nominal"], "share", bar),
            Bar(f"real clock, {name}: lost to late timers", late, "share"),
            Bar(f"real clock, {name}: lost to waiting and hand-off beyond the bound", over, "share"),
            Bar(f"real clock, {name}: CPU of one core", _busy(each), "share"),
        ]
    total = sum(each["cpu_seconds"] for outcomes in results.values() for each in outcomes)
    return [*found, Bar("simulation: CPU seconds", total, "s")]


def _efficiency(outcomes: Sequence[dict[str, Any]]) -> list[Bar]:
    """At S_min; where that was not swept, at the next one above."""
    found = []
    for name in dict.fromkeys(each["scenario"]["name"] for each in outcomes):
        those = [each for each in outcomes if each["scenario"]["name"] == name]
        enough = [each for each in those if each["scenario"]["warmup"] >= each["s_min"]]
        if enough:
            first = min(enough, key=lambda each: each["scenario"]["warmup"])
            strict = 0.97 if first["scenario"]["sigma"] <= 0.8 and not first["scenario"]["long_share"] else None
            what = f"η at S={first['scenario']['warmup']:g} (S_min {first['s_min']}), {name}"
            found.append(Bar(what, first["efficiency"], "share", strict))
    return found


def _policies(outcomes: Sequence[dict[str, Any]]) -> list[Bar]:
    found = []
    limit = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    for each in outcomes:
        name, scenario = each["scenario"]["name"], each["scenario"]
        bound = scenario["warmup"]
        found.append(Bar(f"{name}: groups trained", each["groups"], "groups", GROUPS))
        if scenario["policy"] is not None:
            oldest = each["trained_age_max"]
            found.append(Bar(f"{name}: oldest token that counts", oldest, "versions", bound, "at most"))
        bias = limit if scenario["policy"] in ("wait", "mask") else None
        found.append(Bar(f"{name}: trained / drawn mean length", each["length_ratio"], "ratio"))
        found.append(Bar(f"{name}: the difference", abs(each["length_z"]), "standard errors", bias, "at most"))
        found.append(Bar(f"{name}: η", each["efficiency"], "share"))
    return found


def _busy(outcome: dict[str, Any]) -> float:
    return outcome["cpu_seconds"] / outcome["wall_seconds"]
