"""Datasets larger than memory: the same rows in the same order, a few of them held at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.rendering.chat import ChatTokenizer
from streamrl.data import DatasetError, PromptDataset, packed, train_dataset
from streamrl.data.formats import Place
from streamrl.data.lengths import PromptLimit
from streamrl.data.order import permutation
from streamrl.data.packed import PackedRows
from streamrl.data.sources import sources_of, taken
from tests.data.test_reading import GOOD, written

MODEL = Path(__file__).parents[2] / "examples/calculator/model"
HERE = Place("here", "row", 1)
SUFFIXES = [".jsonl", ".json", ".parquet", ".arrow", ".stream.arrow"]


@pytest.fixture
def small_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every dataset goes to disk; where."""
    monkeypatch.setattr(packed, "IN_MEMORY", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/streamrl"


def numbered(path: Path, count: int = 50) -> Path:
    return written(path, [GOOD | {"prompt": f"{number}?"} for number in range(count)])


def asked(dataset: PromptDataset, epoch: int = 0, start: int = 0) -> list[str]:
    return [dataset.at(epoch, at)["raw_prompt"][0]["content"] for at in range(start, len(dataset))]


@pytest.mark.parametrize("in_memory", [0, 60, 10_000])
def test_packed_rows_come_back_as_they_were(small_memory: Path, in_memory: int):
    rows, given = PackedRows(in_memory), [{"n": i, "bytes": b"x" * i, "array": np.arange(i)} for i in range(9)]
    for row in given:
        rows.append(row, HERE)
        assert rows[len(rows) - 1]["n"] == row["n"]
    rows.replace(3, {"n": "other"}, HERE)
    rows.drop([0, 8])
    assert [row["n"] for row in rows] == [1, 2, "other", 4, 5, 6, 7]
    assert rows[0]["bytes"] == b"x"
    assert rows[6]["array"].tolist() == list(range(7))


def test_the_file_of_packed_rows_has_no_name_and_ends_with_the_process(small_memory: Path):
    rows = PackedRows()
    rows.append({"prompt": "x" * 200}, HERE)
    assert rows[0] == {"prompt": "x" * 200}
    assert list(small_memory.iterdir()) == []


def test_rows_that_cannot_be_written_name_the_directory_and_the_remedy(tmp_path: Path, small_memory: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DatasetError, match=r"line 1: .* cannot be written to .*/cache/streamrl: .*XDG_CACHE_HOME"):
        PromptDataset.from_files([numbered(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("options", [{}, {"max_samples": 7}, {"shuffle": False, "max_samples": 20}], ids=str)
def test_a_dataset_on_disk_is_asked_in_the_order_of_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, options: dict[str, Any]
):
    files = [numbered(tmp_path / f"{name}{suffix}", rows) for name, rows in (("a", 30), ("b", 1), ("c", 40))]
    held = PromptDataset.from_files(files, seed=5, **options)
    monkeypatch.setattr(packed, "IN_MEMORY", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    on_disk = PromptDataset.from_files(files, seed=5, **options)
    assert asked(on_disk) == asked(held)
    assert asked(on_disk, epoch=1) == asked(held, epoch=1)


def test_a_run_that_goes_on_at_a_cursor_asks_what_it_would_have_asked(tmp_path: Path, small_memory: Path):
    file = numbered(tmp_path / "a.parquet")
    whole = asked(PromptDataset.from_files([file], seed=3), epoch=2)
    assert asked(PromptDataset.from_files([file], seed=3), epoch=2, start=31) == whole[31:]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_samples_are_rows_of_all_files_drawn_by_the_seed(tmp_path: Path, suffix: str):
    """And a row that is not drawn need not be one."""
    rows = [GOOD | {"prompt": f"{number}?"} for number in range(60)]
    drawn = sorted(permutation(60, 9, -1)[:10].tolist())
    rows = [row if number in drawn else row | {"prompt": ""} for number, row in enumerate(rows)]
    files = [written(tmp_path / f"a{suffix}", rows[:25]), written(tmp_path / f"b{suffix}", rows[25:])]
    dataset = PromptDataset.from_files(files, seed=9, max_samples=10)
    assert [dataset.row(i)["raw_prompt"][0]["content"] for i in range(10)] == [f"{number}?" for number in drawn]
    places = [place.number for place, _ in taken(list(sources_of(files)), 10, 9)]
    assert places == [number + 1 if number < 25 else number - 24 for number in drawn]


def test_row_groups_without_a_sample_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([GOOD | {"prompt": f"{number}?"} for number in range(100)])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    decoded, read = [], parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        parquet.ParquetFile, "iter_batches", lambda self, **o: decoded.extend(o["row_groups"]) or read(self, **o)
    )
    PromptDataset.from_files([tmp_path / "a.parquet"], seed=1, max_samples=3)
    assert decoded == sorted({int(number) // 10 for number in permutation(100, 1, -1)[:3]})
    decoded.clear()
    PromptDataset.from_files([tmp_path / "a.parquet"], shuffle=False, max_samples=15)
    assert decoded == [0, 1]


GENERATED = """
def once(data_files, config, split):
    for number in range(40):
        yield {"prompt": f"{number}?", "answer": number}

class ByNumber:
    seen = []
    def __init__(self, **_): pass
    def __len__(self): return 40
    def __getitem__(self, number):
        self.seen.append(number)
        return {"prompt": f"{number}?", "answer": number}
"""


@pytest.mark.parametrize("name", ["once", "ByNumber"])
def test_samples_of_a_dataset_of_your_own_are_drawn_like_those_of_files(tmp_path: Path, small_memory: Path, name: str):
    from streamrl.config import from_dict

    (tmp_path / "mine.py").write_text(GENERATED)
    custom = {"path": str(tmp_path / "mine.py"), "name": name}
    data = {"custom_cls": custom, "train_batch_size": 4, "train_max_samples": 6, "seed": 2}
    dataset = train_dataset(from_dict({"data": data}))
    drawn = sorted(permutation(40, 2, -1)[:6].tolist())
    assert [dataset.row(i)["raw_prompt"][0]["content"] for i in range(6)] == [f"{number}?" for number in drawn]


@pytest.mark.parametrize("overlong", ["drop", "right"])
def test_long_prompts_are_dropped_or_cut_on_disk_as_in_memory(tmp_path: Path, small_memory: Path, overlong: Any):
    chat = ChatTokenizer.from_pretrained(MODEL)
    prompts = ["1" * 80 if number % 3 else f"{number}?" for number in range(30)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(GOOD | {"prompt": prompt}) + "\n" for prompt in prompts))
    dataset = PromptDataset.from_files([file], shuffle=False, limit=PromptLimit(chat, 40, overlong))
    texts = asked(dataset)
    assert [text for text in texts if "?" in text] == [f"{number}?" for number in range(0, 30, 3)]
    assert (len(texts), dataset.left_out) == ((10, 20) if overlong == "drop" else (30, 0))
    assert all(len(chat.render_prompt([{"role": "user", "content": text}])) <= 40 for text in texts)


WALK = """
import sys, tracemalloc
from pathlib import Path
import pyarrow, pyarrow.parquet, pyarrow.ipc
from agent_loop.rendering.chat import ChatTokenizer
from streamrl.data import PromptDataset, lengths, packed

file, cache, model = sys.argv[1:]
packed.IN_MEMORY, lengths.CHUNK_CHARACTERS = int(cache), int(cache) // 2
limit = lengths.PromptLimit(ChatTokenizer.from_pretrained(model), 20_000, "drop")
tracemalloc.start()
dataset = PromptDataset.from_files([file], seed=1, limit=limit)
seen = sum(int(dataset.at(0, at)["raw_prompt"][0]["content"].partition(" ")[0]) for at in range(len(dataset)))
assert seen == sum(range(len(dataset)))
print(len(dataset), tracemalloc.get_traced_memory()[1] + pyarrow.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".stream.arrow"])
def test_opening_and_walking_a_file_far_beyond_memory_holds_little_of_it(tmp_path: Path, suffix: str):
    """Python's own memory and that of pyarrow; what the system caches of files is its business."""
    pytest.importorskip("pyarrow")
    cache, text = 1 << 20, "x" * 16_000
    rows = [GOOD | {"prompt": f"{number} {text}"} for number in range(3000)]
    file = written(tmp_path / f"a{suffix}", rows)
    if suffix == ".parquet":  # one row group; text like this would be compressed to nothing
        from pyarrow import Table, parquet

        pages = {"write_batch_size": 16, "compression": "none", "use_dictionary": False}
        parquet.write_table(Table.from_pylist(rows), file, **pages)
    assert file.stat().st_size > 40 * cache
    command = [sys.executable, "-c", WALK, str(file), str(cache), str(MODEL)]
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr
    count, peak = map(int, ran.stdout.split())
    assert count == 3000
    assert peak < file.stat().st_size / 4, f"held {peak >> 20} MiB of {file.stat().st_size >> 20}"
