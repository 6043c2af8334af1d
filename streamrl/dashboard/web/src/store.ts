/**
 * What the page knows of the run, kept up to date by the server's event stream.
 *
 * A snapshot replaces everything, a delta replaces its small parts and continues charts and steps. The browser repeats
 * the id of the last frame when it connects again, so nothing is missed or counted twice.
 */
import { useEffect, useState } from "preact/hooks";
import type { Columns, Fleet, Frame, Overview, Pipeline, Queue } from "./wire";

const LONGEST = 4000;

export interface Known {
  now: number;
  overview?: Overview;
  queue?: Queue;
  pipeline?: Pipeline;
  fleet?: Fleet;
  timeline?: { first: number; last: number };
  notes: { time: number; kind: string; text: string }[];
  validations: Record<string, number | string>[];
  names: string[];
  charts: Record<string, number[][]>;
  steps: Columns;
}

export type Connection = "connecting" | "open" | "lost" | "key";

class Store {
  known: Known = { now: 0, notes: [], validations: [], names: [], charts: {}, steps: { step: [] } };
  connection: Connection = "connecting";
  hasKey = false;
  /** Id of the last frame, and how many came: for tests, which look at window.streamrl. */
  lastId = "";
  frames = 0;
  private skew = 0;
  private source?: EventSource;
  private listeners = new Set<() => void>();

  /** The server's wall clock, in seconds. */
  now(): number {
    return Date.now() / 1000 + this.skew;
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  async start(): Promise<void> {
    const match = /^#key=([\w-]{32,})$/.exec(location.hash);
    if (match) {
      history.replaceState(null, "", "#overview"); // the key stays in no history
      await post("/api/login", { key: match[1] }).catch(() => undefined);
    }
    await this.enter();
  }

  async enter(): Promise<void> {
    try {
      const who = (await (await fetch("/api/whoami")).json()) as { key: boolean; reads: boolean };
      this.hasKey = who.key;
      if (!who.reads) {
        this.set("key");
        return;
      }
    } catch {
      this.set("lost");
    }
    this.connect();
  }

  private connect(): void {
    this.source?.close();
    const source = new EventSource(this.lastId ? `/api/stream?after=${encodeURIComponent(this.lastId)}` : "/api/stream");
    this.source = source;
    const take = (event: MessageEvent<string>) => this.take(event);
    source.addEventListener("snapshot", take);
    source.addEventListener("delta", take);
    source.onopen = () => this.set("open");
    source.onerror = () => {
      this.set("lost");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => void this.enter(), 1500); // it was refused
    };
  }

  private take(event: MessageEvent<string>): void {
    const frame = JSON.parse(event.data) as Frame;
    this.known = event.type === "snapshot" ? replaced(frame) : continued(this.known, frame);
    this.skew = frame.now - Date.now() / 1000;
    this.lastId = event.lastEventId;
    this.frames += 1;
    this.connection = "open";
    this.tell();
  }

  private set(connection: Connection): void {
    this.connection = connection;
    this.tell();
  }

  private tell(): void {
    for (const listener of this.listeners) listener();
  }
}

export const store = new Store();
Object.assign(window, { streamrl: store });

function replaced(frame: Frame): Known {
  return {
    notes: [],
    validations: [],
    names: [],
    ...frame,
    charts: frame.charts ?? {},
    steps: frame.steps ?? { step: [] },
  };
}

function continued(known: Known, frame: Frame): Known {
  const { charts, steps, ...parts } = frame;
  const next: Known = { ...known, ...parts, charts: known.charts, steps: known.steps };
  if (charts) {
    next.charts = { ...known.charts };
    for (const [name, rows] of Object.entries(charts)) {
      next.charts[name] = shortened([...(known.charts[name] ?? []), ...rows]);
    }
  }
  if (steps) next.steps = joined(known.steps, steps);
  return next;
}

function joined(before: Columns, more: Columns): Columns {
  const count = before["step"]?.length ?? 0;
  const added = more["step"]?.length ?? 0;
  const columns: Columns = {};
  for (const name of new Set([...Object.keys(before), ...Object.keys(more)])) {
    const old = before[name] ?? new Array<null>(count).fill(null);
    columns[name] = shortened([...old, ...(more[name] ?? new Array<null>(added).fill(null))]);
  }
  return columns;
}

/** The older half gets sparser where a series grows too long. */
function shortened<T>(rows: T[]): T[] {
  if (rows.length <= LONGEST) return rows;
  const half = rows.length >> 1;
  return [...rows.slice(0, half).filter((_, i) => i % 2 === 0), ...rows.slice(half)];
}

/** What is known now; the component is drawn again when that changes. */
export function useKnown(): Known {
  const [, redraw] = useState(0);
  useEffect(() => store.subscribe(() => redraw((n) => n + 1)), []);
  return store.known;
}

/** The time, a second at a time, so that ages grow while nothing arrives. */
export function useNow(): number {
  const [now, set] = useState(store.now());
  useEffect(() => {
    const timer = setInterval(() => set(store.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return Math.max(now, store.known.now);
}

export async function post(path: string, body: unknown): Promise<unknown> {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  const told = (await answer.json()) as { error?: string };
  if (!answer.ok) throw new Error(told.error ?? `status ${answer.status}`);
  return told;
}

export async function get<T>(path: string, parameters: Record<string, string | number>): Promise<T> {
  const query = new URLSearchParams(Object.entries(parameters).map(([k, v]) => [k, String(v)]));
  const answer = await fetch(`${path}?${query.toString()}`);
  if (!answer.ok) throw new Error(((await answer.json()) as { error?: string }).error ?? `status ${answer.status}`);
  return (await answer.json()) as T;
}
