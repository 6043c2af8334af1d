"""The processes and engines of a run, by their event logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamrl.monitor.events import Event

FIGURES = {
    "server_running": "running", "server_waiting": "waiting", "server_slots": "slots", "server_tokens": "tokens",
    "server_preemptions": "preemptions", "server_cache_usage": "cache", "server_busy_seconds": "busy_seconds",
}  # fmt: skip


@dataclass(slots=True)
class Process:
    """A process with an event log; `host` names its machine's boot, so a pid means something on the same one only."""

    name: str
    pid: int
    host: str
    started: float
    lives: int = 1
    alive: bool | None = None
    last: float = 0.0


class Fleet:
    """Fed all events."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.happenings: list[dict[str, Any]] = []
        """Restarts, deaths and the like, oldest first."""

    def feed(self, event: Event) -> None:
        if event.kind == "process":
            self._process(event)
        elif (known := self.processes.get(event.process)) is not None:
            known.last = max(known.last, event.end)
        if event.kind == "counter" and event.name.startswith("server_"):
            figure = FIGURES.get(event.name)
            if figure is not None:
                self._engine(event)[figure] = event.value
        elif event.name == "weight_version" and event.fields.get("role") == "rollout":
            self.engines.setdefault(str(event.fields.get("engine", "")), {})["version"] = event.value
        elif event.name == "server_weights":
            engine = self._engine(event)
            engine["version"], engine["loaded"] = event.fields.get("version"), event.end
        elif event.kind == "state" and event.name in ("restart", "server", "service"):
            self._happened(event)

    def _process(self, event: Event) -> None:
        pid, host = int(event.fields.get("pid", 0)), str(event.fields.get("host", ""))
        before = self.processes.get(event.process)
        if before is not None and before.pid == pid:
            return
        lives = before.lives + 1 if before is not None else 1
        self.processes[event.process] = Process(event.process, pid, host, event.start, lives, None, event.end)
        if before is not None and event.process != "launcher":
            self._note(event.end, event.process, f"started again, pid {pid}")

    def _engine(self, event: Event) -> dict[str, Any]:
        return self.engines.setdefault(str(event.fields.get("server", event.process)), {})

    def _happened(self, event: Event) -> None:
        who = str(event.fields.get("server") or event.fields.get("role") or event.process)
        if event.name == "server" and event.value == "started":
            return
        self._note(event.end, who, str(event.value))

    def _note(self, time: float, who: str, what: str) -> None:
        self.happenings.append({"time": time, "who": who, "what": what[:500]})
        del self.happenings[:-500]

    def page(self) -> dict[str, Any]:
        return {
            "processes": [
                {"name": p.name, "pid": p.pid, "host": p.host[:8], "started": p.started, "lives": p.lives,
                 "alive": p.alive, "last": p.last}
                for p in sorted(self.processes.values(), key=lambda p: p.name)
            ],
            "engines": [{"name": name, **figures} for name, figures in sorted(self.engines.items())],
            "happenings": self.happenings[-100:],
        }  # fmt: skip
