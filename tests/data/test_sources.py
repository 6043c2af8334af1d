"""What an entry of data.train_files may be."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config import ConfigError, load_config
from streamrl.data import DatasetError, PromptDataset
from streamrl.data.order import permutation
from streamrl.data.sources import rows_of, sources_of, taken


def write(file: Path, *names: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": name, "answer": name}) + "\n" for name in names))
    return file


def prompts(*entries: str | Path) -> list[str]:
    return [row["prompt"] for _, row in rows_of(entries)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/2.jsonl", "b/1.jsonl", "a.jsonl"):
        write(tmp_path / name, name)
    write(tmp_path / "b/.hidden.jsonl", "hidden")
    (tmp_path / "b/readme.txt").write_text("no data")
    return tmp_path


def test_a_directory_is_all_data_files_in_it_sorted_by_path(tree: Path):
    assert prompts(tree) == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]


def test_a_pattern_is_the_files_like_it_sorted(tree: Path):
    assert prompts(tree / "b/*.jsonl") == ["b/1.jsonl", "b/2.jsonl"]
    assert prompts(tree / "**/*.jsonl") == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path):
    assert prompts(write(tmp_path / "odd[1].jsonl", "odd")) == ["odd"]


@pytest.mark.parametrize("entry", ["{}", "{}/**/*.jsonl", "{}/*/**"])
def test_a_directory_with_too_much_in_it_is_named_before_all_of_it_was_looked_at(
    tree: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.setattr("streamrl.config.data_files.MAX_ENTRIES", 3)
    with pytest.raises(DatasetError, match=f"more than 3 files and directories below {tree}; name the directory of"):
        list(sources_of([entry.format(tree)]))
    with pytest.raises((ConfigError, DatasetError), match=f"more than 3 files and directories below {tree}"):
        load_config(["experiment=calculator", f"data.train_files={entry.format(tree)}"])
    assert list(sources_of([f"{tree}/*.jsonl"]))


def test_patterns_and_directories_are_found_from_the_working_directory(
    valid: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tree)
    config = load_config([*valid, "data.train_files=[b,'b/*.jsonl']"]).config
    assert config.data.train_files == (f"{tree}/b", f"{tree}/b/*.jsonl")


def saved(directory: Path, *names: str) -> None:
    """As `datasets` saves: shards as streams, listed in an order that is not that of their names."""
    pyarrow = pytest.importorskip("pyarrow")
    directory.mkdir(parents=True)
    for index, name in enumerate(names):
        table = pyarrow.Table.from_pylist([{"prompt": name, "answer": name}])
        with pyarrow.ipc.new_stream(directory / f"data-{9 - index}.arrow", table.schema) as writer:
            writer.write_table(table)
    shards = [{"filename": f"data-{9 - index}.arrow"} for index in range(len(names))]
    (directory / "state.json").write_text(json.dumps({"_data_files": shards}))
    (directory / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_read_in_the_order_of_its_shards_without_the_library(tmp_path: Path):
    saved(tmp_path / "one", "x", "y")
    saved(tmp_path / "all/train", "t")
    assert prompts(tmp_path / "one") == ["x", "y"]
    assert prompts(f"hf:{tmp_path}/one:train") == ["x", "y"]
    assert prompts(f"hf:{tmp_path}/all:train") == ["t"]


def test_a_dataset_of_the_hub_is_loaded_by_the_library(monkeypatch: pytest.MonkeyPatch):
    pyarrow = pytest.importorskip("pyarrow")
    asked: list[Any] = []

    class Stored:
        """A datasets.Dataset, as far as it is used."""

        def with_format(self, form: str) -> Stored:
            assert form == "arrow"
            return self

        def iter(self, batch_size: int) -> Any:
            yield pyarrow.Table.from_pylist([{"prompt": "1?", "answer": "1", "images": [{"bytes": b"png"}]}])

    def load_dataset(name: str, config: str | None, *, split: str) -> Stored:
        asked.append((name, config, split))
        return Stored()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    dataset = PromptDataset.from_files(["hf:openai/gsm8k:main:train", "hf:some/other:test"])
    assert asked == [("openai/gsm8k", "main", "train"), ("some/other", None, "test")]
    assert len(dataset) == 2
    assert dataset.row(0)["images"] == [{"bytes": b"png"}]


def test_samples_of_a_dataset_of_the_hub_are_selected_by_the_library(monkeypatch: pytest.MonkeyPatch):
    pyarrow = pytest.importorskip("pyarrow")

    class Stored:
        def __init__(self, numbers: Any) -> None:
            self.numbers = list(numbers)

        def __len__(self) -> int:
            return len(self.numbers)

        def select(self, numbers: Any) -> Stored:
            return Stored(numbers)

        def with_format(self, form: str) -> Stored:
            return self

        def iter(self, batch_size: int) -> Any:
            yield pyarrow.Table.from_pylist([{"prompt": f"{n}?", "answer": str(n)} for n in self.numbers])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: Stored(range(50))))
    drawn = sorted(permutation(50, 4, -1)[:5].tolist())
    placed = taken(list(sources_of(["hf:some/name:train"])), 5, 4)
    assert [(place.number, row["prompt"]) for place, row in placed] == [(n + 1, f"{n}?") for n in drawn]


def test_what_the_library_cannot_load_is_named(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DatasetError, match="hf:some/name:train cannot be loaded: ConnectionError: offline"):
        prompts("hf:some/name:train")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("hf:some/name:train", "hf:some/name:train needs the datasets library; pip install 'streamrl\\[datasets\\]'"),
        ("hf:some/name", "expected hf:NAME:SPLIT"),
        ("nowhere/*.parquet", "there is no file like nowhere/\\*.parquet"),
        ("@tmp/empty", "there is no file in the directory .*/empty that ends in .jsonl"),
        ("nowhere.jsonl", "there is no file nowhere.jsonl \\(looked in"),
    ],
)
def test_an_entry_that_names_no_data_is_an_error_of_the_configuration(
    valid: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, says: str
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=says):
        load_config([*valid, f"data.train_files='{entry.replace('@tmp', str(tmp_path))}'"])


def test_many_files_are_in_memory_once(tmp_path: Path):
    text = "x" * 20_000
    for index in range(20):
        write(tmp_path / f"{index}.jsonl", *(f"{index}-{line}{text}" for line in range(30)))
    tracemalloc.start()
    try:
        dataset = PromptDataset.from_files([tmp_path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = 2 * len(dataset) * len(text)  # the prompt and, in this file, an answer as long
    assert peak < 1.25 * held
