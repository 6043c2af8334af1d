"""Datasets: files of prompts, and the order in which they are asked.

    files --sources, formats--> rows --rows--> prompt rows --lengths--> packed --dataset--> (epoch, position) -> row

One pass at the start checks every row that a run may ask for and packs it, so that a shuffled order finds it again in
one read. No torch here, no worker processes: a prompt is a small row, and the trainer asks for few of them at a time.
"""

from __future__ import annotations

from streamrl.data.dataset import PromptDataset
from streamrl.data.load import train_dataset, training_steps, val_dataset
from streamrl.errors import DatasetError

__all__ = ["DatasetError", "PromptDataset", "train_dataset", "training_steps", "val_dataset"]
