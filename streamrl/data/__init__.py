"""Datasets: files of prompts, and the order in which they are asked.

    files --reading--> rows --rows--> checked prompt rows --dataset--> PromptDataset: (epoch, position) -> row

No torch here, no worker processes: a prompt is a small row, and the trainer asks for few of them at a time.
"""

from __future__ import annotations

from streamrl.data.dataset import PromptDataset
from streamrl.data.load import train_dataset, training_steps, val_dataset
from streamrl.errors import DatasetError

__all__ = ["DatasetError", "PromptDataset", "train_dataset", "training_steps", "val_dataset"]
