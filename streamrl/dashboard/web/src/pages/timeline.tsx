/** Who did what when, and where are the bubbles? */
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { look } from "../colours";
import { clock, duration, figure, inert, percent, words } from "../format";
import { hit, labelWidth, paint, type Hit } from "../parts/gantt";
import { Card, Table } from "../parts/common";
import { get, store, useKnown } from "../store";
import type { Sitting, StepRow, Window } from "../wire";

const SPANS: [number, string][] = [
  [10, "10 s"],
  [60, "1 min"],
  [300, "5 min"],
  [1800, "30 min"],
];
const SHORTEST = 0.02;
const REFRESH_MS = 1000;
const CAUSES = ["wait_data", "wait_order", "hand_off", "sync", "checkpoint", "validation", "bookkeeping", "unaccounted"];

interface View {
  /** The right end; null: follows the run. */
  to: number | null;
  span: number;
}

export function TimelinePage() {
  const known = useKnown();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [view, setView] = useState<View>({ to: null, span: 0 });
  const [shown, setShown] = useState<Window | null>(null);
  const [under, setUnder] = useState<{ at: [number, number]; hit: Hit } | null>(null);
  const [picked, setPicked] = useState<{ worker: string; from: number; to: number; sittings: Sitting[] } | null>(null);
  const [failed, setFailed] = useState("");
  const live = known.overview?.health.condition === "live";
  const first = known.timeline?.first ?? 0;
  const last = known.timeline?.last ?? 0;
  const usual = Math.min(Math.max(10, 8 * (known.overview?.seconds_per_step ?? 5)), Math.max(1, last - first) || 10);
  const span = view.span || usual;
  const to = view.to ?? (live ? Math.max(last, store.now()) : last);
  const from = to - span;
  const drawn = useRef({ from, to });
  drawn.current = { from, to };

  const load = useCallback(() => {
    const width = Math.max(200, canvas.current?.clientWidth ?? 1000);
    const { from: a, to: b } = drawn.current;
    return get<Window>("/api/timeline", { from: a, to: b, width: Math.round(width) })
      .then((found) => (setShown(found), setFailed("")))
      .catch((error: Error) => setFailed(error.message));
  }, []);

  useEffect(() => {
    void load();
  }, [view.to, span, first, live ? 0 : last]);
  useEffect(() => {
    if (!live || view.to !== null) return undefined;
    const timer = setInterval(() => void load(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [live, view.to]);

  useEffect(() => {
    const draw = () => {
      // While it follows, the chart shows exactly what was fetched.
      const a = view.to === null && shown ? shown.from : from;
      const b = view.to === null && shown ? shown.to : to;
      if (canvas.current && shown) paint(canvas.current, shown, a, b);
    };
    draw();
    addEventListener("themed", draw);
    addEventListener("resize", draw);
    return () => (removeEventListener("themed", draw), removeEventListener("resize", draw));
  }, [shown, from, to]);

  const move = (part: number) => setView({ to: Math.max(first + span * 0.2, to + part * span), span });
  const zoom = (factor: number, at = 0.5) => {
    const next = Math.max(SHORTEST, span * factor);
    setView({ to: view.to === null && live ? null : to + (1 - at) * (next - span), span: next });
  };
  const onKey = (event: KeyboardEvent) => {
    const done = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), End: () => setView({ to: null, span }) }[event.key];
    if (done) {
      event.preventDefault();
      done();
    }
  };
  const place = (event: MouseEvent): [number, number] => {
    const box = canvas.current!.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const range = shown && view.to === null ? { from: shown.from, to: shown.to } : { from, to };
  const onMove = (event: PointerEvent) => {
    const [px, py] = place(event);
    if (event.buttons === 1 && canvas.current) {
      const width = canvas.current.clientWidth - labelWidth(canvas.current.clientWidth);
      if (Math.abs(event.movementX) > 0) setView({ to: to - (event.movementX / width) * span, span });
    }
    const found = shown && canvas.current ? hit(shown, range.from, range.to, canvas.current.clientWidth, px, py) : null;
    setUnder(found ? { at: [px, py], hit: found } : null);
  };
  const onClick = (event: MouseEvent) => {
    const [px, py] = place(event);
    const found = shown && canvas.current ? hit(shown, range.from, range.to, canvas.current.clientWidth, px, py) : null;
    if (found?.lane.kind !== "worker") return;
    const worker = found.lane.id.replace(/^worker:/, "");
    const near = span / 40;
    void get<Sitting[]>("/api/sessions", { worker, from: found.time - near, to: found.time + near }).then((sittings) =>
      setPicked({ worker: found.lane.label, from: found.time - near, to: found.time + near, sittings }),
    );
  };
  const onWheel = (event: WheelEvent) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const width = canvas.current!.clientWidth;
    zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(1, Math.max(0, (place(event)[0] - labelWidth(width)) / (width - labelWidth(width)))));
  };

  return (
    <div class="stack">
      <section class="card" aria-label="Timeline">
        <div class="row" style={{ marginBottom: "10px" }}>
          <h1 style={{ marginRight: "8px" }}>Timeline</h1>
          {SPANS.map(([seconds, text]) => (
            <button key={text} type="button" aria-pressed={Math.abs(span - seconds) < 1e-6} onClick={() => setView({ to: view.to, span: seconds })}>
              {text}
            </button>
          ))}
          <button type="button" aria-pressed={last > first && Math.abs(span - (last - first)) < 1e-3} onClick={() => setView({ to: live ? null : last, span: Math.max(1, last - first) })}>
            all
          </button>
          <span class="row" role="group" aria-label="Move">
            <button type="button" aria-label="Earlier" onClick={() => move(-0.5)}>
              ←
            </button>
            <button type="button" aria-label="Later" onClick={() => move(0.5)}>
              →
            </button>
            <button type="button" aria-label="Closer" onClick={() => zoom(0.5)}>
              +
            </button>
            <button type="button" aria-label="Further" onClick={() => zoom(2)}>
              −
            </button>
          </span>
          {live && (
            <button type="button" aria-pressed={view.to === null} onClick={() => setView({ to: view.to === null ? to : null, span: view.span })}>
              {view.to === null ? "● following" : "follow"}
            </button>
          )}
          <span class="muted">
            {clock(range.from)} – {clock(range.to)} ({duration(span)})
          </span>
        </div>
        <div class="gantt" onPointerLeave={() => setUnder(null)}>
          <canvas
            ref={canvas}
            tabIndex={0}
            role="img"
            aria-label={`Gantt chart of ${shown?.lanes.map((lane) => lane.label).join(", ") ?? "the run"}; arrow keys move it, plus and minus zoom. The table below has its numbers.`}
            onKeyDown={onKey}
            onPointerMove={onMove}
            onClick={onClick}
            onWheel={onWheel}
          />
          {under && <Tip {...under} width={canvas.current?.clientWidth ?? 800} />}
        </div>
        {failed && <p role="alert">{inert(failed)}</p>}
        {shown && <Legend shown={shown} />}
        <p class="muted" style={{ fontSize: "0.84rem" }}>
          Drag to move, Ctrl + wheel to zoom, click a worker’s lane for its sessions. Each lane of an engine has loads of new weights on
          top; the ground alternates with the steps.
        </p>
      </section>
      {picked && (
        <Card title={`Sessions of ${picked.worker}`} note={`under way between ${clock(picked.from)} and ${clock(picked.to)}, the longest first`}>
          <Sessions sittings={picked.sittings} />
        </Card>
      )}
      {shown && <StepTable steps={shown.steps} />}
    </div>
  );
}

function Tip(props: { at: [number, number]; hit: Hit; width: number }) {
  const { bar, lane, sessions, version, time } = props.hit;
  const [x, y] = props.at;
  const side = x > props.width - 220 ? { right: `${props.width - x + 12}px` } : { left: `${x + 12}px` };
  return (
    <div class="tip" style={{ top: `${y + 14}px`, ...side }}>
      <b>{bar ? words(bar[2]) : inert(lane.label)}</b>
      {bar && <div>{duration(bar[1] - bar[0])}, from {clock(bar[0])}</div>}
      {sessions !== undefined && <div>{figure(sessions, 2)} sessions under way</div>}
      {version !== undefined && <div>weights v{version}</div>}
      {!bar && sessions === undefined && <div>{lane.kind === "engine" ? "idle" : "nothing"} at {clock(time)}</div>}
    </div>
  );
}

function Legend(props: { shown: Window }) {
  const found = new Set(props.shown.lanes.flatMap((lane) => [...lane.bars, ...(lane.over ?? [])].map(([, , what]) => what)));
  return (
    <ul class="legend">
      {[...found].sort().map((what) => (
        <li key={what} style={{ "--part": `var(${look(what).colour})` }}>
          <i class={look(what).hatched ? "hatched" : ""} />
          {words(what)}
        </li>
      ))}
    </ul>
  );
}

function StepTable(props: { steps: StepRow[] }) {
  const steps = props.steps.slice(-50).reverse();
  const used = CAUSES.filter((cause) => steps.some((step) => (step.drawn[cause] ?? 0) > 5e-4));
  const whole = props.steps.reduce((sum, step) => sum + step.end - step.start, 0);
  const training = props.steps.reduce((sum, step) => sum + (step.drawn["training"] ?? 0), 0);
  return (
    <Card title="Steps" note={`seconds, as drawn; over these ${props.steps.length} steps training took ${percent(whole ? training / whole : null)}`}>
      <Table
        label="Seconds of each step by cause"
        head={["step", "length", "training", ...used.map((cause) => words(cause).toLowerCase()), "engines busy", "stalled", "idle", "bound T*", "overlap"]}
        numbers={Array.from({ length: used.length + 8 }, (_, i) => i)}
        keys={steps.map((step) => step.step)}
        rows={steps.map((step) => [
          String(step.step),
          figure(step.end - step.start),
          figure(step.drawn["training"]),
          ...used.map((cause) => figure(step.drawn[cause])),
          figure(step.busy),
          figure(step.stalled),
          figure(step.idle),
          figure(step.bound),
          percent(step.efficiency),
        ])}
      />
    </Card>
  );
}

function Sessions(props: { sittings: Sitting[] }) {
  if (!props.sittings.length) return <p class="muted">None that ended is known there.</p>;
  return (
    <Table
      label="Sessions"
      head={["group", "session", "status", "length", "in engines", "waiting for a slot", "in tools", "turns", "tokens", "score", ""]}
      numbers={[1, 3, 4, 5, 6, 7, 8, 9]}
      rows={props.sittings.map((s) => [
        s.uid,
        String(s.session),
        s.status,
        duration(s.end - s.start),
        duration(s.engine_seconds),
        duration(s.queue_seconds),
        duration(s.tool_seconds),
        String(s.turns),
        String(s.tokens),
        figure(s.score),
        s.reason,
      ])}
    />
  );
}
