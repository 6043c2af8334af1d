"""`streamrl export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from streamrl.errors import UserError, one_line
from streamrl.trainer.checkpoint import CheckpointStore

EXAMPLES = """\
examples:
  streamrl export runs/latest exported                                    the newest checkpoint of a run
  streamrl export runs/latest/checkpoints/global_step_40 exported
  streamrl export runs/latest adapter --adapter                           LoRA: the adapters alone, for peft
"""


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="streamrl export", description="Write a checkpoint as a model directory that transformers opens.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", metavar="RUN_DIR_OR_CHECKPOINT")
    parser.add_argument("out", metavar="OUT_DIR", help="a new or an empty directory")
    parser.add_argument("--adapter", action="store_true", help="LoRA adapters alone, not merged into the model")
    options = parser.parse_args(argv)
    try:
        sys.stdout.write(f"{export(Path(options.source), Path(options.out), adapter=options.adapter)}\n")
    except UserError as error:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
        return 2
    return 0


def export(source: Path, out: Path, *, adapter: bool = False) -> str:
    """Write the checkpoint to `out`, which appears whole; a line saying what was written. Raises UserError."""
    run, step = find_checkpoint(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty directory; name another one")
    checkpoints = CheckpointStore(run / "checkpoints")
    checkpoints.load(step)  # every file is there and unchanged
    model = _model_of(run)
    try:
        return _written(checkpoints.path(step) / "actor", model, out, adapter=adapter, what=f"step {step} of {run}")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error


def find_checkpoint(source: Path) -> tuple[Path, int]:
    """(run directory, step) of a run's newest checkpoint, or of the one named. Raises UserError."""
    source = source.expanduser()
    if not source.is_dir():
        raise UserError(f"there is no directory {source}; give a run directory, or a checkpoint in one")
    source = source.resolve()
    for checkpoint in (source, source.parent):  # a checkpoint has a config.yaml of its own
        run = checkpoint.parent.parent
        kind, _, step = checkpoint.name.rpartition("_")
        if kind == "global_step" and step.isdigit() and (run / "config.yaml").is_file():
            return run, int(step)
    if (source / "config.yaml").is_file():
        steps = CheckpointStore(source / "checkpoints").steps()
        if not steps:
            raise UserError(f"{source} has no checkpoint; trainer.save_freq says how often one is written")
        return source, steps[-1]
    raise UserError(
        f"{source} is neither a run directory (it has no config.yaml) nor a checkpoint in one "
        "(<run>/checkpoints/global_step_<k>)"
    )


def _model_of(run: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((run / "config.yaml").read_text())
        model = config["actor_rollout_ref"]["model"]
        path = Path(model["path"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{run}/config.yaml cannot be read: {error}") from error
    if not (path / "config.json").is_file():
        raise UserError(f"the model that the run began with is not at {path} any more, and its config is needed")
    return model


def _written(actor: Path, model: dict[str, Any], out: Path, *, adapter: bool, what: str) -> str:
    from streamrl.workers.engine.hf_model import read_trained, write_adapter, write_model  # torch
    from streamrl.workers.engine.settings import LoRASettings

    rank = int(model.get("lora_rank") or 0)
    if adapter and not rank:
        raise UserError(f"{what} has no adapters (model.lora_rank=0); leave out --adapter")
    lora = LoRASettings(rank=rank, alpha=model["lora_alpha"]) if rank else None
    base, tokenizer = model["path"], model.get("tokenizer_path") or model["path"]
    trained = read_trained(actor)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.parent / f".{out.name}.{os.getpid()}.draft"
    try:
        if adapter and lora:
            dtype = write_adapter(base, tokenizer, trained, draft, lora)
        else:
            dtype = write_model(base, tokenizer, trained, draft, lora)
        draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    kind = "adapters" if adapter else "model, adapters merged" if lora else "model"
    return f"{what}: {kind} in {dtype}, written to {out}"
