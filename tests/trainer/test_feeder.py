"""What is issued for a place in the dataset."""

from __future__ import annotations

import numpy as np

from streamrl.algorithms.advantages import estimator
from streamrl.data import PromptDataset
from streamrl.trainer.feeder import prompts_at

ROWS = [{"raw_prompt": [], "n": None}, {"raw_prompt": [], "n": 3}, {"raw_prompt": [], "images": ["a.png"]}]


def test_a_row_with_its_own_n_gets_that_many_sessions():
    prompts = prompts_at(PromptDataset(ROWS, shuffle=False), [0, 1, 2, 4], 8)
    assert [spec.n for spec in prompts.specs] == [8, 3, 8, 3]
    assert [spec.tag["index"] for spec in prompts.specs] == [0, 1, 2, 1]


def test_multimodal_columns_reach_the_prompt_row_untouched():
    prompts = prompts_at(PromptDataset(ROWS, shuffle=False), [1, 2], 8)
    assert prompts.columns["images"] == [None, ["a.png"]]


def test_grpo_compares_within_groups_of_different_size():
    scores, groups = np.array([0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 5.0]), np.array([0, 0, 1, 1, 1, 1, 2])
    values = estimator("grpo").sessions(scores, groups, norm_by_std=False)
    np.testing.assert_allclose(values, [-0.5, 0.5, 0.25, -0.75, -0.75, 1.25, 0.0])
