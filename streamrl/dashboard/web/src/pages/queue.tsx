/** Where are the rows, who has them, and who is held up by whom? */
import { useState } from "preact/hooks";
import { Card, Meter, Table } from "../parts/common";
import { age, bytes, count, figure, inert, percent } from "../format";
import { post, store, useKnown, useNow } from "../store";
import type { Partition, Pipeline, Queue, StageState } from "../wire";
import { Depth } from "./overview";

export function QueuePage() {
  const known = useKnown();
  const now = useNow();
  const queue = known.queue;
  if (!queue) return <p class="empty">The queue has told nothing yet.</p>;
  const training = queue.partitions.find((part) => part.name === "train");
  return (
    <div class="stack">
      <p class="muted" id="source">
        {queue.live
          ? `The queue answers: ${count(queue.clients)} clients, life ${queue.epoch}. What is shown is its own word.`
          : queue.at
            ? `The queue does not answer here (the run has ended, or keeps it in its own process). Shown is what the event log tells, as of ${age(queue.at, now)} ago; leases and fields are known to a running queue only.`
            : "The queue has told nothing yet."}
      </p>
      {known.pipeline && <Stages pipeline={known.pipeline} />}
      <Depth known={known} height={190} />
      {queue.no_room > 0 && (
        <Card title="Writers without room">
          <p>
            {queue.no_room} wait. The first: <bdi>{inert(queue.first_without_room)}</bdi>
          </p>
        </Card>
      )}
      <Partitions queue={queue} now={now} />
      <div class="grid2">
        <div class="stack">
          {training && <Credit part={training} />}
          <Fields parts={queue.partitions} live={queue.live} />
        </div>
        <div class="stack">
          <Consumers queue={queue} now={now} />
          <Units queue={queue} />
          {training && <Dropped part={training} />}
        </div>
      </div>
      <Dead queue={queue} />
    </div>
  );
}

const MARKS: Record<StageState, [string, string]> = {
  busy: ["▶", "busy"],
  starved: ["▽", "starved"],
  blocked: ["■", "held up"],
  idle: ["○", "idle"],
};

function Stages(props: { pipeline: Pipeline }) {
  const { nodes, edges } = props.pipeline;
  const before = (id: string) => edges.find((edge) => edge.to === id || (edge.to === "train" && id !== "train" && edge.from === "generate"));
  let passed = new Set<string>();
  return (
    <Card title="Stages" note="what each did in the last ten steps, and what lies between them">
      <div class="stages" role="list" tabIndex={0} aria-label="Stages of the pipeline">
        {nodes.flatMap((node, i) => {
          const edge = i > 0 ? before(node.id) : undefined;
          const fresh = edge && !passed.has(edge.label);
          if (edge) passed = new Set([...passed, edge.label]);
          const [mark, text] = MARKS[node.state];
          return [
            i > 0 && (
              <div key={`to-${node.id}`} class={`edge ${fresh ? "" : "plain"}`} role="presentation">
                {fresh && edge && (
                  <>
                    <span class="above">
                      <b>{count(edge.depth)}</b>
                      {edge.label}
                    </span>
                    <span class="below">{edge.rate !== null ? `${figure(edge.rate, 2)}/s` : "\u00a0"}</span>
                  </>
                )}
              </div>
            ),
            <div key={node.id} class={`stage ${node.state}`} role="listitem" title={node.note}>
              <b>{node.label}</b>
              <span class="state">
                <span aria-hidden="true">{mark}</span>
                {node.state === "idle" && node.busy >= 0.01 ? "active" : text}
                {node.id !== "prompts" && <span class="muted">{percent(node.busy)}</span>}
              </span>
              <div class="note">{node.note || "\u00a0"}</div>
            </div>,
          ];
        })}
      </div>
    </Card>
  );
}

const OUT = ["pending", "generating", "ready", "training"];
const STATES = [...OUT, "trained", "dropped", "dead"];

function Partitions(props: { queue: Queue; now: number }) {
  return (
    <Card title="Partitions" note="groups by state; trained, dropped and dead since the start">
      <Table
        label="Partitions"
        head={["partition", ...STATES, "rows", "bytes", "redelivered", "oldest unfinished"]}
        numbers={[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
        keys={props.queue.partitions.map((part) => part.name)}
        rows={props.queue.partitions.map((part) => {
          const oldest = OUT.flatMap((state) => (part.depth[state] && part.oldest[state] ? [part.oldest[state]] : []));
          return [
            part.name,
            ...STATES.map((state) => count((part.depth[state] ?? 0) + (state === "trained" ? (part.depth["final"] ?? 0) : 0))),
            count(part.rows),
            bytes(part.bytes),
            count(part.redelivered),
            oldest.length ? age(Math.min(...oldest), props.now) : "–",
          ];
        })}
      />
    </Card>
  );
}

function Credit(props: { part: Partition }) {
  const { part } = props;
  return (
    <Card title="Credit" note={part.credit ? `${part.out} of ${part.credit} groups are out` : "no bound"}>
      {part.credit > 0 && (
        <>
          <Meter share={part.out / part.credit} label={`${part.out} of ${part.credit}`} high={part.out >= part.credit} />
          <p class="muted" style={{ marginTop: "6px" }}>
            {part.out >= part.credit
              ? `All credit is used: prompts wait until a group was trained or dropped. It is held by ${OUT
                  .filter((state) => part.depth[state])
                  .map((state) => `${part.depth[state]} ${state}`)
                  .join(", ")}.`
              : `${part.credit - part.out} more prompts may be issued at once.`}
          </p>
        </>
      )}
    </Card>
  );
}

function Consumers(props: { queue: Queue; now: number }) {
  const rows = props.queue.partitions.flatMap((part) =>
    part.leases.map((lease) => [part.name, lease.task, lease.holder, count(lease.groups), age(lease.oldest, props.now)]),
  );
  const train = props.queue.partitions.find((part) => part.name === "train");
  const lag = train ? [
    ["generate", count(train.depth["pending"] ?? 0), drain(train.depth["pending"] ?? 0, props.queue.rates["generated"])],
    ["train", count(train.depth["ready"] ?? 0), drain(train.depth["ready"] ?? 0, props.queue.rates["trained"])],
  ] : [];
  return (
    <Card title="Consumers" note="what waits for each task; who has leased what">
      <Table label="Lag" head={["task", "waiting groups", "to drain"]} numbers={[1, 2]} rows={lag} />
      {rows.length > 0 ? (
        <Table label="Leases" head={["partition", "task", "holder", "groups", "oldest lease"]} numbers={[3, 4]} rows={rows} />
      ) : (
        <p class="muted">{props.queue.live ? "Nobody holds a lease." : "Leases are known to a running queue only."}</p>
      )}
    </Card>
  );
}

function drain(waiting: number, rate: number | undefined): string {
  return !waiting ? "–" : rate ? `${figure(waiting / rate, 2)} s` : "∞";
}

function Fields(props: { parts: Partition[]; live: boolean }) {
  const parts = props.parts.filter((part) => Object.keys(part.fields).length);
  const names = [...new Set(parts.flatMap((part) => Object.keys(part.fields)))].sort();
  return (
    <Card title="Production" note="rows that have each field">
      {names.length ? (
        <Table
          label="Production by field and partition"
          head={["field", ...parts.map((part) => part.name)]}
          rows={names.map((name) => [
            <span class="mono">{inert(name)}</span>,
            ...parts.map((part) => {
              const made = part.fields[name] ?? 0;
              const share = part.rows ? made / part.rows : 0;
              return (
                <span class="bar">
                  <Meter share={share} label={percent(share)} />
                  <span>{count(made)}</span>
                </span>
              );
            }),
          ])}
        />
      ) : (
        <p class="muted">{props.live ? "No row has a field yet." : "Fields are known to a running queue only."}</p>
      )}
    </Card>
  );
}

function Units(props: { queue: Queue }) {
  return (
    <Card title="Storage units" note="whole segments: memory held, and on disk">
      {props.queue.units.length ? (
        <Table
          label="Storage units"
          head={["unit", "state", "memory", "on disk"]}
          rows={props.queue.units.map((unit) => [
            String(unit.unit),
            unit.alive ? "✓ serves" : "✕ away",
            <span class="bar">
              <Meter share={unit.budget ? unit.used / unit.budget : 0} label="memory used" high={unit.used > 0.9 * unit.budget} />
              <span>
                {bytes(unit.used)} of {bytes(unit.budget)}
              </span>
            </span>,
            bytes(unit.spilled),
          ])}
        />
      ) : (
        <p class="muted">No unit was told of.</p>
      )}
    </Card>
  );
}

function Dropped(props: { part: Partition }) {
  const rows = Object.entries(props.part.dropped).sort((a, b) => b[1] - a[1]);
  return (
    <Card title="Dropped" note="groups that left untrained, by reason">
      {rows.length ? (
        <Table label="Dropped by reason" head={["reason", "groups"]} numbers={[1]} rows={rows.map(([name, n]) => [name, count(n)])} />
      ) : (
        <p class="muted">None.</p>
      )}
    </Card>
  );
}

function Dead(props: { queue: Queue }) {
  const [told, setTold] = useState("");
  const letters = props.queue.partitions.flatMap((part) => part.dead.map((one) => ({ ...one, partition: part.name })));
  const replay = (partition: string, uid: string) =>
    post("/api/replay", { partition, uids: [uid] })
      .then(() => setTold(`Group ${uid} begins again.`))
      .catch((error: Error) => setTold(error.message));
  return (
    <Card title="Dead letters" note="groups that were given up, with their prompts kept">
      {letters.length ? (
        <Table
          label="Dead letters"
          head={["partition", "group", "reason", ""]}
          keys={letters.map((one) => one.uid)}
          rows={letters.map((one) => [
            one.partition,
            one.uid,
            one.reason,
            <button
              type="button"
              disabled={!props.queue.live || !store.hasKey}
              title={!props.queue.live ? "The queue does not run" : store.hasKey ? "" : "Needs the key: open the link that streamrl dash printed"}
              onClick={() => void replay(one.partition, one.uid)}
            >
              Replay
            </button>,
          ])}
        />
      ) : (
        <p class="muted">None.</p>
      )}
      {told && (
        <p role="status" style={{ marginTop: "6px" }}>
          {inert(told)}
        </p>
      )}
    </Card>
  );
}
