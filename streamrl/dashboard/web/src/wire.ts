/** What the server sends: the shapes of streamrl/dashboard/state, as JSON. */

export type Tone = "good" | "note" | "warn" | "bad";

export interface Alert {
  name: string;
  severity: "bad" | "warn";
  text: string;
  page: string;
  since: number | null;
}

export interface Overview {
  name: string;
  status: string;
  mode: string;
  part: string;
  error: string;
  health: { condition: "live" | "stale" | "dead" | "ended"; why: string; since: number };
  verdict: {
    tone: Tone;
    cause: string;
    headline: string;
    detail: string;
    advice: string;
    share: number | null;
    shares: Record<string, number>;
  };
  step: number;
  total: number;
  seconds_per_step: number | null;
  seconds_left: number | null;
  tokens_per_second: number | null;
  reward: number | null;
  reward_ema: number | null;
  efficiency: number | null;
  trainer_version: number | null;
  served: [number, number] | null;
  ready: number | null;
  out: number;
  credit: number;
  oldest_training: number | null;
  staleness: [number, number] | null;
  dropped: number;
  dead: number;
  trainer_waits: string;
  waits_since: number | null;
  validation: Record<string, number>;
  alerts: Alert[];
  damaged: number;
}

export interface Lease {
  task: string;
  holder: string;
  groups: number;
  oldest: number;
}

export interface Partition {
  name: string;
  depth: Record<string, number>;
  credit: number;
  out: number;
  rows: number;
  bytes: number;
  redelivered: number;
  oldest: Record<string, number>;
  dropped: Record<string, number>;
  dead: { uid: string; reason: string }[];
  leases: Lease[];
  fields: Record<string, number>;
  consumers: string[];
}

export interface Unit {
  unit: number;
  used: number;
  budget: number;
  spilled: number;
  alive: boolean;
  segments?: number;
  spill_budget?: number;
}

export interface Queue {
  live: boolean;
  at: number;
  partitions: Partition[];
  units: Unit[];
  rates: Record<string, number>;
  clients: number | null;
  epoch: number | null;
  no_room: number;
  first_without_room: string;
}

export type StageState = "busy" | "starved" | "blocked" | "idle";

export interface Pipeline {
  nodes: { id: string; label: string; state: StageState; busy: number; note: string }[];
  edges: { from: string; to: string; label: string; depth: number; rate: number | null }[];
  generating: number;
  stalled: number;
  lost: Record<string, number>;
  dropped: number | null;
  live: boolean;
}

export interface Fleet {
  processes: {
    name: string;
    pid: number;
    host: string;
    started: number;
    lives: number;
    alive: boolean | null;
    last: number;
  }[];
  engines: ({ name: string } & Record<string, number | string | null>)[];
  happenings: { time: number; who: string; what: string }[];
}

export type Columns = Record<string, (number | null)[]>;

export interface Frame {
  now: number;
  overview?: Overview;
  queue?: Queue;
  pipeline?: Pipeline;
  fleet?: Fleet;
  timeline?: { first: number; last: number };
  notes?: { time: number; kind: string; text: string }[];
  validations?: Record<string, number | string>[];
  names?: string[];
  charts?: Record<string, number[][]>;
  steps?: Columns;
}

/** [start, end, what] */
export type Bar = [number, number, string];

export interface Lane {
  id: string;
  kind: "trainer" | "rank" | "engine" | "feeder" | "validation" | "worker";
  label: string;
  bars: Bar[];
  over?: Bar[];
  versions?: [number, number][];
  area?: number[];
}

export interface StepRow {
  step: number;
  start: number;
  end: number;
  drawn: Record<string, number>;
  efficiency: number;
  bound: number;
  busy: number;
  stalled: number;
  idle: number;
}

export interface Window {
  from: number;
  to: number;
  first: number;
  last: number;
  lanes: Lane[];
  steps: StepRow[];
  versions: [number, string, number][];
}

export interface Sitting {
  start: number;
  end: number;
  uid: string;
  session: number;
  status: string;
  tokens: number;
  turns: number;
  tool_seconds: number;
  queue_seconds: number;
  engine_seconds: number;
  score: number | null;
  reason: string;
}
