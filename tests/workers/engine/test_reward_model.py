"""A reward model's scores: those of `transformers`, on any layout and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.actor import FSDPConfig
from streamrl.single_controller.worker import RankInfo
from streamrl.workers.batch import MicroBatching, Rows
from tests.workers.engine.cases import VOCAB, Case, make_rows, mine
from tests.workers.engine.world import World

pytestmark = pytest.mark.timeout(240)  # the first test waits for the ranks' imports

ONE = RankInfo(0, 1, 0, "cpu", "", 60.0)
PADDING = 5
FLOAT32 = FSDPConfig(model_dtype="fp32")
REWARD = Case(kind="reward_model", fsdp=FLOAT32)
LAYOUTS = {
    "one rank": REWARD,
    "one rank, padded, by rows": REWARD.with_(packed=False, micro=MicroBatching(max_rows=2)),
    "two ranks": REWARD.with_(ranks=2, model="llama"),
    "two ranks, padded": REWARD.with_(ranks=2, packed=False),
    "two ranks, offload, ddp": REWARD.with_(
        ranks=2, backend="ddp", fsdp=FSDPConfig(model_dtype="fp32", param_offload=True)
    ),
    "two ranks share rows, offload": REWARD.with_(
        ranks=2, sequence_parallel=2, fsdp=FSDPConfig(model_dtype="fp32", param_offload=True)
    ),
    "four ranks, three rows": REWARD.with_(ranks=4, rows=3),
}


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_scorers(tmp_path_factory.mktemp("scorers"))


def make_scorers(directory: Path, *, labels: int = 1) -> dict[str, Path]:
    """Random reward models of two families; to one of them a token is padding."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForSequenceClassification,
        Qwen2Config,
        Qwen2ForSequenceClassification,
    )

    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_labels": labels,
    }  # fmt: skip
    torch.manual_seed(2)
    made: dict[str, Any] = {
        "qwen2": Qwen2ForSequenceClassification(Qwen2Config(**common, pad_token_id=PADDING)),
        "llama": LlamaForSequenceClassification(LlamaConfig(**common)),
    }
    for name, model in made.items():
        torch.nn.init.normal_(model.score.weight)  # far from 0, so that scores differ
        model.save_pretrained(directory / name)
    return {name: directory / name for name in made}


def ended_by_padding(rows: Rows) -> Rows:
    """Of some, the last tokens are what is padding to the model, as where it is the token that ends an answer."""
    for i, ids in enumerate(rows.input_ids):
        ids[len(ids) - i % 3 :] = PADDING
    return rows


def infer(rank: RankInfo, argument: tuple[Case, dict[str, Path]]) -> dict[int, np.ndarray]:
    case, models = argument
    engine = case.start(rank, models, optim=None)
    rows = ended_by_padding(make_rows(case.rows))
    chosen = mine(rows, engine)
    found = engine.infer(rows.take(chosen), temperature=1.0, micro=case.micro)
    engine.close()
    assert list(found) == ["scores"]
    return dict(zip(chosen, found["scores"], strict=True))


def expected(model: Path, rows: Rows) -> list[float]:
    """One row at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification

    scorer = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [scorer(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in rows.input_ids]


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_are_those_of_transformers_on_any_layout(world: World, scorers: dict[str, Path], name: str) -> None:
    case = LAYOUTS[name]
    scores = expected(scorers[case.model], ended_by_padding(make_rows(case.rows)))
    assert np.ptp(scores) > 0.1, "one that gives all rows the same would not be noticed"
    seen = set()
    for found in world.run(case.ranks, infer, (case, scorers)):
        for index, score in found.items():
            np.testing.assert_allclose(score, [scores[index]], rtol=0, atol=1e-5)
            seen.add(index)
    assert seen == set(range(case.rows))


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    models = make_scorers(tmp_path, labels=3)
    with pytest.raises(ValueError, match="it has 3 labels; a reward model has one"):
        REWARD.start(ONE, models, optim=None)


def test_a_language_model_has_no_score_to_give(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoConfig

    for file in models["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_labels = 1
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lack 1 tensors, the first score.weight"):
        REWARD.start(ONE, {"qwen2": tmp_path}, optim=None)


def test_a_token_beyond_the_vocabulary_is_named(scorers: dict[str, Path]) -> None:
    engine = REWARD.start(ONE, scorers, optim=None)
    rows = Rows([np.array([1, 2, VOCAB])], [1])
    with pytest.raises(ValueError, match=f"token {VOCAB}; the reward model knows {VOCAB}"):
        engine.infer(rows, temperature=1.0, micro=REWARD.micro)
    engine.close()
