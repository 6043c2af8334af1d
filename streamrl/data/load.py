"""The datasets of a configuration."""

from __future__ import annotations

from streamrl.config import StreamRLConfig
from streamrl.data.dataset import PromptDataset
from streamrl.errors import DatasetError


def train_dataset(config: StreamRLConfig) -> PromptDataset:
    """Raises DatasetError, also when there are fewer prompts than one batch takes."""
    data = config.data
    dataset = PromptDataset.from_files(
        data.train_files,
        seed=data.seed or 0,
        shuffle=data.shuffle,
        max_samples=data.train_max_samples,
        prompt_key=data.prompt_key,
        source_key=data.reward_fn_key,
    )
    if len(dataset) < data.train_batch_size:
        raise DatasetError(
            f"{', '.join(data.train_files)}: {len(dataset)} prompts are fewer than data.train_batch_size="
            f"{data.train_batch_size}; lower it or add prompts"
        )
    return dataset


def val_dataset(config: StreamRLConfig) -> PromptDataset | None:
    """In the order of the files; None when no validation file is named. Raises DatasetError."""
    data = config.data
    if not data.val_files:
        return None
    return PromptDataset.from_files(
        data.val_files,
        shuffle=False,
        max_samples=data.val_max_samples,
        prompt_key=data.prompt_key,
        source_key=data.reward_fn_key,
    )


def training_steps(config: StreamRLConfig, rows: int) -> int:
    """`trainer.total_training_steps`, or what `trainer.total_epochs` over `rows` prompts makes."""
    trainer = config.trainer
    return trainer.total_training_steps or trainer.total_epochs * (rows // config.data.train_batch_size)
