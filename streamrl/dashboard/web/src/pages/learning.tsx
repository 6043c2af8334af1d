/** Does it learn, and is the update sound? */
import { Card, Table } from "../parts/common";
import { figure } from "../format";
import { useKnown } from "../store";
import { MetricCharts, type MetricChart } from "./metrics";

const one = (title: string, metric: string, note?: string): MetricChart => ({
  title,
  ...(note ? { note } : {}),
  lines: [{ label: title.toLowerCase(), colour: "--accent", metric }],
});

const CHARTS: MetricChart[] = [
  {
    title: "Reward",
    lines: [
      { label: "mean", colour: "--c-pending", faint: true, metric: "critic/score/mean" },
      { label: "smoothed", colour: "--accent", metric: "reward/ema" },
    ],
  },
  {
    title: "Groups",
    note: "trained; of these with equal scores, which teach nothing; dropped",
    lines: [
      { label: "trained", colour: "--c-training", metric: "groups/trained" },
      { label: "zero variance", colour: "--c-ready", metric: "groups/zero_variance" },
      { label: "dropped", colour: "--c-wait", metric: "groups/dropped" },
    ],
  },
  one("Entropy", "actor/entropy", "nats per token"),
  one("KL to old policy", "actor/ppo_kl", "nats"),
  one("Clipped tokens", "actor/pg_clipfrac", "share"),
  one("Gradient norm", "actor/grad_norm", "before clipping"),
  one("Learning rate", "actor/lr"),
  one("Loss", "actor/loss"),
  {
    title: "Answer length",
    note: "tokens",
    lines: [
      { label: "mean", colour: "--accent", metric: "response_length/mean" },
      { label: "longest", colour: "--c-pending", faint: true, metric: "response_length/max" },
    ],
  },
  one("Cut answers", "response_length/clip_ratio", "share at the greatest length"),
  one("Rollout against training", "training/rollout_probs_diff_mean", "difference of probabilities per token"),
  one("Turns", "training/num_turns/mean", "of a session"),
];

export function Learning() {
  const { validations } = useKnown();
  const names = [...new Set(validations.flatMap((line) => Object.keys(line)))].filter((name) => name.startsWith("val-core/") && !name.endsWith("/std"));
  return (
    <div class="stack">
      <MetricCharts charts={CHARTS} />
      {validations.length > 0 && (
        <Card title="Validations">
          <Table
            label="Validations"
            head={["step", "when", ...names.map((name) => name.replace("val-core/", ""))]}
            numbers={[0, ...names.map((_, i) => i + 2)]}
            rows={[...validations].reverse().map((line) => [
              String(line["step"]),
              String(line["validation"]),
              ...names.map((name) => (typeof line[name] === "number" ? figure(line[name]) : "–")),
            ])}
          />
        </Card>
      )}
    </div>
  );
}
