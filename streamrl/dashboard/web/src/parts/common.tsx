/** Small pieces that several pages show. */
import type { ComponentChildren } from "preact";
import { look } from "../colours";
import { inert, percent, words } from "../format";
import type { Alert, Tone } from "../wire";
import { age } from "../format";

/** Shapes beside colours, so that a state is known without them. */
export const SIGNS: Record<Tone, string> = { good: "✓", note: "●", warn: "▲", bad: "✕" };

export function Card(props: { title: string; note?: ComponentChildren; children: ComponentChildren }) {
  return (
    <section class="card" aria-label={props.title}>
      <header>
        <h2>{props.title}</h2>
        {props.note && <span class="muted">{props.note}</span>}
      </header>
      {props.children}
    </section>
  );
}

export function Tile(props: { label: string; value: ComponentChildren; sub?: ComponentChildren; tone?: "bad" | "warn" | undefined; children?: ComponentChildren }) {
  return (
    <dl class={`tile ${props.tone ?? ""}`}>
      <dt>
        {props.tone && <span aria-hidden="true">{SIGNS[props.tone]}</span>}
        {props.label}
      </dt>
      <dd class="value">{props.value}</dd>
      <dd class="sub">{props.sub ?? "\u00a0"}</dd>
      {props.children && <dd>{props.children}</dd>}
    </dl>
  );
}

export function Meter(props: { share: number; label: string; high?: boolean }) {
  const width = `${(100 * Math.min(1, Math.max(0, props.share))).toFixed(1)}%`;
  return (
    <div class={`meter ${props.high ? "high" : ""}`} role="img" aria-label={props.label}>
      <span style={{ width }} />
    </div>
  );
}

/** Parts of a whole as one bar, with a legend. */
export function Shares(props: { shares: Record<string, number>; label: string }) {
  const parts = Object.entries(props.shares).filter(([, share]) => share > 0.0005);
  return (
    <div>
      <div class="shares" role="img" aria-label={`${props.label}: ${parts.map(([name, share]) => `${words(name)} ${percent(share)}`).join(", ")}`}>
        {parts.map(([name, share]) => (
          <span key={name} class={look(name).hatched ? "hatched" : ""} style={{ width: `${100 * share}%`, "--part": `var(${look(name).colour})` }} />
        ))}
      </div>
      <ul class="legend">
        {[...parts]
          .sort((a, b) => b[1] - a[1])
          .filter(([, share], i) => i < 6 || share > 0.02)
          .map(([name, share]) => (
            <li key={name} style={{ "--part": `var(${look(name).colour})` }}>
              <i class={look(name).hatched ? "hatched" : ""} />
              {words(name)} <b>{percent(share)}</b>
            </li>
          ))}
      </ul>
    </div>
  );
}

export function Alerts(props: { alerts: Alert[]; now: number }) {
  return (
    <ul class="alerts">
      {props.alerts.map((alert) => (
        <li key={alert.name + alert.text} class={`tone-${alert.severity}`}>
          <span class="sign">
            <span aria-hidden="true">{SIGNS[alert.severity]}</span>
            <span class="sr">{alert.severity === "bad" ? "error" : "warning"}</span>
          </span>
          <span class="text">
            <bdi>{inert(alert.text)}</bdi> {alert.since !== null && <span class="muted">for {age(alert.since, props.now)}</span>}
          </span>
          <a href={`#${alert.page}`}>{alert.page}</a>
        </li>
      ))}
    </ul>
  );
}

/** A table that scrolls by itself where it is too wide. Cells are text or nodes; `n` names the columns of numbers. */
export function Table(props: { label: string; head: string[]; numbers?: number[]; rows: ComponentChildren[][]; keys?: (string | number)[] }) {
  const isNumber = (at: number) => props.numbers?.includes(at);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={props.label}>
      <table>
        <thead>
          <tr>
            {props.head.map((name, i) => (
              <th key={name + i} scope="col" class={isNumber(i) ? "n" : ""}>
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row, r) => (
            <tr key={props.keys?.[r] ?? r}>
              {row.map((cell, i) => (
                <td key={i} class={isNumber(i) ? "n" : "text"}>
                  {typeof cell === "string" ? <bdi>{inert(cell)}</bdi> : cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
