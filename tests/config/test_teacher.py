"""`distillation.*`: a teacher of another vocabulary, or one that cannot be placed as asked, is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError

KEY = "distillation.teacher_model"


@dataclass
class Teacher:
    """A teacher's directory that fits, to be spoilt, and the arguments that name it."""

    path: Path
    arguments: list[str]

    def problem(self, *more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config([*self.arguments, *more])
        return str(caught.value)

    def rewrite(self, file: str, change) -> None:
        read = json.loads((self.path / file).read_text())
        change(read)
        (self.path / file).write_text(json.dumps(read))


@pytest.fixture
def teacher(valid: list[str], tmp_path: Path) -> Teacher:
    path = shutil.copytree(tmp_path / "model", tmp_path / "teacher")
    return Teacher(path, [*valid, "distillation.enabled=true", f"{KEY}.path={path}", f"{KEY}.placement=servers"])


def test_a_teacher_with_the_policys_tokenizer_is_taken(teacher: Teacher) -> None:
    teacher.rewrite("tokenizer.json", lambda read: read.update(truncation=None))  # other bytes, the same tokens
    config = load_config([*teacher.arguments, f"{KEY}.num_replicas=2"]).config.distillation
    assert (config.on_servers, config.on_ranks) == (True, False)
    assert config.teacher_model.max_token_len_per_gpu is not None


def test_a_teacher_on_the_ranks_is_the_default(teacher: Teacher) -> None:
    config = load_config(teacher.arguments[:-1]).config.distillation
    assert (config.on_servers, config.on_ranks) == (False, True)


def test_other_tokens_are_named(teacher: Teacher) -> None:
    def swap(read) -> None:
        vocabulary = read["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    teacher.rewrite("tokenizer.json", swap)
    found = teacher.problem()
    assert f"{KEY}.path: 2 tokens have other ids" in found
    assert "'a'" in found


def test_a_teacher_without_a_tokenizer_cannot_be_compared(teacher: Teacher) -> None:
    (teacher.path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in teacher.problem()


def test_a_broken_tokenizer_is_said_to_be_so(teacher: Teacher) -> None:
    (teacher.path / "tokenizer.json").write_text("{")
    assert "cannot be read" in teacher.problem()


def test_the_sizes_of_the_vocabularies_are_compared(teacher: Teacher, tmp_path: Path) -> None:
    (tmp_path / "model/config.json").write_text('{"vocab_size": 64}')
    (teacher.path / "config.json").write_text('{"vocab_size": 72}')
    assert "the teacher's vocabulary has 72 tokens, the policy's 64" in teacher.problem()


def test_rows_must_fit_the_teachers_positions(teacher: Teacher) -> None:
    (teacher.path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert "the teacher knows 512 positions" in teacher.problem()


def test_replicas_need_servers(teacher: Teacher) -> None:
    assert f"needs {KEY}.placement=servers" in teacher.problem(f"{KEY}.placement=ranks", f"{KEY}.num_replicas=2")


def test_a_replay_has_its_teacher_on_the_ranks(teacher: Teacher, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    (recorded / "trajectories").mkdir(parents=True)
    (recorded / "trajectories/step-000001-r0-0.safetensors").write_text("")
    (recorded / "batches.jsonl").write_text("")
    config = load_config([*teacher.arguments, f"trainer.replay={recorded}"]).config
    assert config.distillation.on_ranks
