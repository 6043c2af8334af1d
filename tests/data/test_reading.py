"""Files become rows; a malformed one is named by file, line and column."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.data import DatasetError, PromptDataset
from streamrl.data.columns import Columns

GOOD: dict[str, Any] = {"prompt": "1 + 1 = ?", "data_source": "sum", "reward_model": {"ground_truth": 2}}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".arrow":
            pyarrow = pytest.importorskip("pyarrow")
            table = pyarrow.Table.from_pylist(rows)
            make = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
            with make(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".stream.arrow"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    rows = [GOOD | {"prompt": [{"role": "user", "content": f"{i}?"}], "extra_info": {"index": i}} for i in range(3)]
    dataset = PromptDataset.from_files([written(tmp_path / f"data{suffix}", rows)], shuffle=False)
    assert [dataset.row(i)["raw_prompt"] for i in range(3)] == [row["prompt"] for row in rows]
    assert [dataset.row(i)["extra_info"] for i in range(3)] == [{"index": 0}, {"index": 1}, {"index": 2}]


def test_files_follow_one_another(tmp_path: Path):
    files = [written(tmp_path / f"{name}.jsonl", [GOOD | {"prompt": name}]) for name in ("a", "b")]
    dataset = PromptDataset.from_files(files)
    assert [dataset.row(i)["raw_prompt"][0]["content"] for i in range(2)] == ["a", "b"]


def test_a_plain_prompt_is_one_user_message(tmp_path: Path):
    dataset = PromptDataset.from_files([written(tmp_path / "a.jsonl", [GOOD])])
    assert dataset.row(0) == {
        "raw_prompt": [{"role": "user", "content": "1 + 1 = ?"}],
        "data_source": "sum",
        "reward_model": {"ground_truth": 2},
        "extra_info": {},
        "agent_name": None,
        "tools_kwargs": {},
        "tool_selection": None,
        "n": None,
        "images": None,
        "videos": None,
        "audios": None,
        "index": 0,
    }


def test_tools_kwargs_come_from_their_column_or_from_extra_info(tmp_path: Path):
    inside = GOOD | {"extra_info": {"tools_kwargs": {"search": {"top": 3}}}}
    rows = [inside, inside | {"tools_kwargs": {"search": {"top": 5}}}]
    dataset = PromptDataset.from_files([written(tmp_path / "a.jsonl", rows)])
    assert [dataset.row(i)["tools_kwargs"]["search"]["top"] for i in range(2)] == [3, 5]


def test_prompt_and_source_columns_can_be_renamed(tmp_path: Path):
    row = {"question": "1?", "task": "sum", "reward_model": {"ground_truth": 1}}
    file = written(tmp_path / "a.jsonl", [row])
    dataset = PromptDataset.from_files([file], columns=Columns({"prompt": "question", "data_source": "task"}))
    assert dataset.row(0)["data_source"] == "sum"


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{{\n")
    with pytest.raises(DatasetError, match=r"a\.jsonl, line 3: not valid JSON at character 2"):
        PromptDataset.from_files([file])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": None}, "line 2: column 'prompt' is null; give it a value"),
        ({"prompt": 3}, "line 2, column 'prompt': expected chat messages or a string, found int 3"),
        ({"prompt": []}, "line 2, column 'prompt': expected chat messages or a string, found list []"),
        ({"prompt": [{"role": "boss", "content": "x"}]}, "column 'prompt', message 1: expected"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "user"}]}, "column 'prompt', message 2: expected"),
        ({"data_source": None}, "line 2: column 'data_source' is null"),
        ({"data_source": 7}, "line 2, column 'data_source': expected a string, found int 7"),
        ({"reward_model": None}, "line 2: column 'reward_model' is null"),
        ({"reward_model": "2"}, "column 'reward_model': expected an object, found str"),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model': expected a key 'ground_truth', found dict"),
        ({"reward_model": {"ground_truth": None}}, "'reward_model': its 'ground_truth' is null; give it a value"),
        ({"extra_info": [1]}, "column 'extra_info': expected an object, found list [1]"),
        ({"agent_name": 1}, "column 'agent_name': expected a string, found int 1"),
        ({"tools_kwargs": "x"}, "column 'tools_kwargs': expected an object, found str"),
        ({"tool_selection": ["a", 1]}, "column 'tool_selection': expected a list of tool names"),
        ({"n": 0}, "column 'n': expected a number of samples from 1 to 4096, found int 0"),
        ({"__rollout_n__": "4"}, "column '__rollout_n__': expected a number of samples"),
        ({"prompt": "\ud800"}, "line 2: field 'row' row 0: '\\ud800' is no valid text"),
        ({"images": "a.png"}, "column 'images': expected a list, found str"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_column(tmp_path: Path, change: dict[str, Any], says: str):
    file = written(tmp_path / "a.jsonl", [GOOD, GOOD | change])
    with pytest.raises(DatasetError) as caught:
        PromptDataset.from_files([file])
    assert str(caught.value).startswith(str(file))
    assert says in str(caught.value)


def test_a_value_that_the_queue_cannot_carry_is_named(tmp_path: Path):
    file = written(tmp_path / "a.parquet", [GOOD | {"extra_info": {"when": datetime(2026, 1, 1)}}])
    with pytest.raises(DatasetError, match=r"a\.parquet, row 1: .*datetime at value\['extra_info'\]\['when'\]"):
        PromptDataset.from_files([file])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"[1]\n", "line 1: expected an object with columns, found list [1]"),
        ("a.jsonl", b"\xff\xfe\n", "line 1: not valid JSON"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1: not valid JSON"),
        ("a.jsonl", b"", "no rows in"),
        ("a.json", b"{}", "expected a JSON array of rows, found dict {}"),
        ("a.json", b"[\n{},\n{,\n]", "a.json, line 3: not valid JSON at character 2"),
        ("a.json", b"[{}, 3]", "row 1: column 'prompt' (and input) is missing; the row has no columns"),
        ("a.csv", b"", "ends in .csv; readable are .jsonl, .json, .parquet, .arrow"),
        ("a.parquet", b"not parquet", "not a readable parquet file"),
        ("a.arrow", b"not arrow", "not a readable arrow file"),
    ],
)
def test_a_file_that_is_no_dataset_says_why(tmp_path: Path, name: str, content: bytes, says: str):
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        PromptDataset.from_files([tmp_path / name])
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"there is no dataset file .*nowhere\.jsonl"):
        PromptDataset.from_files([tmp_path / "nowhere.jsonl"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_parts_of_text_are_one_text(tmp_path: Path, suffix: str):
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    row = GOOD | {"prompt": [{"role": "user", "content": parts, "tool_calls": None}]}
    [message] = PromptDataset.from_files([written(tmp_path / f"a{suffix}", [row])]).row(0)["raw_prompt"]
    assert (message["role"], message["content"]) == ("user", "hi\nthere")


@pytest.mark.parametrize("calls", [5, "f", {"name": "f"}, [5]])
def test_tool_calls_are_a_list_of_objects(tmp_path: Path, calls: Any):
    row = GOOD | {"prompt": [{"role": "assistant", "content": "", "tool_calls": calls}]}
    file = written(tmp_path / "a.jsonl", [GOOD, row])
    with pytest.raises(DatasetError, match="line 2, column 'prompt', message 1: expected tool_calls as a list of obj"):
        PromptDataset.from_files([file])


def test_an_integer_of_thousands_of_digits_is_named_by_its_line(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{json.dumps(GOOD)}\n{{"prompt": {"9" * 5000}}}\n')
    with pytest.raises(DatasetError, match=r"a.jsonl, line 2: not valid JSON: Exceeds the limit"):
        PromptDataset.from_files([file])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_text_in_a_table_that_is_not_utf8_is_named_by_row_and_column(tmp_path: Path, suffix: str):
    file = written(tmp_path / f"a{suffix}", [GOOD | {"prompt": text} for text in ("a", "MARK", "c")])
    file.write_bytes(file.read_bytes().replace(b"MARK", b"MAR\xff"))
    with pytest.raises(DatasetError, match=rf"a{suffix}, row 2, column 'prompt': not UTF-8"):
        PromptDataset.from_files([file])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_whose_name_is_not_utf8_is_an_error_of_the_file(tmp_path: Path, suffix: str):
    file = written(tmp_path / f"a{suffix}", [GOOD | {"MARK": 1}])
    file.write_bytes(file.read_bytes().replace(b"MARK", b"MAR\xff"))
    with pytest.raises(DatasetError, match=f"a{suffix}: "):
        PromptDataset.from_files([file])


@pytest.mark.parametrize("suffix", [".arrow", ".stream.arrow"])
def test_a_damaged_arrow_file_is_an_error_that_names_it_and_not_the_end_of_the_process(tmp_path: Path, suffix: str):
    file = written(tmp_path / f"a{suffix}", [GOOD | {"prompt": "1?" * 500}] * 2)
    offsets = np.array([0, 1000, 2000], "<i4").tobytes()
    content = file.read_bytes()
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, np.array([0, 2**31 - 1, 2000], "<i4").tobytes()))
    code = "import sys; from streamrl.data import PromptDataset; PromptDataset.from_files([sys.argv[1]])"
    ended = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"DatasetError: {file}: not a readable arrow file: column 'prompt'" in ended.stderr


def test_reading_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.data.dataset.TOLD_EVERY", 0.0)
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n" * 3)
    told: list[str] = []
    PromptDataset.from_files([file], tell=told.append)
    assert told == [f"reading {file}: {rows} rows in 0 s" for rows in (1, 2, 3)]


def test_a_missing_column_is_no_null_one(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "prompt"}) + "\n")
    with pytest.raises(
        DatasetError, match=r"line 1: column 'prompt' \(and input\) is missing; the row has data_source"
    ):
        PromptDataset.from_files([file])
