/**
 * The Gantt chart, on a canvas: lanes of bars between two times, hatched where something waits.
 *
 * `layout` says where lanes lie; `paint` draws; `hit` says what lies under a point. None of them keeps anything.
 */
import { colour, look } from "../colours";
import { clock } from "../format";
import type { Bar, Lane, Window } from "../wire";

export const LABEL_WIDTH = 104;
const AXIS = 24;
const GAP = 6;
const HEIGHTS: Record<Lane["kind"], number> = { trainer: 34, rank: 20, engine: 30, feeder: 16, validation: 16, worker: 40 };

export interface Placed {
  lane: Lane;
  top: number;
  height: number;
}

export function layout(lanes: Lane[]): { placed: Placed[]; height: number } {
  let top = AXIS;
  const placed = lanes.map((lane) => {
    const height = HEIGHTS[lane.kind];
    const here = { lane, top, height };
    top += height + GAP;
    return here;
  });
  return { placed, height: top + 2 };
}

export function labelWidth(width: number): number {
  return width < 520 ? 64 : LABEL_WIDTH;
}

export function paint(canvas: HTMLCanvasElement, shown: Window, from: number, to: number): void {
  const width = canvas.clientWidth;
  const { placed, height } = layout(shown.lanes);
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  if (!pen) return;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const left = labelWidth(width);
  const x = (time: number) => left + ((time - from) / (to - from)) * (width - left);
  const brush = new Brush(pen);
  bands(pen, shown, x, left, height, width);
  axis(pen, from, to, x, height);
  for (const { lane, top, height: tall } of placed) {
    pen.fillStyle = colour("--inset");
    pen.fillRect(left, top, width - left, tall);
    if (lane.area) area(pen, lane, shown, x, top, tall);
    for (const bar of lane.bars) block(brush, bar, x, left, width, lane.area ? top + tall - 9 : top, lane.area ? 9 : tall);
    for (const bar of lane.over ?? []) block(brush, bar, x, left, width, top, 7);
    if (lane.versions) versions(pen, lane.versions, x, left, width, top + tall - 9);
    pen.fillStyle = colour("--text");
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.fillText(fitted(pen, lane.label, left - 10), 2, top + tall / 2);
  }
}

function block(brush: Brush, [start, end, what]: Bar, x: (time: number) => number, left: number, right: number, top: number, height: number): void {
  const begin = Math.max(left, x(start));
  const stop = Math.min(right, x(end));
  if (stop <= left || begin >= right) return;
  brush.fill(what, begin, top, Math.max(0.7, stop - begin), height);
}

/** Alternating ground where the trainer's steps, each a version of the weights, follow one another. */
function bands(pen: CanvasRenderingContext2D, shown: Window, x: (time: number) => number, left: number, height: number, width: number): void {
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const step of shown.steps) {
    const begin = Math.max(left, x(step.start));
    const end = Math.min(width, x(step.end));
    if (end <= left) continue;
    if (step.step % 2 === 0) {
      pen.fillStyle = colour("--note-soft");
      pen.globalAlpha = 0.7;
      pen.fillRect(begin, 0, end - begin, height);
      pen.globalAlpha = 1;
    }
    if (end - begin > 26) {
      pen.fillStyle = colour("--muted");
      pen.fillText(`${step.step}`, (begin + end) / 2, 1);
    }
  }
}

function axis(pen: CanvasRenderingContext2D, from: number, to: number, x: (time: number) => number, height: number): void {
  const choices = [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const most = Math.max(2, (x(to) - x(from)) / 85);
  const every = choices.find((each) => (to - from) / each <= most) ?? 86400;
  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--muted");
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (let time = Math.ceil(from / every) * every; time < to; time += every) {
    const at = Math.round(x(time)) + 0.5;
    pen.beginPath();
    pen.moveTo(at, 12);
    pen.lineTo(at, height);
    pen.stroke();
    const text = every >= 1 ? clock(time) : `${(time % 60).toFixed(every < 0.1 ? 3 : 2)} s`;
    pen.fillText(text, at, 12);
  }
}

/** The version of the weights, where an engine took it and there is room for the text. */
function versions(pen: CanvasRenderingContext2D, taken: [number, number][], x: (time: number) => number, left: number, right: number, y: number): void {
  pen.font = "600 9px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.textBaseline = "top";
  pen.fillStyle = colour("--card");
  taken.forEach(([time, version], i) => {
    const begin = x(time);
    const room = Math.min(right, x(taken[i + 1]?.[0] ?? Infinity)) - begin;
    if (begin >= left && begin < right && room > 30) pen.fillText(`v${version}`, begin + 3, y);
  });
}

/** How many sessions were under way, as an area; its greatest value is printed. */
function area(pen: CanvasRenderingContext2D, lane: Lane, shown: Window, x: (time: number) => number, top: number, height: number): void {
  const values = lane.area ?? [];
  const most = Math.max(1, ...values);
  const each = (shown.to - shown.from) / values.length;
  const floor = top + height - 10;
  pen.fillStyle = colour("--c-generating");
  pen.globalAlpha = 0.55;
  pen.beginPath();
  pen.moveTo(x(shown.from), floor);
  values.forEach((value, i) => {
    const y = floor - (value / most) * (height - 14);
    pen.lineTo(x(shown.from + i * each), y);
    pen.lineTo(x(shown.from + (i + 1) * each), y);
  });
  pen.lineTo(x(shown.to), floor);
  pen.fill();
  pen.globalAlpha = 1;
}

function fitted(pen: CanvasRenderingContext2D, text: string, width: number): string {
  if (pen.measureText(text).width <= width) return text;
  let shown = text;
  while (shown.length > 1 && pen.measureText(`${shown}…`).width > width) shown = shown.slice(0, -1);
  return `${shown}…`;
}

/** Fills with the colour of an activity, hatched where it is a wait. */
class Brush {
  private patterns = new Map<string, CanvasPattern | string>();
  constructor(private pen: CanvasRenderingContext2D) {}

  fill(what: string, left: number, top: number, width: number, height: number): void {
    this.pen.fillStyle = this.style(what);
    this.pen.fillRect(left, top, width, height);
  }

  private style(what: string): CanvasPattern | string {
    let style = this.patterns.get(what);
    if (style === undefined) {
      const { colour: name, hatched } = look(what);
      style = hatched ? (hatch(this.pen, colour(name)) ?? colour(name)) : colour(name);
      this.patterns.set(what, style);
    }
    return style;
  }
}

function hatch(pen: CanvasRenderingContext2D, ink: string): CanvasPattern | null {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const small = tile.getContext("2d");
  if (!small) return null;
  small.fillStyle = ink;
  small.globalAlpha = 0.35;
  small.fillRect(0, 0, 8, 8);
  small.globalAlpha = 1;
  small.strokeStyle = ink;
  small.lineWidth = 2.4;
  small.beginPath();
  for (const shift of [-8, 0, 8]) {
    small.moveTo(shift - 1, 9);
    small.lineTo(shift + 9, -1);
  }
  small.stroke();
  return pen.createPattern(tile, "repeat");
}

export interface Hit {
  lane: Lane;
  time: number;
  bar?: Bar;
  sessions?: number;
  version?: number;
}

/** What lies under a point of the canvas. */
export function hit(shown: Window, from: number, to: number, width: number, px: number, py: number): Hit | null {
  const left = labelWidth(width);
  const row = layout(shown.lanes).placed.find(({ top, height }) => py >= top && py < top + height);
  if (!row || px < left) return null;
  const time = from + ((px - left) / (width - left)) * (to - from);
  const near = (1.5 * (to - from)) / (width - left);
  const { lane } = row;
  const over = (bars: Bar[]) => bars.find(([start, end]) => time >= start - near && time <= end + near);
  const found: Hit = { lane, time };
  const bar = (py < row.top + 7 && lane.over ? over(lane.over) : undefined) ?? over(lane.bars);
  if (bar) found.bar = bar;
  if (lane.area) {
    const value = lane.area[Math.floor(((time - shown.from) / (shown.to - shown.from)) * lane.area.length)];
    if (value !== undefined) found.sessions = value;
  }
  const version = lane.versions?.filter(([at]) => at <= time).at(-1);
  if (version) found.version = version[1];
  return found;
}
