"""A job as its user starts it, watched from outside: started, waited for, killed, and its accounts checked."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import read_summary
from streamrl.trainer.batch_log import read_batch_log


class Job:
    """`streamrl train experiment=calculator` with these arguments, in a directory of its own."""

    def __init__(self, directory: Path, *arguments: str, steps: int, batch: int = 8, seconds: float = 120.0) -> None:
        self.runs = directory / "runs"
        self.output = directory / "output.txt"
        self._steps, self._batch, self._seconds = steps, batch, seconds
        self.arguments = [
            "experiment=calculator", f"trainer.total_training_steps={steps}",
            f"data.train_batch_size={batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
            "actor_rollout_ref.rollout.n=4", "data.val_max_samples=8", f"trainer.runs_dir={self.runs}", *arguments,
        ]  # fmt: skip
        self.process: subprocess.Popen | None = None

    @property
    def path(self) -> Path:
        return (self.runs / "latest").resolve()

    @property
    def text(self) -> str:
        return self.output.read_text()[-4000:] if self.output.exists() else ""

    def start(self, *, max_file_bytes: int = resource.RLIM_INFINITY) -> subprocess.Popen:
        """`max_file_bytes`: no file can grow beyond it, as on a full disk."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))

        with self.output.open("ab") as log:
            command = [sys.executable, "-m", "streamrl.main", *self.arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=limit)
        return self.process

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(list(read_metrics(self.path))) >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.path.exists() and condition():
                return
            time.sleep(0.02)
        raise AssertionError(f"no {what} within {self._seconds:.0f} s: {self.text}")

    def finish(self) -> None:
        assert self.process is not None
        assert self.process.wait(self._seconds) == 0, self.text

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def takes_interrupts(self) -> bool:
        """Whether the process handles SIGTERM already, which Python itself does not."""
        assert self.process is not None
        [caught] = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def pid_of(self, process: str) -> int:
        """Of the newest process with this name in the event log."""
        found = [e for e in read_events(self.path) if e.kind == "process" and e.process == process]
        return int(found[-1].fields["pid"])

    def queue_pid(self, role: str) -> int:
        """Of the queue's process `controller` or `unit` (the first one)."""
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if "transfer_queue.service.child " + role in line and str(self.path) in line:
                return process.pid
        raise AssertionError(f"{self.path} has no {role} process")

    def processes(self) -> list[psutil.Process]:
        """All living processes that this job started, however far down."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def check_accounts(self) -> None:
        """By the trainer's own batch log: every step once, no prompt twice, none missing that was not dropped."""
        steps = read_batch_log(self.path / "batches.jsonl")
        assert [step.step for step in steps] == list(range(1, self._steps + 1))
        orders = [order for step in steps for order in step.orders]
        assert len(orders) == len(set(orders)) == self._batch * self._steps, "a prompt was trained twice"
        missing = set(range(max(orders))) - set(orders)
        dropped = sum(read_summary(self.path).groups.dropped.values())
        late = 2 * self._batch  # groups still outstanding at the end may be older than some that were trained
        assert len(missing) <= dropped + late, f"prompts were lost: {sorted(missing)}"
        assert [line["step"] for line in read_metrics(self.path)] == list(range(1, self._steps + 1))


def chaos_seed() -> int:
    """From CHAOS_SEED, else new; printed, so that a failure can be run again."""
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 100000))
    print(f"CHAOS_SEED={seed}")  # noqa: T201
    return seed
