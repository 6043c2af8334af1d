/** How old is what is trained, and how soon do new weights arrive? */
import { Card, Table } from "../parts/common";
import { count } from "../format";
import { useKnown } from "../store";
import { MetricCharts, type MetricChart } from "./metrics";

const OFF = "training/off_policy";
const CHARTS: MetricChart[] = [
  {
    title: "Age of tokens",
    note: "versions between sampling and training",
    lines: [
      { label: "median", colour: "--accent", metric: `${OFF}/token_staleness/p50` },
      { label: "90 %", colour: "--c-ready", metric: `${OFF}/token_staleness/p90` },
      { label: "oldest", colour: "--c-wait", faint: true, metric: `${OFF}/token_staleness/max` },
    ],
  },
  {
    title: "Age of rows",
    note: "by their newest and their oldest token",
    lines: [
      { label: "newest token", colour: "--accent", metric: `${OFF}/trajectory_staleness/mean` },
      { label: "oldest token", colour: "--c-wait", metric: `${OFF}/trajectory_staleness_worst/mean` },
      { label: "oldest of all", colour: "--c-wait", faint: true, metric: `${OFF}/trajectory_staleness_worst/max` },
    ],
  },
  {
    title: "Versions in a row",
    note: "weight versions within one trajectory, less one",
    lines: [
      { label: "mean", colour: "--accent", metric: `${OFF}/trajectory_spans/mean` },
      { label: "most", colour: "--c-pending", faint: true, metric: `${OFF}/trajectory_spans/max` },
    ],
  },
  {
    title: "Left for age",
    note: "groups since the last step; tokens masked",
    lines: [
      { label: "groups dropped", colour: "--c-wait", metric: `${OFF}/evicted_samples` },
      { label: "share masked", colour: "--c-ready", metric: `${OFF}/masked_ratio` },
    ],
  },
  {
    title: "Weight sync",
    note: "seconds, by stage",
    lines: [
      { label: "whole", colour: "--c-sync", metric: "overlap/sync_s" },
      { label: "gather", colour: "--c-training", metric: "weights/seconds/gather" },
      { label: "transfer", colour: "--c-checkpoint", metric: "weights/seconds/transfer" },
      { label: "apply", colour: "--c-generating", metric: "weights/seconds/apply" },
      { label: "pause", colour: "--c-wait", metric: "weights/seconds/pause" },
    ],
  },
  {
    title: "Waste",
    note: "share of the sampled tokens that will not be trained",
    lines: [{ label: "waste", colour: "--accent", metric: "waste/ratio" }],
  },
];

export function Staleness() {
  const { queue, overview, fleet } = useKnown();
  const dropped = Object.entries(queue?.partitions.find((part) => part.name === "train")?.dropped ?? {});
  return (
    <div class="stack">
      <MetricCharts charts={CHARTS} />
      <div class="grid2">
        <Card title="Versions in service" note={overview?.trainer_version != null ? `the trainer has v${overview.trainer_version}` : ""}>
          <Table
            label="Version of each engine"
            head={["engine", "version", "behind"]}
            numbers={[1, 2]}
            rows={(fleet?.engines ?? []).map((engine) => [
              engine.name,
              typeof engine["version"] === "number" ? `v${engine["version"]}` : "–",
              typeof engine["version"] === "number" && overview?.trainer_version != null ? String(overview.trainer_version - engine["version"]) : "–",
            ])}
          />
        </Card>
        <Card title="Dropped" note="groups, by reason">
          {dropped.length ? <Table label="Dropped by reason" head={["reason", "groups"]} numbers={[1]} rows={dropped.map(([name, n]) => [name, count(n)])} /> : <p class="muted">None.</p>}
        </Card>
      </div>
    </div>
  );
}
