/** Charts of step metrics, for the pages that are lists of them. */
import { useEffect, useState } from "preact/hooks";
import { Chart, type Line } from "../parts/chart";
import { Card } from "../parts/common";
import { get, useKnown } from "../store";
import type { Columns } from "../wire";

export interface MetricChart {
  title: string;
  note?: string;
  lines: (Line & { metric: string })[];
}

/** Columns of these metrics, fetched when a step has ended, but not more than every second. */
export function useSteps(names: string[]): Columns {
  const known = useKnown();
  const [columns, set] = useState<Columns>({ step: [] });
  const step = known.steps["step"]?.at(-1) ?? 0;
  const key = names.join();
  useEffect(() => {
    let alive = true;
    const timer = setTimeout(() => {
      void get<Columns>("/api/steps", { names: key, points: 1500 })
        .then((found) => alive && set(found))
        .catch(() => undefined); // the head tells that the server is gone
    }, columns["step"]?.length ? 1000 : 0);
    return () => {
      alive = false;
      clearTimeout(timer);
    };
  }, [key, step]);
  return columns;
}

export function MetricCharts(props: { charts: MetricChart[] }) {
  const columns = useSteps(props.charts.flatMap((chart) => chart.lines.map((line) => line.metric)));
  const x = (columns["step"] ?? []) as number[];
  const shown = props.charts
    .map((chart) => ({ ...chart, lines: chart.lines.filter((line) => columns[line.metric]?.some((value) => value !== null)) }))
    .filter((chart) => chart.lines.length);
  if (!x.length) return <p class="empty">No step has ended yet.</p>;
  return (
    <div class="grid3">
      {shown.map((chart) => (
        <Card key={chart.title} title={chart.title} note={chart.note}>
          <Chart title={chart.title} x={x} values={chart.lines.map((line) => columns[line.metric] ?? [])} lines={chart.lines} />
        </Card>
      ))}
    </div>
  );
}
