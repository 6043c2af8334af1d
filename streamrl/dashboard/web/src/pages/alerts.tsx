/** What is wrong, or soon will be? */
import { Alerts, Card } from "../parts/common";
import { useKnown, useNow } from "../store";

const WATCHED = [
  "The run is silent: no event and no heartbeat for more than seven seconds, or its process is gone",
  "The trainer waits for data, or for groups that order holds back, for more than 30 s",
  "A tool call is out five times as long as such calls take, and at least 5 s",
  "A process of the run is gone",
  "Prompt groups ended dead",
  "Writers wait for room in the queue, or a storage unit does not answer",
  "A loss or gradient was not finite, or the gradient norm is beyond 1000",
  "More than half of the answers of a step were cut",
];

export function AlertsPage() {
  const { overview } = useKnown();
  const now = useNow();
  const alerts = overview?.alerts ?? [];
  return (
    <div class="stack">
      <Card title="Alerts">{alerts.length ? <Alerts alerts={alerts} now={now} /> : <p class="empty">✓ Nothing is wrong that is watched.</p>}</Card>
      <Card title="What is watched">
        <ul style={{ paddingLeft: "18px" }}>
          {WATCHED.map((text) => (
            <li key={text}>{text}</li>
          ))}
        </ul>
      </Card>
    </div>
  );
}
