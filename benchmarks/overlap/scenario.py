"""One simulated run: what it is made of, and what is measured of it.

    python -m benchmarks.overlap.scenario '{"sigma": 0.8, "warmup": 2}'      # prints the outcome as JSON

Trainer, replay buffer, queue, agent workers, router and the accounting are those of every run; only the engine and the
actor know nothing but how long things take. Times are those of a scale of 1; `scale` multiplies all of them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from streamrl.config import StreamRLConfig, load_config, to_yaml
from streamrl.errors import ConfigError
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.overlap import OverlapCollector
from streamrl.rollout.sim.script import SimConfig, response_lengths
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session
from streamrl.trainer.batch_log import read_batch_log
from transfer_queue.keys import split_prompt_uid

Policy = Literal["drop", "wait", "mask"] | None
MEAN_TOKENS = 32
DATASET = 1024
"""Prompts; all are alike."""

CELLS = 200_000
"""Of the grid over which a distribution's mean and order statistics are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """P = `prompts` groups of G = `samples` per step, K = `engines` x `slots`; times in seconds of scale 1."""

    name: str = ""
    prompts: int = 32
    samples: int = 8
    engines: int = 1
    slots: int = 64
    mean: float = 8.0
    """Slot time of a sample, μ."""
    sigma: float = 0.8
    long_share: float = 0.0
    long_times: float = 1.0
    train: float = 25.0
    sync: float = 1.5
    mode: Literal["sync", "separate_async"] = "separate_async"
    warmup: float = 2.0
    """num_warmup_batches."""
    policy: Policy = None
    max_age: int | None = None
    """S in versions; None: as many as `warmup`."""
    steps: int = 60
    scale: float = 0.1
    clock: Literal["virtual", "real"] = "virtual"
    seed: int = 1

    @property
    def bound_age(self) -> int:
        return math.ceil(self.warmup) if self.max_age is None else self.max_age

    @property
    def sessions(self) -> int:
        """All that are ever out, so that only slots and credit limit generation."""
        return math.ceil((1 + self.warmup) * self.prompts + self.prompts) * self.samples

    @property
    def engine(self) -> SimConfig:
        return SimConfig(
            response_tokens_mean=MEAN_TOKENS, response_tokens_sigma=self.sigma, long_share=self.long_share,
            long_times=self.long_times, token_seconds=self.scale * self.mean / MEAN_TOKENS,
        )  # fmt: skip

    def config(self, directory: Path) -> StreamRLConfig:
        """Raises ConfigError where the configuration knows no such policy."""
        prompts = directory / "prompts.jsonl"
        row = {"data_source": "none", "reward_model": {"ground_truth": ""}}
        prompts.write_text("".join(json.dumps({"prompt": str(i), **row}) + "\n" for i in range(DATASET)))
        engine, v1, actor = self.engine, "trainer.v1", "actor_rollout_ref.actor"
        rollout = "actor_rollout_ref.rollout"
        return load_config([
            "experiment=calculator", "runtime=local", "trainer.n_gpus_per_node=1", f"trainer.runs_dir={directory}",
            f"data.train_files={prompts}", "data.val_files=[]", "trainer.val_before_train=false",
            f"data.train_batch_size={self.prompts}", f"{actor}.ppo_mini_batch_size={self.prompts}",
            f"data.max_response_length={64 * MEAN_TOKENS}", "trainer.save_freq=-1", "monitor.prometheus.enabled=false",
            f"trainer.total_training_steps={self.steps}", "trainer.total_epochs=100000", f"trainer.seed={self.seed}",
            "trainer.stall_timeout=1000000", f"trainer.v1.trainer_mode={self.mode}",
            f"{actor}.strategy=sim", f"{actor}.sim.step_seconds={self.scale * self.train}",
            f"{actor}.sim.token_seconds=0", f"{actor}.sim.publish_seconds={self.scale * self.sync}",
            f"{rollout}.name=sim", f"{rollout}.n={self.samples}", f"{rollout}.num_replicas={self.engines}",
            f"{rollout}.max_num_seqs={self.slots}", f"{rollout}.tools={{}}", f"{rollout}.sim.clock={self.clock}",
            f"{rollout}.agent.default_agent_loop=single_turn_agent", f"{rollout}.agent.session_timeout=1000000",
            f"{rollout}.agent.max_sessions={self.sessions}",
            f"{rollout}.sim.response_tokens_mean={engine.response_tokens_mean}",
            f"{rollout}.sim.response_tokens_sigma={engine.response_tokens_sigma}",
            f"{rollout}.sim.long_share={engine.long_share}", f"{rollout}.sim.long_times={engine.long_times}",
            f"{rollout}.sim.token_seconds={engine.token_seconds}",
            f"{v1}.separate_async.num_warmup_batches={self.warmup}",
            f"{v1}.sampler.max_off_policy_strategy={self.policy or 'null'}",
            f"{v1}.sampler.max_off_policy_threshold={self.bound_age + 1}",
        ]).config  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a distribution of response lengths, in tokens."""

    mean: float
    deviation: float
    longest: float
    """E[longest of a group]."""

    @classmethod
    def of(cls, engine: SimConfig, samples: int) -> Lengths:
        """By a grid of equally likely lengths: the k-th of N counts (k^G - (k-1)^G) / N^G times in the longest of G."""
        grid = (np.arange(CELLS) + 0.5) / CELLS
        long = np.random.default_rng(0).permutation(grid)
        lengths = np.sort(response_lengths(engine, grid, long)).astype(np.float64)
        shares = np.diff((np.arange(CELLS + 1) / CELLS) ** samples)
        return cls(float(lengths.mean()), float(lengths.std()), float(lengths @ shares))


@dataclass(frozen=True, slots=True)
class Expected:
    """What a scenario's numbers say before it is run, in seconds of its own scale."""

    t_gen: float
    bound: float
    longest: float
    """E[longest slot time of a group]."""
    s_min: int

    @classmethod
    def of(cls, scenario: Scenario) -> Expected:
        lengths = Lengths.of(scenario.engine, scenario.samples)
        second = scenario.engine.token_seconds
        t_gen = scenario.prompts * scenario.samples * lengths.mean * second / (scenario.engines * scenario.slots)
        on_trainer = scenario.scale * (scenario.train + scenario.sync)
        bound, longest = max(on_trainer, t_gen), lengths.longest * second
        return cls(t_gen, bound, longest, math.ceil((on_trainer + longest) / bound - 1e-9))


@dataclass(slots=True)
class Outcome:
    """Seconds are of the run's own clock and of the mean step after warm-up, if not said otherwise."""

    scenario: dict[str, Any]
    s_min: int
    efficiency: float
    """η of the mean step."""
    efficiency_nominal: float
    """The same against the bound by what was drawn, not by what it took: on the machine's clock timers are late, which
    makes slot times and the measured bound longer."""
    step: float
    bound: float
    train: float
    generation: float
    lost: dict[str, float]
    groups: int
    """Trained in the whole run."""
    age_mean: float
    """Of the oldest token of a trained row."""
    age_max: float
    trained_age_max: float | None
    """Of a token that counts in the loss."""
    masked: float
    """Share of the sampled tokens that left the loss."""
    wasted: dict[str, float]
    """Reason → share of all sampled tokens, of groups that were dropped for it."""
    length_ratio: float
    """Mean length of the trained responses / of the drawn ones, over the prompts issued before the oldest that was
    still under way at the end."""
    length_z: float
    """The same difference in standard errors."""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    run_seconds: float = 0.0
    """On the run's own clock."""


def simulate(scenario: Scenario) -> Outcome:
    """Run it, in a temporary directory. Raises ConfigError, and whatever ends a run."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        config = scenario.config(Path(directory))
        run = open_run(Path(directory), "simulation", to_yaml(config), resume_mode="disable", resume_from=None)

        async def main() -> None:
            async with local_parts(config, run) as parts:
                await Session(parts).run()

        gc.freeze()  # what was imported; and what lives is many, so that looking for rings in it is rare
        gc.set_threshold(100_000, 20, 50)
        wall, cpu = time.perf_counter(), time.process_time()
        run_virtual(main()) if scenario.clock == "virtual" else asyncio.run(main())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        run.release()
        outcome = measured(scenario, run.path)
    outcome.cpu_seconds, outcome.wall_seconds = cpu, wall
    return outcome


def measured(scenario: Scenario, run: Path) -> Outcome:
    """From the run directory alone."""
    collector = OverlapCollector()
    tokens: dict[str, dict[int, int]] = defaultdict(dict)
    cut: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    generated: dict[str, float] = {}
    for event in read_events(run):
        collector.feed(event)
        if event.name == "session" and event.kind == "span":
            if event.fields["status"] == "cancelled":
                cut[event.fields["uid"]] += int(event.fields.get("tokens", 0))
            else:
                tokens[event.fields["uid"]][event.fields["session"]] = int(event.fields.get("tokens", 0))
        elif event.name == "server_tokens" and isinstance(event.value, (int, float)):
            generated[str(event.fields["server"])] = event.value
        elif event.name == "dropped":
            reasons[event.fields["uid"]] = str(event.fields["reason"]).partition(":")[0]
    steps = read_batch_log(run / "batches.jsonl")
    trained = dict(zip((u for s in steps for u in s.uids), (o for s in steps for o in s.orders), strict=True))
    lines = list(read_metrics(run))
    steady, whole = collector.overlap.steady, collector.run
    ratio, z = length_bias(scenario, trained, set(reasons), tokens)
    ages = "training/off_policy"
    stale, oldest = f"{ages}/trajectory_staleness_worst", f"{ages}/token_staleness_trained/max"
    return Outcome(
        scenario=asdict(scenario),
        s_min=Expected.of(scenario).s_min,
        efficiency=steady.efficiency,
        efficiency_nominal=nominal_bound(scenario, tokens) / steady.seconds,
        step=steady.seconds,
        bound=steady.bound,
        train=steady.t_train,
        generation=steady.t_gen,
        lost={str(cause): seconds for cause, seconds in steady.lost.items()},
        groups=len(trained),
        age_mean=fmean(line[f"{stale}/mean"] for line in lines),
        age_max=max(line[f"{stale}/max"] for line in lines),
        trained_age_max=max((line[oldest] for line in lines if oldest in line), default=None),
        masked=fmean(line.get(f"{ages}/masked_ratio", 0.0) for line in lines),
        wasted=waste(tokens, cut, reasons, sum(generated.values())),
        length_ratio=ratio,
        length_z=z,
        run_seconds=whole.seconds,
    )


def nominal_bound(scenario: Scenario, tokens: dict[str, dict[int, int]]) -> float:
    """T* of a step, with the lengths that were drawn and nothing late."""
    drawn = [length for group in tokens.values() for length in group.values()]
    slots = scenario.engines * scenario.slots
    generation = scenario.prompts * scenario.samples * fmean(drawn) * scenario.engine.token_seconds / slots
    return max(scenario.scale * (scenario.train + scenario.sync), generation)


def waste(
    tokens: dict[str, dict[int, int]], cut: Mapping[str, int], reasons: dict[str, str], generated: float
) -> dict[str, float]:
    """Reason → share of the `generated` tokens. `tokens` are those of sessions that ended, `cut` those of a group's
    sessions that were cancelled."""
    lost: Counter[str] = Counter()
    for uid, reason in reasons.items():
        lost[reason] += sum(tokens.get(uid, {}).values()) + cut.get(uid, 0)
    return {reason: count / generated for reason, count in lost.items()}


def length_bias(
    scenario: Scenario, trained: dict[str, int], dropped: set[str], tokens: dict[str, dict[int, int]]
) -> tuple[float, float]:
    """(trained mean length / drawn mean length, the difference in standard errors), over settled prompts: those issued
    before the oldest one that was neither trained nor dropped when the run ended, since what is unfinished is long."""
    settled = sorted([*trained.items(), *((uid, order_of(uid)) for uid in dropped)], key=lambda item: item[1])
    contiguous = [uid for place, (uid, order) in enumerate(settled) if order == place]
    lengths = [length for uid in contiguous if uid in trained for length in tokens[uid].values()]
    drawn = Lengths.of(scenario.engine, scenario.samples)
    if not lengths:
        return math.nan, math.nan
    error = drawn.deviation / math.sqrt(len(lengths))
    return fmean(lengths) / drawn.mean, (fmean(lengths) - drawn.mean) / error if error else 0.0


def order_of(uid: str) -> int:
    """The dispatch order of a prompt."""
    place = split_prompt_uid(uid)
    assert place is not None
    return place[0] * DATASET + place[1]


def main() -> int:
    scenario = Scenario(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    try:
        outcome = simulate(scenario)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
        return 0
    print(json.dumps(asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
