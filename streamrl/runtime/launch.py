"""Starting a run and seeing it through: run directory, runtime, terminal view, Ctrl-C, exit status.

Exit status: 0 finished, 1 failed, 2 a mistake the user can mend, 130 stopped by Ctrl-C after a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from streamrl.config import StreamRLConfig
from streamrl.errors import DamagedFileError, UserError
from streamrl.monitor.events import EventLog
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import Summary, print_summary, read_summary, write_summary
from streamrl.monitor.terminal import TerminalView
from streamrl.runtime.failures import exit_of, explained, last_line, where_to_look
from streamrl.runtime.interrupts import INTERRUPTS
from streamrl.runtime.run_dir import RunDirectory, resumable
from streamrl.runtime.unsaved import give_up_unsaved

if TYPE_CHECKING:
    from streamrl.runtime.session import Session

log = logging.getLogger(__name__)

FAILED = 1
INTERRUPTED = 130


def launch(config: StreamRLConfig, run: RunDirectory, console: Console | None = None) -> int:
    """Run to the end; the exit status. Raises UserError for what the user can mend. There is a summary then: of a run
    that failed at its start, or whose trainer died, the one written here."""
    try:
        return _seen_through(config, run, console or Console())
    except BaseException as error:
        _sum_up(run, error)
        raise


def _seen_through(config: StreamRLConfig, run: RunDirectory, console: Console) -> int:
    if run.note:
        console.print(f"note: {run.note}", soft_wrap=True, markup=False)
    console.print(f"{'resuming' if run.resumed else 'run directory:'} {run.path}", soft_wrap=True)
    if run.resumed and (undone := give_up_unsaved(run)):
        console.print(f"note: {undone}", soft_wrap=True, markup=False)
    if config.runtime != "local":
        console.print(
            "starting: Ray, then the queue, the ranks and the servers, each told as it comes up", soft_wrap=True
        )
    view = TerminalView(run.path, console, live=config.monitor.terminal, from_now=run.resumed)
    try:
        with _dashboard(config, run, console), view if "console" in config.trainer.logger else nullcontext():
            summary = _run_local(config, run) if config.runtime == "local" else _run_ray(config, run)
    except UserError:
        INTERRUPTS.check()
        raise
    except Exception as error:  # the root of the run: a summary and a log were written, the user gets one line
        INTERRUPTS.check()
        error = explained(error, run.path)
        if isinstance(error, UserError):
            raise error from None
        _sum_up(run, error)
        again = "; the same command resumes this run" if resumable(run.path) else ""
        console.print(
            f"failed: {one_line(error)}\nsee {where_to_look(run.path)}{again}",
            style="red",
            soft_wrap=True,
            markup=False,
        )
        return FAILED
    print_summary(summary, run.path, console)
    if summary.status == "interrupted":
        again = "resumes this run (trainer.resume_mode=auto)" if resumable(run.path) else "starts a new run"
        console.print(f"stopped; the same command {again}")
        return INTERRUPTED
    return 0


def _dashboard(config: StreamRLConfig, run: RunDirectory, console: Console) -> AbstractContextManager[None]:
    """The pages beside the run, if they are wanted."""
    wanted = config.monitor.dashboard.enabled
    if not (console.is_terminal if wanted is None else wanted):
        return nullcontext()
    from streamrl.dashboard.beside import dashboard_beside

    return dashboard_beside(
        run.path,
        config.monitor.dashboard.port,
        lambda line: console.print(line, soft_wrap=True, markup=False, highlight=False),
    )


def _sum_up(run: RunDirectory, error: BaseException) -> None:
    """The summary of a run that ended by `error`, unless it has one that says why."""
    if run.summary.exists():
        with suppress(msgspec.MsgspecError, OSError):  # what ended the run is told, not this
            summary = read_summary(run.path)
            if summary.error.startswith("CancelledError"):  # its trainer knew no more than that
                write_summary(run.path, msgspec.structs.replace(summary, error=one_line(error)))
        return
    steps = 0
    with suppress(DamagedFileError, OSError):
        for line in read_metrics(run.path):
            steps = line["step"]
    interrupted = isinstance(error, KeyboardInterrupt)
    status, why = ("interrupted", "") if interrupted else ("failed", one_line(error))
    try:
        write_summary(run.path, Summary(status=status, error=why, steps=steps, train_seconds=0.0))
    except OSError:  # what ended the run is told, not this
        log.exception("no summary could be written")


class TrainerDied(RuntimeError):
    """The process of the single controller ended without a word, or was told to by code in it."""


def one_line(error: BaseException) -> str:
    """Class and last line of the message."""
    return f"{type(error).__name__}: {last_line(error)}"


def _run_local(config: StreamRLConfig, run: RunDirectory) -> Summary:
    from streamrl.rollout.sim.virtual_clock import run_virtual
    from streamrl.runtime.local_runtime import is_virtual, local_parts
    from streamrl.runtime.session import Session

    logging.basicConfig(filename=run.path / "trainer.log", level=logging.INFO)
    if config.trainer.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)  # two threads beside a busy process are many times slower
    logging.raiseExceptions = False  # a log on a full disk is no reason for tracebacks on the terminal

    async def main() -> Summary:
        async with local_parts(config, run) as parts:
            session = Session(parts)
            with INTERRUPTS.asking(_stopper(session)):
                return await session.run()

    try:
        return run_virtual(main()) if is_virtual(config) else asyncio.run(main())
    except SystemExit as error:  # its status would become that of a failed run, and may be 0
        raise TrainerDied(f"{exit_of(error)} in the trainer's process") from None


def _run_ray(config: StreamRLConfig, run: RunDirectory) -> Summary:
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    from streamrl.runtime.task_runner import TaskRunner

    try:
        with EventLog(run.path / "events", "launcher") as events:
            _init_ray(config)
            events.state("part", "Ray runs")
        INTERRUPTS.check()
        actor = ray.remote(TaskRunner).options(num_cpus=0, max_concurrency=8)
        runner = actor.remote(config, str(run.path), run.resumed)
        done = runner.run.remote()
        with INTERRUPTS.asking(lambda: runner.stop.remote()):
            return ray.get(done)
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError:
        raise TrainerDied("the trainer's process (TaskRunner) was killed, by somebody or for want of memory") from None
    finally:
        if file := config.ray_kwargs.timeline_json_file:
            ray.timeline(file)
        ray.shutdown()


def _init_ray(config: StreamRLConfig) -> None:
    import ray

    # Inherited by every process of a cluster started here: one thread per torch process, no surprises at import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    existing = bool(os.environ.get("RAY_ADDRESS"))
    try:
        ray.init(
            address=None if existing else "local",  # not whatever cluster happens to run on this machine
            num_cpus=None if existing else config.ray_kwargs.ray_init.num_cpus,
            object_store_memory=None if existing else 100 << 20,
            include_dashboard=False if not existing else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"Ray did not start: {str(error).splitlines()[0]}") from error


def _stopper(session: Session) -> Callable[[], None]:
    loop = asyncio.get_running_loop()
    return lambda: loop.call_soon_threadsafe(session.stop) and None
