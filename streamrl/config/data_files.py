"""What an entry of `data.train_files` may name, and the files behind it.

data/train.jsonl            a file: jsonl, json, parquet or arrow (IPC file or stream)
data/shards                 a directory: its data files, also those of its subdirectories, sorted by path, if these have
                            no more than MAX_ENTRIES entries together;
                            of one that `datasets` saved (save_to_disk), the shards in their order
data/part-*.parquet         a pattern (** crosses directories), sorted by path
hf:openai/gsm8k:main:train  a dataset of the hub or a local one, read by `datasets`: hf:NAME[:CONFIG]:SPLIT;
                            a directory written by save_to_disk is read without it
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from streamrl.config.paths import find, looked_in, roots
from streamrl.errors import DatasetError, shortened

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
PYARROW = (".parquet", ".arrow")
NEEDS_PYARROW = "needs pyarrow; pip install 'streamrl[parquet]', or convert it to jsonl"
HF = "hf:"
_SAVED = "state.json"
"""In a directory of save_to_disk: names the shards."""
MAX_ENTRIES = 50_000
"""Looked at below a directory, or below where a pattern with ** begins: a second or less. There are more in a home
directory, or /tmp, which nobody means."""


@dataclass(frozen=True, slots=True)
class HFDataset:
    """`hf:name:split` or `hf:name:config:split`."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, entry: str) -> HFDataset:
        """Raises DatasetError."""
        name, *parts = entry.removeprefix(HF).split(":")
        if not name or not 1 <= len(parts) <= 2 or not all(parts):
            raise DatasetError(
                f"{entry}: expected hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, as hf:openai/gsm8k:main:train"
            )
        return cls(name, parts[0] if len(parts) == 2 else None, parts[-1])

    def saved(self) -> Path | None:
        """The directory of the split when `name` is one that save_to_disk wrote."""
        found = find(self.name)
        if found is None or not found.is_dir():
            return None
        return next((path for path in (found / self.split, found) if (path / _SAVED).is_file()), None)


def absolute(entry: str) -> str:
    """The entry with its path made absolute; one that names nothing stays as it is."""
    if entry.startswith(HF):
        name, colon, rest = entry.removeprefix(HF).partition(":")
        found = find(name) if name else None
        return entry if found is None else f"{HF}{found}{colon}{rest}"
    if found := find(entry):
        return str(found)
    for root in roots() if glob.has_magic(entry) else ():
        pattern = str(root / Path(entry).expanduser())
        if _matching(pattern):
            return pattern
    return entry


def files_of(entry: str) -> list[Path]:
    """The files of an absolute entry that is no `hf:` one; what is missing is among them as it was named."""
    path = Path(entry)
    if path.is_dir():
        return directory_files(path)
    if not path.exists() and glob.has_magic(entry):
        return sorted(Path(found) for found in _matching(entry) if Path(found).suffix in SUFFIXES)
    return [path]


def _matching(pattern: str) -> list[str]:
    """Raises DatasetError for one with ** that has too much to look through."""
    parts = Path(pattern).parts
    if "**" in parts:
        first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
        _walked(Path(*parts[:first]), pattern)
    return glob.glob(pattern, recursive=True)


def _walked(directory: Path, entry: str) -> list[Path]:
    """The files below, hidden directories left out. Raises DatasetError where there is too much to look through, and
    OSError if the directory itself cannot be listed."""
    os.scandir(directory).close()
    found, seen = [], 0
    for place, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        seen += len(directories) + len(files)
        if seen > MAX_ENTRIES:
            raise DatasetError(
                f"{entry}: there are more than {MAX_ENTRIES} files and directories below {directory}; name the "
                "directory of the data, the files, or a pattern without **"
            )
        found += [Path(place, name) for name in files]
    return found


def directory_files(directory: Path) -> list[Path]:
    """Raises DatasetError for one that cannot be listed, or, of save_to_disk, does not say what lies in it."""
    if directory == Path(directory.anchor):
        raise DatasetError(f"{directory} is the whole file system; name the directory of the data")
    try:
        return _listed(directory)
    except OSError as error:
        raise DatasetError(f"{directory} cannot be listed: {error}; name the files, or mend the directory") from error


def _listed(directory: Path) -> list[Path]:
    if not (directory / _SAVED).is_file():
        inner = (
            file for file in _walked(directory, str(directory))
            if file.suffix in SUFFIXES and file.name != "dataset_dict.json"
        )  # fmt: skip
        return sorted(file for file in inner if file.is_file() and not _hidden(file.relative_to(directory)))
    try:
        shards = json.loads((directory / _SAVED).read_text())["_data_files"]
        return [directory / shard["filename"] for shard in shards]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{directory / _SAVED} does not list the shards of a saved dataset: {error!r}") from error


def problems(key: str, entry: str) -> Iterator[str]:
    """Why an entry cannot be read, as far as that shows without reading it."""
    try:
        yield from (f"{key}: {problem}" for problem in _problems(entry))
    except DatasetError as error:
        yield f"{key}: {error}"
    except OSError as error:  # a name that is too long, a directory that cannot be entered
        yield f"{key}: {shortened(entry)}: {error.strerror}"


def _problems(entry: str) -> Iterator[str]:
    if entry.startswith(HF):
        dataset = HFDataset.parse(entry)
        if dataset.saved() is None and find_spec("datasets") is None:
            yield (
                f"{entry} needs the datasets library; pip install 'streamrl[datasets]', or name files (a directory "
                "written by save_to_disk is read without it)"
            )
        return
    files = files_of(entry)
    if not files:
        what = "in the directory" if Path(entry).is_dir() else "like"
        yield f"there is no file {what} {entry} that ends in {', '.join(SUFFIXES)}{looked_in(entry)}"
    for file in files:
        if not file.is_file() or not file.is_absolute():
            yield f"there is no file {file}{looked_in(str(file))}"
        elif file.suffix not in SUFFIXES:
            yield f"{file} ends in {file.suffix or 'nothing'}; readable are {', '.join(SUFFIXES)}"
        elif file.suffix in PYARROW and find_spec("pyarrow") is None:
            yield f"reading {file} {NEEDS_PYARROW}"


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
