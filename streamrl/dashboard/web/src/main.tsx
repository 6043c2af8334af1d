/** The frame around the pages: head, navigation, the page that the address names. */
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { inert } from "./format";
import { Fleet } from "./pages/fleet";
import { AlertsPage } from "./pages/alerts";
import { Learning } from "./pages/learning";
import { Overview } from "./pages/overview";
import { QueuePage } from "./pages/queue";
import { Staleness } from "./pages/staleness";
import { TimelinePage } from "./pages/timeline";
import { SIGNS } from "./parts/common";
import { post, store, useKnown, useNow } from "./store";
import "./style.css";
import { applyTheme, isDark, toggleTheme } from "./theme";
import { duration } from "./format";
import type { Known } from "./store";
import type { Tone } from "./wire";

const PAGES = [
  ["overview", "Overview", Overview],
  ["queue", "Queue", QueuePage],
  ["timeline", "Timeline", TimelinePage],
  ["staleness", "Staleness", Staleness],
  ["learning", "Learning", Learning],
  ["fleet", "Fleet", Fleet],
  ["alerts", "Alerts", AlertsPage],
] as const;

function usePage(): string {
  const named = () => location.hash.replace(/^#\/?/, "").split("?")[0] ?? "";
  const [page, set] = useState(named());
  useEffect(() => {
    const changed = () => set(named());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return PAGES.some(([name]) => name === page) ? page : "overview";
}

function App() {
  const known = useKnown();
  const page = usePage();
  const [, Page] = PAGES.filter(([name]) => name === page).map(([name, , view]) => [name, view] as const)[0] ?? ["overview", Overview];
  const label = PAGES.find(([name]) => name === page)?.[1] ?? "";
  useEffect(() => {
    document.title = `${label} · ${known.overview?.name ?? "StreamRL"}`;
  }, [label, known.overview?.name]);
  if (store.connection === "key") return <Login />;
  return (
    <div class="frame">
      <Head known={known} />
      <nav class="nav" aria-label="Pages">
        <ul>
          {PAGES.map(([name, text]) => (
            <li key={name}>
              <a href={`#${name}`} aria-current={name === page ? "page" : undefined}>
                {text}
                {name === "alerts" && <AlertCount known={known} />}
              </a>
            </li>
          ))}
        </ul>
      </nav>
      <main class="main" id="main" tabIndex={-1}>
        {known.overview ? <Page /> : <p class="empty">Reading the run…</p>}
      </main>
    </div>
  );
}

function AlertCount(props: { known: Known }) {
  const found = props.known.overview?.alerts ?? [];
  if (!found.length) return null;
  return <span class={`dot ${found.some((alert) => alert.severity === "bad") ? "" : "warn"}`}>{found.length}</span>;
}

const CONDITIONS: Record<string, [Tone, string]> = {
  live: ["good", "live"],
  stale: ["bad", "stale"],
  dead: ["bad", "dead"],
  ended: ["note", "ended"],
};

function Head(props: { known: Known }) {
  const now = useNow();
  const [, redraw] = useState(0);
  const overview = props.known.overview;
  const [tone, text] = CONDITIONS[overview?.health.condition ?? "live"] ?? ["note", ""];
  const silent = overview ? Math.max(0, now - overview.health.since) : 0;
  return (
    <>
      <header class="head">
        <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
          Skip to the page
        </a>
        <span class="brand">
          <img src="/icon.svg" alt="" />
          <span>StreamRL</span>
        </span>
        <span class="name">{overview && <bdi>{inert(overview.name)}</bdi>}</span>
        {overview && (
          <span class={`chip ${tone}`} id="condition" title={overview.health.why}>
            <span aria-hidden="true">{SIGNS[tone]}</span>
            {overview.health.condition === "ended" ? inert(overview.status) : text}
            {(text === "stale" || text === "dead") && ` for ${duration(silent)}`}
          </span>
        )}
        <span class="space" />
        <button
          type="button"
          onClick={() => (toggleTheme(), redraw((n) => n + 1))}
          aria-label={isDark() ? "Use light colours" : "Use dark colours"}
        >
          <span aria-hidden="true">{isDark() ? "☀" : "☾"}</span>
        </button>
      </header>
      {store.connection === "lost" && (
        <p class="lost" role="alert">
          No connection to the dashboard’s server; what is shown is {duration(Math.max(0, now - props.known.now))} old. It is tried
          again.
        </p>
      )}
    </>
  );
}

function Login() {
  const [wrong, setWrong] = useState("");
  const submit = (event: Event) => {
    event.preventDefault();
    const key = new FormData(event.target as HTMLFormElement).get("key");
    post("/api/login", { key })
      .then(() => store.enter())
      .catch((error: Error) => setWrong(error.message));
  };
  return (
    <main class="card login">
      <h1>StreamRL</h1>
      <p class="muted">This dashboard needs its key: open the link that `streamrl dash` printed, or paste the part after “key=”.</p>
      <form onSubmit={submit}>
        <label class="sr" for="key">
          Key
        </label>
        <input id="key" name="key" type="password" autocomplete="off" required />
        <button type="submit">Open</button>
      </form>
      {wrong && <p role="alert">{wrong}</p>}
    </main>
  );
}

applyTheme();
void store.start();
render(<App />, document.getElementById("app")!);
