/** A time series: lines or stacked areas, drawn by uPlot, with the values under the pointer in words. */
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { colour } from "../colours";
import { clock, figure } from "../format";

export interface Line {
  label: string;
  colour: string;
  /** Drawn thin and dashed: a bound, a raw value behind a smoothed one. */
  faint?: boolean;
}

export interface ChartProps {
  title: string;
  /** Ascending. */
  x: number[];
  lines: Line[];
  /** One array per line. */
  values: (number | null)[][];
  time?: boolean;
  stacked?: boolean;
  height?: number;
  show?: (value: number) => string;
}

/** Each line on top of the sum of those before it. */
function piled(values: (number | null)[][]): (number | null)[][] {
  const sums = new Array<number>(values[0]?.length ?? 0).fill(0);
  return values.map((column) => column.map((value, i) => (sums[i] = (sums[i] ?? 0) + (value ?? 0))));
}

export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [at, setAt] = useState<number | null>(null);
  const shape = props.lines.map((line) => `${line.label}${line.colour}`).join() + props.stacked + props.height;

  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(latest.current, element.clientWidth, setAt), data(latest.current), element);
    };
    draw();
    const sized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: latest.current.height ?? 150 }));
    sized.observe(element);
    window.addEventListener("themed", draw);
    return () => {
      sized.disconnect();
      window.removeEventListener("themed", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => plot.current?.setData(data(props)), [props.x, props.values]);

  const show = props.show ?? ((value: number) => figure(value));
  const x = at !== null ? props.x[at] : undefined;
  const told = props.lines
    .map((line, i) => [line, at !== null ? props.values[i]?.[at] : props.values[i]?.findLast((value) => value != null)] as const)
    .filter((pair): pair is readonly [Line, number] => pair[1] != null);
  return (
    <figure class="chart" aria-label={`${props.title}: ${told.map(([line, value]) => `${line.label} ${show(value)}`).join(", ")}`} role="group">
      <div ref={place} aria-hidden="true" />
      <figcaption class="legend">
        <ul class="legend" style={{ margin: 0 }}>
          {told.map(([line, value]) => (
            <li key={line.label} style={{ "--part": `var(${line.colour})` }}>
              <i />
              {line.label} <b>{show(value)}</b>
            </li>
          ))}
          {x !== undefined && <li>{props.time ? clock(x) : `step ${x}`}</li>}
        </ul>
      </figcaption>
    </figure>
  );
}

/** Steps are whole numbers. */
const WHOLE = [1, 2, 5].flatMap((each) => [0, 1, 2, 3, 4, 5, 6].map((power) => each * 10 ** power)).sort((a, b) => a - b);

/** A level holds until the next one is told. */
const stepped = uPlot.paths.stepped?.({ align: 1 });

/** The values with some room; a constant lies in the middle, and what is never negative starts at 0. */
function around(_u: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low == null || high == null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(low, 2 * low, 0), Math.max(low, 2 * low, 0)];
  const room = 0.08 * (high - low);
  return [low >= 0 && low - room < 0.35 * high ? 0 : low - room, high + room];
}

function data(props: ChartProps): uPlot.AlignedData {
  const values = props.stacked ? piled(props.values).reverse() : props.values;
  return [props.x, ...values] as uPlot.AlignedData;
}

function options(props: ChartProps, width: number, setAt: (index: number | null) => void): uPlot.Options {
  const muted = colour("--muted");
  const axis: uPlot.Axis = {
    stroke: muted,
    font: "11px system-ui, sans-serif",
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  const lines = props.stacked ? [...props.lines].reverse() : props.lines;
  return {
    width,
    height: props.height ?? 150,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: props.time ?? false }, y: { range: props.stacked ? (_u, _low, high) => [0, Math.max(1, high * 1.05)] : around } },
    axes: [
      { ...axis, size: 26, space: 70, ...(props.time ? { values: (_u: uPlot, ticks: number[]) => ticks.map(clock) } : { incrs: WHOLE }) },
      { ...axis, size: 46, space: 28, values: (_u, ticks) => ticks.map((tick) => figure(tick)) },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: line.faint ? 1 : props.stacked ? 1 : 1.75,
        ...(line.faint ? { dash: [4, 3] } : {}),
        ...(props.stacked ? { fill: colour(line.colour) } : {}),
        ...(props.stacked && stepped ? { paths: stepped } : {}),
        points: { show: props.x.length < 3 },
        spanGaps: true,
      })),
    ],
    hooks: { setCursor: [(u: uPlot) => setAt(u.cursor.idx ?? null)] },
  };
}
