/** Who is there, and what became of them? */
import { Card, Meter, Table } from "../parts/common";
import { age, clock, count, percent } from "../format";
import { useKnown, useNow } from "../store";

export function Fleet() {
  const { fleet } = useKnown();
  const now = useNow();
  if (!fleet) return null;
  const number = (value: unknown) => (typeof value === "number" ? count(value) : "–");
  return (
    <div class="stack">
      <Card title="Engines" note="as the trainer saw them at the end of its last step">
        <Table
          label="Engines"
          head={["engine", "weights", "running", "slots", "waiting", "KV cache", "preemptions", "tokens"]}
          numbers={[1, 2, 4, 6, 7]}
          rows={fleet.engines.map((engine) => {
            const [running, slots] = [Number(engine["running"] ?? 0), Number(engine["slots"] ?? 0)];
            return [
              engine.name,
              engine["version"] != null ? `v${engine["version"]}` : "–",
              number(engine["running"]),
              <span class="bar">
                <Meter share={slots ? running / slots : 0} label={`${running} of ${slots} slots`} />
                <span>{number(engine["slots"])}</span>
              </span>,
              number(engine["waiting"]),
              typeof engine["cache"] === "number" ? percent(engine["cache"]) : "–",
              number(engine["preemptions"]),
              number(engine["tokens"]),
            ];
          })}
        />
      </Card>
      <Card title="Processes" note="with an event log; whether one lives is known on its own machine only">
        <Table
          label="Processes"
          head={["process", "state", "pid", "machine", "started", "last word", "lives"]}
          numbers={[2, 5, 6]}
          rows={fleet.processes.map((process) => [
            process.name,
            process.alive === true ? "✓ lives" : process.alive === false ? "✕ gone" : "? elsewhere",
            String(process.pid),
            process.host,
            clock(process.started),
            `${age(process.last, now)} ago`,
            String(process.lives),
          ])}
        />
      </Card>
      <Card title="What happened" note="starts, deaths, restarts">
        {fleet.happenings.length ? (
          <Table label="What happened" head={["time", "who", "what"]} rows={[...fleet.happenings].reverse().map((one) => [clock(one.time), one.who, one.what])} />
        ) : (
          <p class="muted">Nothing out of the ordinary.</p>
        )}
      </Card>
    </div>
  );
}
