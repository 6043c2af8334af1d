"""`data.*`: which prompts, in which order, how many per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.types import PositiveInt, SampleLimit, Scalar, Seed


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomDatasetConfig:
    """Rows that a Python file of yours gives instead of data files (docs/extending.md)."""

    path: str | None = None
    name: str | None = None
    """What to call in it: name(data_files, config, split) gives rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train_files: tuple[str, ...] = ()
    """Files (jsonl, json, parquet, arrow), directories (of up to 50000 entries), patterns with * or **, and
    hf:NAME[:CONFIG]:SPLIT; one or a list. Columns: streamrl/data/columns.py. Read once at the start; rows of more than
    64 MiB are kept in a file under $XDG_CACHE_HOME/streamrl, not in memory (a .json file is parsed whole: for large
    data take .jsonl)."""
    val_files: tuple[str, ...] = ()
    train_batch_size: PositiveInt = 1024
    """Prompts per step."""
    max_prompt_length: PositiveInt = 512
    """Tokens, rendered by the chat template."""
    max_response_length: PositiveInt = 512
    """Tokens over the whole trajectory, tool text included."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length; the start says how many."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Of longer prompts, when they are not left out: refuse to start, or cut the longest message of the prompt at its
    left, right or middle (the template around it stays whole)."""
    apply_chat_template_kwargs: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
    """What the chat template gets besides messages and tools, for training and validation, as {enable_thinking: false}.
    One that the template does not ask for is an error."""
    prompt_key: str = "prompt"
    """The prompt's column. The default also finds those of other frameworks."""
    label_key: str | None = None
    """The column of the expected answer; None: the first found of ground_truth, answer, solution, label."""
    metadata_key: str | None = None
    """The column that becomes extra_info; None: the first found of extra_info, extras, metadata."""
    reward_fn_key: str = "data_source"
    image_key: str = "images"
    video_key: str = "videos"
    audio_key: str = "audios"
    custom_cls: CustomDatasetConfig = field(default_factory=CustomDatasetConfig)
    shuffle: bool = True
    seed: Seed | None = None
    """Of the permutation; None: trainer.seed."""
    train_max_samples: SampleLimit = -1
    """Rows; drawn by the seed if shuffle, else the first. The others are not parsed."""
    val_max_samples: SampleLimit = -1
