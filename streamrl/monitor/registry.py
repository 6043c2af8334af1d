"""The one table of all metrics: the names of metrics.jsonl and of the Prometheus endpoint, with what they mean.

A *step* metric is a key of one training step's dictionary. Where verl logs the same quantity it has verl's name; where
verl has the quantity under another name or meaning, `verl` says which. In a name, `{a,b}` stands for alternatives and
`<x>` for one free part. The other kinds are Prometheus metrics (`streamrl_`, base units, bounded labels: never a uid);
`source` names the step metric that they show.

`check_step_metrics` makes an unknown step metric an error; tests call it on whole runs. A metric that a user's own
code adds goes under `user/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import product
from typing import Literal, NamedTuple

from streamrl.monitor.schema import CAUSES

MetricKind = Literal["step", "gauge", "counter"]


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    verl: str = ""
    """verl's name for it, if that differs; "same" if it does not."""
    source: str = ""


def _step(name: str, unit: str, help: str, verl: str = "same") -> Metric:
    return Metric(name, "step", unit, help, (), verl)


def _gauge(name: str, unit: str, help: str, *labels: str, source: str = "") -> Metric:
    return Metric(f"streamrl_{name}", "gauge", unit, help, labels, "", source)


def _counter(name: str, unit: str, help: str, *labels: str, source: str = "") -> Metric:
    return Metric(f"streamrl_{name}_total", "counter", unit, help, labels, "", source)


_STATS = "{mean,max,min}"

STEP_TABLE: tuple[Metric, ...] = (
    _step("training/global_step", "steps", "Training step, from 1."),
    _step("training/epoch", "epochs", "Epoch of the dataset of the newest group trained."),
    # Rewards and what GRPO makes of them.
    _step(f"critic/score/{_STATS}", "score", "Outcome score of the rows trained; the reward model's, if there is one."),
    _step(
        f"critic/score/<component>/{_STATS}",
        "score",
        "Component of it (algorithm.gdpo_reward_keys); `function`: what the reward function gave, where a reward "
        "model's score counts.",
        "",
    ),
    _step(f"critic/rewards/{_STATS}", "score", "Score after penalties (KL in the reward, overlong)."),
    _step(f"critic/advantages/{_STATS}", "", "Advantage of the tokens trained."),
    _step(f"critic/returns/{_STATS}", "", "Returns of the tokens trained."),
    _step(f"critic/values/{_STATS}", "", "Values of the tokens trained."),
    _step("critic/vf_explained_var", "", "Share of the returns' variance that the values explain."),
    _step("critic/{vf_loss,vf_clipfrac,vpred_mean,grad_norm,lr}", "", "The critic's update."),
    _step("critic/{optimizer_steps,steps_not_finite}", "", "Its optimizer steps; those left out, as the actor's.", ""),
    _step("reward/ema", "score", "critic/score/mean, exponentially averaged (0.9).", ""),
    _step("groups/{trained,dropped}", "groups", "Prompt groups trained in this step, dropped since the last one.", ""),
    _step("groups/dropped/<reason>", "groups", "Those dropped, by reason.", ""),
    _step("training/filter_groups/evicted_samples", "groups", "Of these: filtered out, as all their scores are equal."),
    _step("training/rollout_failure/evicted_samples", "groups", "Of these: failed, or dead."),
    _step("groups/zero_variance", "groups", "Groups trained whose scores are all equal: they teach nothing.", ""),
    _step("rows/trained", "rows", "Trajectory rows trained.", ""),
    # The update.
    _step("actor/{loss,pg_loss,kl_loss,entropy_loss}", "", "Losses, mean over the optimizer steps."),
    _step("actor/entropy", "nats", "Mean entropy per token of the policy."),
    _step("actor/{pg_clipfrac,pg_clipfrac_lower}", "share", "Tokens whose ratio was clipped; by the dual clip."),
    _step("actor/distillation_loss", "nats", "KL to the teacher, as in the loss.", ""),
    _step("actor/pg_covfrac", "share", "Tokens that clip_cov or kl_cov treated apart.", ""),
    _step("actor/ppo_kl", "nats", "Mean of old minus new log-prob."),
    _step("actor/{kl_coef,reward_kl_penalty,reward_kl_penalty_coeff}", "", "KL to the reference policy."),
    _step("actor/grad_norm", "", "Gradient norm before clipping."),
    _step("actor/lr", "", "Learning rate of the last optimizer step."),
    _step("actor/optimizer_steps", "", "Optimizer steps in this step.", ""),
    _step("actor/steps_not_finite", "", "Optimizer steps left out, as their gradient or loss was not finite.", ""),
    _step(
        "actor/seconds/{read,record,prepare,compute}",
        "seconds",
        "Of timing_s/update_actor: reading rows, keeping them for a replay, making batches of them, computing.",
        "",
    ),
    _step(
        "actor/computed/tokens",
        "tokens",
        "Prompt and response tokens that the update computed: without rows whose advantage is 0, once per epoch.",
        "",
    ),
    _step("actor/<loss>/<figure>", "", "Figures of one policy loss beyond the common ones."),
    # Lengths, tokens, turns.
    _step("{prompt_length,response_length}/{mean,max,min,clip_ratio}", "tokens", "Lengths of the rows trained."),
    _step(f"training/num_turns/{_STATS}", "turns", "Turns of a session."),
    _step(f"tool_call_counts/{_STATS}", "calls", "Tool calls of the sessions that ended since the last step."),
    _step(
        f"agent_loop/{{generate_sequences,tool_calls}}/{_STATS}",
        "seconds",
        "Of the sessions that ended since the last step: in the servers (waiting and decoding), and in tools.",
    ),
    _step(f"agent_loop/{{queue,teacher}}/{_STATS}", "seconds", "Of these: waiting for a slot; for the teacher.", ""),
    _step(
        "waste/tokens/<reason>",
        "tokens",
        "Sampled tokens that will not be trained, by why their group left; cancelled: in flight, too.",
        "",
    ),
    _step("waste/ratio", "share", "Those of all sampled tokens whose end was told since the last step.", ""),
    _step(
        "sampling/length_bias",
        "ratio",
        "Mean tokens of a session trained over that of all sessions, since the start; below 1 long answers are lost. "
        "The length of one that was cancelled is censored, it would have been longer: the mean of all is that of the "
        "Kaplan-Meier estimate, which knows of none longer than the longest that was told.",
        "",
    ),
    _step("global_seqlen/{balanced_min,balanced_max,mean}", "tokens", "Tokens of an update per rank, as balanced."),
    _step("loss_mask/ratio", "share", "Sampled tokens that count in the loss.", ""),
    # Off-policy.
    _step(
        f"training/off_policy/trajectory_staleness/{_STATS}",
        "versions",
        "Age of a row: version being trained minus the version of its newest token.",
    ),
    _step(f"training/off_policy/trajectory_staleness_worst/{_STATS}", "versions", "The same for its oldest token."),
    _step(f"training/off_policy/trajectory_spans/{_STATS}", "versions", "Weight versions within one row, less one."),
    _step("training/off_policy/evicted_samples", "groups", "Groups that left for age since the last step."),
    _step("training/off_policy/token_staleness/{mean,max,p50,p90,p99}", "versions", "Age of a sampled token.", ""),
    _step("training/off_policy/token_age/<versions>", "tokens", "Sampled tokens that are so old (64: or older).", ""),
    _step("training/off_policy/token_staleness_trained/max", "versions", "Of the oldest token in the loss.", ""),
    _step("training/off_policy/masked_ratio", "share", "Sampled tokens left out of the loss for age.", ""),
    _step("training/rollout_probs_diff_{max,mean,std}", "", "Rollout against training probabilities, per token."),
    _step("training/rollout_actor_probs_pearson_corr", "", "Correlation of rollout and training probabilities."),
    _step(
        "rollout_corr/{kl,k3_kl,chi2_token,chi2_seq}",
        "",
        "How far the rollout policy is from the one being trained, before each step: KL estimates, and the variance of "
        "the ratio of a token and of a row.",
    ),
    _step("rollout_corr/{training_ppl,rollout_ppl,training_log_ppl,rollout_log_ppl,ppl_ratio}", "", "Perplexities."),
    _step("rollout_corr/{log_ppl_diff,log_ppl_abs_diff,log_ppl_diff_max,log_ppl_diff_min}", "", "Their differences."),
    _step(
        "rollout_corr/rollout_is_{mean,std,min,max,eff_sample_size,oob_ratio,ratio_fraction_high,ratio_fraction_low,"
        "batch_norm_factor,seq_mean,seq_std,seq_min,seq_max,seq_max_deviation,seq_fraction_high,seq_fraction_low}",
        "",
        "Importance weights of the rollout correction.",
    ),
    _step("rollout_corr/{rollout_rs_masked_fraction,rollout_rs_seq_masked_fraction}", "share", "Rejected by it."),
    _step("rollout_corr/rollout_rs_<statistic>_masked_fraction", "share", "Tokens that a statistic rejected."),
    # Validation.
    _step(
        "{val-core,val-aux}/<data_source>/<quantity>/{mean,std}@<n>",
        "",
        "Validation, e.g. val-core/calculator/reward/mean@1: over all n answers; in the greedy pass the quantity is "
        "reward_greedy. val-core is acc where every answer has one, else reward.",
    ),
    _step(
        "{val-core,val-aux}/<data_source>/<quantity>/{best,worst,maj}@<n>/{mean,std}",
        "",
        "The best, the worst and the most frequent of n answers, by 1000 seeded draws from all.",
    ),
    _step("val-aux/mean/<mode>", "score", "Mean score over all data sources: sampled, greedy.", ""),
    _step("val-aux/mean/<mode>/acc", "share", "Of acc, where every answer has one; summary.json tells it then.", ""),
    _step("val-aux/versions/{min,max}", "versions", "Oldest and newest weights that sampled any answer.", ""),
    _step(f"val-aux/num_turns/{_STATS}", "turns", "Turns in validation."),
    # Time.
    _step(
        "timing_s/{step,gen,reward_model,old_log_prob,ref,teacher,values,adv,update_critic,update_actor,update_weights,"
        "save_checkpoint,testing}",
        "seconds",
        "Length of a stage. `gen` is what the trainer waited for rows; stages overlap in asynchronous modes. `step` is "
        "without what is done between two steps: a checkpoint, a validation that stops training.",
    ),
    _step("timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor}", "ms", "The same per token trained."),
    _step("perf/total_num_tokens", "tokens", "Prompt and response tokens of the rows trained."),
    _step(
        "perf/time_per_step",
        "seconds",
        "Since the step before ended, with what was done between the two (a checkpoint, a validation that stops "
        "training); of the first step after a start timing_s/step.",
        "same, of timing_s/step",
    ),
    _step(
        "perf/throughput",
        "tokens/s",
        "perf/total_num_tokens per second of perf/time_per_step and training rank.",
        "same, per trainer and rollout GPU",
    ),
    _step("perf/{max_memory_allocated_gb,max_memory_reserved_gb}", "GiB", "Of a training rank's GPU, the largest."),
    _step(
        "perf/mfu/{actor,critic,actor_infer}",
        "share",
        "FLOPs of the model (training; recomputing old log-probs) over what the ranks' devices promise in that time.",
        "same, which counts the table of the input embeddings, too",
    ),
    _step("perf/cpu_memory_used_gb", "GiB", "In use on the trainer's node."),
    _step(
        "perf/generated_tokens_per_s",
        "tokens/s",
        "Tokens sampled by all servers, also for a validation, by the time in which they were: since the end of the "
        "step before, or the start. Not there where it is unknown.",
        "",
    ),
    _step("rollout/{running,waiting}", "requests", "In the servers at the end of the step: with a slot, without.", ""),
    _step(
        "rollout/{queue_s,first_token_s}",
        "seconds",
        "Of the requests that made their first token since the last step: their wait for a slot, and the time from "
        "their arrival at the server to that token; means. A request that went on elsewhere counts in both servers.",
        "",
    ),
    _step(
        "rollout/prefix_hits",
        "share",
        "Of the tokens with which requests got their slots: found in a prefix cache. Not there where no server tells.",
        "",
    ),
    _step(f"rollout/tokens_per_s/{_STATS}", "tokens/s", "Of a server, between the last two looks at it.", ""),
    _step("rollout/preemptions", "requests", "That lost their cache for want of room, since the last step.", ""),
    _step("rollout/cache_usage/max", "share", "Of the KV cache, in use in the fullest server.", ""),
    _step("rollout/weights_age_s/max", "seconds", "Since the server with the oldest weights took them.", ""),
    _step("teacher/tokens_scored", "tokens", "Scored by the teacher's servers since the last step.", ""),
    _step("teacher/queue_s", "seconds", "What a row waited there for its turn, mean since the last step.", ""),
    _step("overlap/efficiency", "share", "T* / measured step time.", ""),
    _step(
        "overlap/{step_s,bound_s,train_s,gen_s,sync_s}",
        "seconds",
        "Measured step, its bound T*, and T_train, T_gen, T_sync, from which that follows.",
        "",
    ),
    _step("overlap/cpu_bound_s", "seconds", "CPU seconds of the run / cores, on the trainer's node.", ""),
    _step("overlap/generation_{busy,stalled,idle}_s", "seconds", "What the mean engine did during the step.", ""),
    _step(
        f"lost_s/{{{','.join(CAUSES)}}}",
        "seconds",
        "Time of the step in which the training devices did not train, by cause.",
        "",
    ),
    # Queue and weights.
    _step("queue/{pending,generating,ready,training}", "groups", "Depth of the training partition by state.", ""),
    _step("queue/{rows,bytes,redelivered,dead}", "", "Live rows and bytes; groups redelivered and dead, in all.", ""),
    _step("weights/{version,bytes,rollout_version_min}", "", "The trainer's version, its size, the oldest served.", ""),
    _step(
        "weights/seconds/{gather,transfer,apply,commit,pause}",
        "seconds",
        "Weight sync: until a rank has its share in host memory, until all of it lies where servers find it, until "
        "they have it aside, until they serve it, and the longest in which a server made no token for it.",
        "",
    ),
    _step(
        "data/{bytes_read,bytes_written,bytes_trainer}",
        "bytes",
        "Read and written by the ranks; passed through the trainer process.",
        "",
    ),
    _step("user/<name>", "", "A metric of the user's own.", ""),
)

PROMETHEUS_TABLE: tuple[Metric, ...] = (
    _gauge("queue_groups", "", "Prompt groups that are not done, by state.", "partition", "state"),
    _gauge("queue_rows", "", "Live trajectory and prompt rows.", "partition"),
    _gauge("queue_partition_bytes", "bytes", "Live bytes.", "partition"),
    _gauge("queue_oldest_age_seconds", "seconds", "Age of the oldest group in a state.", "partition", "state"),
    _gauge("credits_available", "", "Prompt groups that may still be admitted.", "partition"),
    _counter("groups_trained", "", "Prompt groups trained.", "partition"),
    _counter("groups_dropped", "", "Prompt groups dropped.", "partition", "reason"),
    _counter("groups_redelivered", "", "Prompt groups leased again after their lease was lost.", "partition"),
    _counter("groups_dead", "", "Prompt groups given up after max_deliver attempts.", "partition"),
    _gauge("queue_bytes", "bytes", "Bytes in segments.", "unit", "tier"),
    _gauge("queue_budget_bytes", "bytes", "Bytes that segments may take.", "unit", "tier"),
    _gauge("unit_up", "", "1 while the storage unit answers.", "unit"),
    _gauge("queue_clients", "", "Connected clients."),
    _gauge("train_step", "steps", "Last training step.", source="training/global_step"),
    _counter("train_tokens", "tokens", "Tokens trained.", source="perf/total_num_tokens"),
    _counter("teacher_tokens", "tokens", "Tokens scored by the teacher's servers.", source="teacher/tokens_scored"),
    _gauge("teacher_queue_seconds", "seconds", "Wait of a row there, mean of the last step.", source="teacher/queue_s"),
    _counter("train_rows", "rows", "Trajectory rows trained.", source="rows/trained"),
    _gauge("reward_mean", "score", "Mean score of the last step.", source="critic/score/mean"),
    _gauge(
        "staleness_versions",
        "versions",
        "Age of the rows of the last step.",
        "stat",
        source=f"training/off_policy/trajectory_staleness/{_STATS}",
    ),
    _gauge(
        "token_staleness_versions",
        "versions",
        "Age of the sampled tokens of the last step.",
        "stat",
        source="training/off_policy/token_staleness/{mean,max,p50,p90,p99}",
    ),
    _gauge("waste_ratio", "share", "Sampled tokens that will not be trained, last step.", source="waste/ratio"),
    _gauge("length_bias_ratio", "ratio", "Length of trained sessions to all, so far.", source="sampling/length_bias"),
    _gauge("weight_version", "versions", "Version held by the trainer and by each engine.", "role", "engine"),
    _gauge("weight_age_seconds", "seconds", "Since an engine took the weights that it serves.", "engine"),
    _gauge("weight_sync_seconds", "seconds", "Weight sync of the last step.", source="overlap/sync_s"),
    _gauge(
        "weight_sync_stage_seconds",
        "seconds",
        "Of that, by stage: gather, transfer, apply, commit, pause.",
        "stage",
        source="weights/seconds/{gather,transfer,apply,commit,pause}",
    ),
    _gauge("rollout_servers", "", "LLM servers, by state: serving, asleep, draining, out. Always current.", "state"),
    _counter("rollout_outages", "", "Times that a server went out of service: died, hung, fell behind.", "engine"),
    _gauge("engine_requests", "", "Requests in an engine, by state: running, waiting.", "engine", "state"),
    _gauge("engine_slots", "", "Requests that an engine runs together.", "engine"),
    _gauge("engine_asleep", "", "1 while it sleeps.", "engine"),
    _gauge("engine_cache_usage_ratio", "share", "KV cache in use.", "engine"),
    _counter("engine_tokens", "tokens", "Tokens sampled since the engine started.", "engine"),
    _counter("engine_busy_seconds", "seconds", "Time with a running request.", "engine"),
    _counter("engine_first_tokens", "", "Requests that made their first token.", "engine"),
    _counter("engine_queue_seconds", "seconds", "What these waited for a slot.", "engine"),
    _counter("engine_first_token_seconds", "seconds", "From their arrival to their first token.", "engine"),
    _counter("engine_prompt_tokens", "tokens", "With which requests got their slots, where that is known.", "engine"),
    _counter("engine_cached_tokens", "tokens", "Of these: found in the prefix cache.", "engine"),
    _counter("engine_preemptions", "", "Requests that lost their cache for want of room.", "engine"),
    _counter("stage_busy_seconds", "seconds", "Time in which a stage worked.", "stage"),
    _counter("stage_wait_seconds", "seconds", "Time in which a stage waited, by cause.", "stage", "cause"),
    _gauge("overlap_ratio", "share", "Overlap efficiency of the last step.", source="overlap/efficiency"),
    _counter("process_restarts", "", "Processes started again.", "role"),
    _gauge("metrics_last_update_timestamp_seconds", "seconds", "When these numbers last changed (Unix time)."),
    _gauge("build_info", "", "Always 1; the version is the label.", "version"),
)

METRICS: tuple[Metric, ...] = STEP_TABLE + PROMETHEUS_TABLE
PROMETHEUS: dict[str, Metric] = {metric.name: metric for metric in PROMETHEUS_TABLE}


def expand(name: str) -> list[str]:
    """The names that a table entry stands for: `a/{x,y}` gives a/x and a/y; `<free>` parts are kept."""
    parts = re.split(r"\{([^}]*)\}", name)
    return ["".join(choice) for choice in product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts)))]


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split("(<[^>]*>)", name)
    free = {"<data_source>": ".+"}  # often a name of the hub, with a slash
    return re.compile("".join(free.get(p, "[^/]+") if p.startswith("<") else re.escape(p) for p in parts))


_EXACT = {name: metric for metric in STEP_TABLE for name in expand(metric.name) if "<" not in name}
_PATTERNS = [(_pattern(name), metric) for metric in STEP_TABLE for name in expand(metric.name) if "<" in name]


def step_metric(name: str) -> Metric | None:
    """The table entry of a step metric, or None."""
    found = _EXACT.get(name)
    return found or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def unknown_step_metrics(names: Iterable[str]) -> list[str]:
    return [name for name in names if step_metric(name) is None]


def check_step_metrics(metrics: Mapping[str, object]) -> None:
    """Raise ValueError naming the keys that the table does not know, each with the nearest known name."""
    unknown = unknown_step_metrics(metrics)
    if unknown:
        hints = [(name, get_close_matches(name, _EXACT, n=1)) for name in unknown]
        text = ", ".join(f"{name!r}" + (f" (nearest: {near[0]!r})" if near else "") for name, near in hints)
        raise ValueError(f"step metrics that monitor/registry.py does not know: {text}")


def by_reason_class(dropped: Mapping[str, int]) -> dict[str, int]:
    """Counts by the class of the reason ("failed: ValueError ..." counts as "failed"), so that labels stay bounded."""
    totals: dict[str, int] = {}
    for reason, count in dropped.items():
        name = reason.split(":", 1)[0].strip() or "unknown"
        totals[name] = totals.get(name, 0) + count
    return totals
