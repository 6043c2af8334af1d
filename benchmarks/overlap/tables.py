"""The outcomes as markdown tables: a row per run."""

from __future__ import annotations

from typing import Any

HEAD = (
    "run", "S", "policy", "S_min", "η", "step s", "T* s", "waits for data", "order", "sync", "other",
    "age mean", "max", "masked", "wasted", "length", "CPU s",
)  # fmt: skip


def markdown(results: dict[str, list[dict[str, Any]]]) -> str:
    """One table per sweep."""
    return "\n".join(f"### {name}\n\n{table(outcomes)}" for name, outcomes in results.items())


def table(outcomes: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(outcome)) + " |" for outcome in outcomes]
    return "\n".join(lines) + "\n"


def cells(outcome: dict[str, Any]) -> list[str]:
    """Seconds at scale 1; losses and waste as shares."""
    scenario, lost, step = outcome["scenario"], outcome["lost"], outcome["step"]
    scale = scenario["scale"]
    other = sum(seconds for cause, seconds in lost.items() if cause not in ("wait_data", "wait_order", "sync"))
    wasted = " + ".join(f"{share:.1%} {reason}" for reason, share in outcome["wasted"].items() if share >= 5e-4)
    return [
        scenario["name"], f"{scenario['warmup']:g}", scenario["policy"] or "null", str(outcome["s_min"]),
        f"{outcome['efficiency']:.3f}", f"{step / scale:.1f}", f"{outcome['bound'] / scale:.1f}",
        *(f"{lost[cause] / step:.1%}" for cause in ("wait_data", "wait_order", "sync")), f"{other / step:.1%}",
        f"{outcome['age_mean']:.2f}", f"{outcome['age_max']:.0f}", f"{outcome['masked']:.1%}", wasted or "0",
        f"{outcome['length_ratio']:.3f}", f"{outcome['cpu_seconds']:.0f}",
    ]  # fmt: skip
