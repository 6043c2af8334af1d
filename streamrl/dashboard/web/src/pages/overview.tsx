/** Is it healthy, and what limits it? */
import { Chart } from "../parts/chart";
import { Alerts, Card, Meter, Shares, SIGNS, Tile } from "../parts/common";
import { age, clock, count, duration, figure, inert, percent, words } from "../format";
import { store, useKnown, useNow } from "../store";
import type { Known } from "../store";
import type { Overview as Facts } from "../wire";

export function Overview() {
  const known = useKnown();
  const now = useNow();
  const facts = known.overview;
  if (!facts) return null;
  return (
    <div class="stack">
      <VerdictCard facts={facts} now={now} />
      {facts.alerts.length > 0 && (
        <Card title="Alerts">
          <Alerts alerts={facts.alerts.slice(0, 5)} now={now} />
        </Card>
      )}
      <Tiles facts={facts} now={now} />
      <div class="grid2">
        <Reward known={known} />
        <Depth known={known} />
        <Speed known={known} />
        <StepTime known={known} />
      </div>
      <Notes known={known} />
    </div>
  );
}

function VerdictCard(props: { facts: Facts; now: number }) {
  const { verdict } = props.facts;
  const live = props.facts.health.condition === "live";
  return (
    <section class={`card verdict tone-${verdict.tone}`} aria-label="Verdict" data-cause={verdict.cause}>
      <span class="sign" aria-hidden="true">
        {SIGNS[verdict.tone]}
      </span>
      <h1>
        <bdi>{inert(verdict.headline)}</bdi>
      </h1>
      {verdict.share !== null && (
        <div class="share">
          {percent(verdict.share)}
          <small>{verdict.cause === "credit" ? "engines idle" : "of the time"}</small>
        </div>
      )}
      <p>
        <bdi>{inert(verdict.detail)}</bdi>
      </p>
      <p class="advice">
        {inert(verdict.advice)}
        {live && props.facts.trainer_waits && (
          <>
            {verdict.advice && " "}Now: {words(props.facts.trainer_waits).toLowerCase()} for {age(props.facts.waits_since, props.now)}.
          </>
        )}
      </p>
      {Object.keys(verdict.shares).length > 0 && (
        <div class="where">
          <Shares shares={verdict.shares} label="Where the trainer’s time went" />
        </div>
      )}
    </section>
  );
}

function Tiles(props: { facts: Facts; now: number }) {
  const { facts, now } = props;
  const live = facts.health.condition === "live";
  const silent = facts.health.condition === "stale" || facts.health.condition === "dead";
  const lag = facts.trainer_version !== null && facts.served ? facts.trainer_version - facts.served[0] : null;
  return (
    <div class="tiles">
      <Tile label="Step" value={`${facts.step}${facts.total ? ` / ${facts.total}` : ""}`} sub={facts.seconds_left && live ? `${duration(facts.seconds_left)} left` : words(facts.mode)}>
        {facts.total > 0 && <Meter share={facts.step / facts.total} label={`${facts.step} of ${facts.total} steps`} />}
      </Tile>
      <Tile label="Reward" value={figure(facts.reward_ema)} sub={`last step ${figure(facts.reward)}`} />
      <Tile label="Step time" value={duration(facts.seconds_per_step)} sub={`overlap efficiency ${percent(facts.efficiency)}`} />
      <Tile label="Tokens/s" value={count(facts.tokens_per_second)} sub="sampled, all servers" />
      <Tile
        label="Weights"
        value={facts.trainer_version === null ? "–" : `v${facts.trainer_version}`}
        sub={facts.served ? (lag ? `oldest served v${facts.served[0]}` : "served by all") : "not served"}
        tone={lag !== null && lag > 2 && live ? "warn" : undefined}
      />
      <Tile label="Staleness" value={facts.staleness ? figure(facts.staleness[0], 2) : "–"} sub={facts.staleness ? `mean; oldest ${figure(facts.staleness[1], 2)} versions` : ""} />
      <Tile label="Ready groups" value={facts.ready ?? "–"} sub={facts.credit ? `${facts.out} of ${facts.credit} out` : `${facts.out} out`}>
        {facts.credit > 0 && <Meter share={facts.out / facts.credit} label={`credit used: ${facts.out} of ${facts.credit}`} />}
      </Tile>
      <Tile label="Oldest unacked" value={facts.oldest_training !== null ? age(facts.oldest_training, now) : "none"} sub="leased by the trainer" />
      <Tile label="Dropped · dead" value={`${facts.dropped} · ${facts.dead}`} sub="groups, in all" tone={facts.dead > 0 ? "warn" : undefined} />
      <Tile label="Last word" value={live || silent ? age(facts.health.since, now) : words(facts.status)} sub={silent ? "metrics are stale" : live ? "age of the newest event" : `at ${clock(facts.health.since)}`} tone={silent ? "bad" : undefined} />
      {Object.entries(facts.validation)
        .slice(0, 2)
        .map(([name, value]) => (
          <Tile key={name} label="Validation" value={figure(value)} sub={<bdi title={inert(name)}>{inert(name)}</bdi>} />
        ))}
    </div>
  );
}

function steps(known: Known, ...names: string[]): { x: number[]; values: (number | null)[][] } {
  return { x: (known.steps["step"] ?? []) as number[], values: names.map((name) => known.steps[name] ?? []) };
}

function Reward(props: { known: Known }) {
  const { x, values } = steps(props.known, "critic/score/mean", "reward/ema");
  return (
    <Card title="Reward" note="mean score of a step, and smoothed">
      {x.length ? (
        <Chart title="Reward" x={x} values={values} lines={[{ label: "step", colour: "--c-pending", faint: true }, { label: "smoothed", colour: "--accent" }]} />
      ) : (
        <p class="empty">No step has ended yet.</p>
      )}
    </Card>
  );
}

const STATES = ["pending", "generating", "ready", "training"];

export function Depth(props: { known: Known; height?: number }) {
  const rows = props.known.charts["depth"] ?? [];
  const last = rows[rows.length - 1];
  const live = props.known.overview?.health.condition === "live";
  // A level holds until it changes: the chart goes on to now, while the run lives.
  const shown = live && last && store.now() > (last[0] ?? 0) ? [...rows, [store.now(), ...last.slice(1)]] : rows;
  return (
    <Card title="Queue depth" note="prompt groups by state">
      {shown.length ? (
        <Chart
          title="Queue depth"
          time
          stacked
          height={props.height ?? 150}
          x={shown.map((row) => row[0] ?? 0)}
          values={STATES.map((_, i) => shown.map((row) => row[i + 1] ?? null))}
          lines={STATES.map((state) => ({ label: state, colour: `--c-${state}` }))}
          show={(value) => count(value)}
        />
      ) : (
        <p class="empty">The queue has told nothing yet.</p>
      )}
    </Card>
  );
}

function Speed(props: { known: Known }) {
  const { x, values } = steps(props.known, "perf/generated_tokens_per_s", "perf/throughput");
  return (
    <Card title="Tokens per second" note="sampled by all servers; trained per rank">
      {x.length ? (
        <Chart title="Tokens per second" x={x} values={values} show={(value) => count(value)} lines={[{ label: "sampled", colour: "--c-generating" }, { label: "trained", colour: "--c-training" }]} />
      ) : (
        <p class="empty">No step has ended yet.</p>
      )}
    </Card>
  );
}

function StepTime(props: { known: Known }) {
  const { x, values } = steps(props.known, "perf/time_per_step", "overlap/efficiency");
  const bound = (values[0] ?? []).map((seconds, i) => (seconds == null || values[1]?.[i] == null ? null : seconds * (values[1][i] ?? 0)));
  return (
    <Card title="Step time" note="and the bubble-free bound T*">
      {x.length ? (
        <Chart title="Step time" x={x} values={[values[0] ?? [], bound]} show={duration} lines={[{ label: "measured", colour: "--accent" }, { label: "bound", colour: "--c-pending", faint: true }]} />
      ) : (
        <p class="empty">No step has ended yet.</p>
      )}
    </Card>
  );
}

function Notes(props: { known: Known }) {
  const notes = props.known.notes.filter((note) => note.kind === "note").slice(-6);
  if (!notes.length) return null;
  return (
    <Card title="Notes of the run">
      <ul class="alerts">
        {notes.map((note) => (
          <li key={note.time + note.text} class="tone-note">
            <span class="sign" aria-hidden="true">
              {SIGNS.note}
            </span>
            <span class="text">
              <bdi>{inert(note.text)}</bdi>
            </span>
          </li>
        ))}
      </ul>
    </Card>
  );
}
