"""`data.*`: which prompts, in which order, how many per step."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config.sections.types import NonNegativeInt, PositiveInt, SampleLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train_files: tuple[str, ...] = ()
    """jsonl, json or parquet files (or one). Columns: streamrl/data/rows.py."""
    val_files: tuple[str, ...] = ()
    train_batch_size: PositiveInt = 1024
    """Prompts per step."""
    max_prompt_length: PositiveInt = 512
    """Tokens."""
    max_response_length: PositiveInt = 512
    """Tokens over the whole trajectory, tool text included."""
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    shuffle: bool = True
    seed: NonNegativeInt | None = None
    """Of the permutation; None: trainer.seed."""
    train_max_samples: SampleLimit = -1
    val_max_samples: SampleLimit = -1
