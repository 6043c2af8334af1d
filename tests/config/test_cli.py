"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from yaml import YAMLError

from streamrl import __version__
from streamrl.cli import main, train
from streamrl.config import from_dict

OK = "ok: configuration and data can be used; nothing was started (--dry-run)"
HEAVY = ("torch", "ray", "tensordict", "transformers")


def test_a_dry_run_prints_the_resolved_configuration_and_makes_no_run_directory(
    valid: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", *valid, "--dry-run", "trainer.seed=9"]) == 0
    output = capsys.readouterr()
    assert output.err == f"{OK}\n"
    printed = from_dict(yaml.safe_load(output.out))
    assert printed.trainer.seed == 9
    assert printed.trainer.total_training_steps == 30 * (40 // 8)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_tells_which_libraries_this_machine_lacks(
    valid: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.runtime.preflight.missing", lambda names: [n for n in names if n == "wandb"])
    assert train([*valid, "--dry-run", "trainer.logger=[console,wandb]"]) == 0
    note, ok = capsys.readouterr().err.splitlines()
    assert note.startswith("note: this machine would refuse the run: trainer.logger: wandb is not installed; pip")
    assert ok == OK


def test_every_mistake_of_a_command_line_is_a_line_on_stderr_with_status_2(
    valid: list[str], capsys: pytest.CaptureFixture[str]
):
    assert train([*valid, "a=1", "b=[", "trainer.seed=1,2", "trainer.seed=x", "trainer.use_v1=false", "c=3"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    said = ["cannot read the argument 'b=['", "trainer.seed=1,2: a run takes one value", "trainer.use_v1=false is not",
            "unknown key a; ", "unknown key c; ", "trainer.seed=x is not allowed"]  # fmt: skip
    lines = output.err.splitlines()
    assert len(lines) == len(said)
    assert all(any(line.startswith(f"error: {beginning}") for line in lines) for beginning in said)


def test_a_malformed_row_stops_the_run_before_it_starts(
    valid: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "val.jsonl").write_text('{"prompt": 3}\n')
    assert train(valid) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/val.jsonl, line 1, column 'prompt': expected chat messages or a string, found int 3\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RecursionError("too deep"), "RecursionError: too deep"),
        (OSError(5, "Input/output error", "/data/a.jsonl"), "OSError: Input/output error: /data/a.jsonl"),
        (ValueError("one\n  two"), "ValueError: one two"),
        (TypeError("x" * 1_000_000), "TypeError: " + "x" * 100 + "... (1,000,000 characters)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "UnicodeDecodeError: 'utf-8' codec can't decode"),
        (YAMLError("bad"), "YAMLError: bad"),
    ],
)
def test_whatever_else_reading_raises_is_one_line_and_its_traceback_is_asked_for(
    valid: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, says: str
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("streamrl.data.train_dataset", fail)
    assert train([*valid, "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    monkeypatch.setenv("STREAMRL_TRACEBACK", "1")
    assert train([*valid, "--dry-run"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_long_name_in_the_data_is_cut(valid: list[str], capsys: pytest.CaptureFixture[str]):
    assert train([*valid, "--dry-run", "data.prompt_key=" + "a" * 20_000]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert len(line) < 1000


def test_too_few_prompts_for_a_batch(valid: list[str], capsys: pytest.CaptureFixture[str]):
    assert train([*valid, "data.train_batch_size=64"]) == 2
    assert "40 prompts are fewer than data.train_batch_size=64" in capsys.readouterr().err


def test_keys_without_effect_are_named_in_one_line(valid: list[str], capsys: pytest.CaptureFixture[str]):
    assert train([*valid, "--dry-run", "trainer.balance_batch=True", "trainer.esi_redundant_time=0"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: without effect here, kept for verl's sake: trainer.balance_batch, trainer.esi_redundant_time",
        OK,
    ]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"streamrl {__version__}\n"


def test_an_unknown_command_exits_with_status_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main(["tran"])
    assert done.value.code == 2


def test_python_m_streamrl_main_is_the_same_command_and_imports_nothing_heavy(valid: list[str]):
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('streamrl.main', run_name='__main__')\n"
        f"except SystemExit as done: print([m for m in {HEAVY} if m in sys.modules], done.code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *valid, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    unlike, *rest = done.stderr.splitlines()
    assert rest == [OK, "[] 0"]
    assert unlike.startswith(
        "note: not given, and verl's default is another: algorithm.adv_estimator=grpo (verl: gae), "
    )
    assert done.stdout.startswith("runtime: ray\n")
