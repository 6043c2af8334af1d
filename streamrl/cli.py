"""The command line: `streamrl train key=value ...`.

A mistake of the user ends in a line on stderr and exit status 2, before anything was started. Nothing here
imports torch or Ray: the run itself does (streamrl.runtime.launch), once the configuration and the data are known good.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from yaml import YAMLError

from streamrl import __version__
from streamrl.config import StreamRLConfig, check_ports, load_config, to_yaml
from streamrl.config.verl_keys import VERL_ENTRY
from streamrl.errors import ConfigError, UserError, one_line
from streamrl.runtime.interrupts import INTERRUPTS

USAGE_ERROR = 2
TRACEBACK = "STREAMRL_TRACEBACK"
INTERRUPTED = 130

MODEL_KEYS = ("actor_rollout_ref.model.path", "critic.model.path")

EXAMPLES = """\
examples:
  streamrl train experiment=calculator
  streamrl train experiment=calculator trainer.v1.trainer_mode=sync trainer.seed=1
  streamrl train experiment=calculator --dry-run       prints all keys with their values

Keys are verl's where the meaning is the same; a list is written key=[a,b], nothing is key=null.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake in what was asked for, 130 interrupted, else a failed run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="streamrl", description="Asynchronous RL post-training around a transfer queue."
    )
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("train", help="run a training job", add_help=False)
    commands.add_parser("config", help="the reference of all keys; a verl script translated", add_help=False)
    commands.add_parser("runs", help="list runs and the memory they hold, free it", add_help=False)
    commands.add_parser("dash", help="the dashboard of a run, live or ended, in a browser", add_help=False)
    commands.add_parser("servers", help="the LLM servers of a running job: list, add, drain, remove", add_help=False)
    commands.add_parser("export", help="a checkpoint as a model directory that transformers opens", add_help=False)
    commands.add_parser("trace", help="a run as a trace that Perfetto opens", add_help=False)
    chosen = parser.parse_args(arguments[:1] or ["--help"])
    verbs = {
        "train": train, "config": configuration, "runs": runs, "dash": dash, "servers": servers, "export": export,
        "trace": trace,
    }  # fmt: skip
    return verbs[chosen.command](arguments[1:])


def runs(argv: Sequence[str]) -> int:
    """`streamrl runs`."""
    from streamrl.runtime.runs import main as list_runs

    return list_runs(argv)


def dash(argv: Sequence[str]) -> int:
    """`streamrl dash`."""
    from streamrl.dashboard.serve import main as serve_dashboard

    return serve_dashboard(argv)


def servers(argv: Sequence[str]) -> int:
    """`streamrl servers`."""
    from streamrl.runtime.servers import main as ask_servers

    return ask_servers(argv)


def export(argv: Sequence[str]) -> int:
    """`streamrl export`."""
    from streamrl.runtime.export import main as export_checkpoint

    return export_checkpoint(argv)


def trace(argv: Sequence[str]) -> int:
    """`streamrl trace export`."""
    from streamrl.monitor.trace.export import main as export_trace

    return export_trace(argv)


def configuration(argv: Sequence[str]) -> int:
    """`streamrl config reference` and `streamrl config from-verl FILE`."""
    parser = argparse.ArgumentParser(prog="streamrl config")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("reference", help="print every key with its type, default and meaning, as Markdown")
    translate = commands.add_parser(
        "from-verl", help="print the command of a shell script for verl as one for StreamRL"
    )
    translate.add_argument("file", metavar="FILE")
    options = parser.parse_args(argv)
    if options.command == "reference":
        from streamrl.config.reference import reference

        print(reference(), end="")
        return 0
    return _from_verl(options.file)


def _from_verl(file: str) -> int:
    from streamrl.config.from_verl import translate_file

    try:
        with reading():
            translation = translate_file(file)
        if translation.problems:
            raise ConfigError(*translation.problems)
    except UserError as error:
        _show(error)
        return USAGE_ERROR
    if translation.inert:
        print(f"note: left out, without effect here: {', '.join(translation.inert)}", file=sys.stderr)
    if translation.added:
        print(f"note: written out, because verl's default is another: {', '.join(translation.added)}", file=sys.stderr)
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    print(translation.command(), end="")
    return 0


def train(argv: Sequence[str]) -> int:
    """`streamrl train`, and `python -m streamrl.main`."""
    from streamrl.runtime.preflight import check_machine, not_installed

    options = _train_parser().parse_intermixed_args([argument for argument in argv if argument not in VERL_ENTRY])
    try:
        with reading():
            config = _checked(_fetched(options), options.config_dir, like_verl=options.verl)
        if options.dry_run:
            print(to_yaml(config), end="", flush=True)
            for problem in not_installed(config):
                print(f"note: this machine would refuse the run: {problem}", file=sys.stderr)
            print("ok: configuration and data can be used; nothing was started (--dry-run)", file=sys.stderr)
            return 0
        check_ports(config)
        check_machine(config)
        INTERRUPTS.check()
        return _launch(config)
    except UserError as error:
        _show(error)
        return USAGE_ERROR
    except SystemExit as error:  # of a dataset class, a plugin: with its status a job that never ran may end with 0
        from streamrl.runtime.failures import exit_of

        _show(UserError(f"{exit_of(error)} while the job was made ready"))
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def reading() -> Iterator[None]:
    """A net under all that reads configuration and data: an error that nobody foresaw is one line, too, and its
    traceback is shown with STREAMRL_TRACEBACK=1 only."""
    try:
        yield
    except UserError:
        raise
    except (RecursionError, OSError, YAMLError, ValueError, TypeError) as error:
        INTERRUPTS.check()  # it may be what became of an interrupt
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exc()
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        file = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
        raise UserError(
            f"the configuration or the data cannot be read: {type(error).__name__}: {text}{file} "
            f"({TRACEBACK}=1 shows where)"
        ) from error


def _fetched(options: argparse.Namespace) -> list[str]:
    """The arguments, models that are named as on the hub downloaded first. A dry run downloads nothing."""
    from streamrl.config import hub

    arguments = list(options.overrides)
    for place, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if key.lstrip("+") in MODEL_KEYS and hub.is_hub_id(value) and not options.dry_run:
            arguments[place] = f"{key}={hub.fetch(value)}"
    return arguments


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamrl train",
        description="Run a training job.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, in Hydra's grammar")
    parser.add_argument("--dry-run", action="store_true", help="check all, print the resolved configuration")
    parser.add_argument(
        "--verl",
        action="store_true",
        help="written for verl: note other defaults, replace its servers",
    )
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="also look for experiment/<name>.yaml here")
    return parser


def _checked(overrides: Sequence[str], config_dir: str | None, *, like_verl: bool) -> StreamRLConfig:
    """The configuration, whole and with its data read once: whatever is wrong shows here."""
    from streamrl.data import train_dataset, training_steps, val_dataset

    loaded = load_config(overrides, config_dir, like_verl=like_verl)
    if loaded.inert:
        print(f"note: without effect here, kept for verl's sake: {', '.join(loaded.inert)}", file=sys.stderr)
    if like_verl and loaded.unlike_verl:
        listed = ", ".join(loaded.unlike_verl)
        print(f"note: not given, and verl's default is another: {listed}; give those that you want", file=sys.stderr)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    config = loaded.config
    if config.trainer.replay is not None:
        _check_replay(config)
    train, val = train_dataset(config, _progress), val_dataset(config, _progress)
    for key, dataset in (("data.train_files", train), ("data.val_files", val)):
        if dataset is not None and dataset.left_out:
            print(
                f"note: {key}: {dataset.left_out} of {dataset.left_out + len(dataset)} prompts are longer than "
                f"data.max_prompt_length={config.data.max_prompt_length} tokens and left out",
                file=sys.stderr,
            )
    steps = training_steps(config, len(train))
    return replace(config, trainer=replace(config.trainer, total_training_steps=steps))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_replay(config: StreamRLConfig) -> None:
    """Raises UserError for a recording that this configuration cannot train again."""
    from streamrl.recording.record import Recording

    trainer = config.trainer
    recording = Recording(Path(trainer.replay or ""))
    recording.check(config)
    if trainer.total_training_steps is not None and trainer.total_training_steps > max(recording.steps):
        print(
            f"note: trainer.total_training_steps={trainer.total_training_steps}: {trainer.replay} recorded "
            f"{max(recording.steps)} steps; the replay ends with them",
            file=sys.stderr,
        )


def _launch(config: StreamRLConfig) -> int:
    from streamrl.runtime.launch import launch
    from streamrl.runtime.run_dir import open_run, run_name

    trainer = config.trainer
    run = open_run(
        Path(trainer.runs_dir),
        run_name(config),
        to_yaml(config),
        resume_mode=trainer.resume_mode,
        resume_from=Path(trainer.resume_from_path) if trainer.resume_from_path else None,
        replayed=trainer.replay,
    )
    try:
        return launch(config, run)
    finally:
        run.give_latest_back()
        run.release()


def _show(error: UserError) -> None:
    for problem in error.problems if isinstance(error, ConfigError) else (str(error),):
        print(f"error: {one_line(problem)}", file=sys.stderr)
