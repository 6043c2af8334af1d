"""What a teacher server says of given tokens is what the training ranks' stage says of them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_loop.llm.protocol import ServerDied
from streamrl.config.sections.algorithm import DistillationConfig, TeacherConfig
from streamrl.rollout.torch import scoring
from streamrl.rollout.torch.loading import load_model
from streamrl.rollout.torch.scoring import ScoreQueue, ScoreRequest, score_rows
from streamrl.rollout.torch.server import TorchServer
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import make_rows, settings

VOCAB = 64


def load(path: str):
    return load_model(path, device="cpu", dtype="float32", max_model_len=128)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_servers_log_probs_are_those_of_the_ranks_packed_or_padded(
    model_dirs: dict[str, str], kind: str, temperature: float
) -> None:
    teacher, policy = model_dirs[kind], model_dirs["qwen2"]
    batch, store = make_rows(4, 4, longest=60)
    batch.extra_info = {**(batch.extra_info or {}), "temperature": temperature}

    async def served() -> list[list[float]]:
        server = TorchServer(teacher, max_num_seqs=1, max_model_len=128, max_score_tokens=200)
        rows = [(store.columns["input_ids"][key].tolist(), tag["prompt_len"])
                for key, tag in zip(batch.keys, batch.tags, strict=True)]  # fmt: skip
        asked = [server.score(ids[:prompt], ids[prompt:], temperature) for ids, prompt in rows]
        found = await asyncio.wait_for(asyncio.gather(*asked), 60)
        await server.close()
        return [scores.log_probs for scores in found]

    servers = asyncio.run(served())
    for packed in (True, False):
        options = settings(policy)
        options = replace(
            options, model=replace(options.model, use_remove_padding=packed),
            distillation=DistillationConfig(enabled=True, teacher_model=TeacherConfig(path=teacher)),
        )  # fmt: skip
        group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, options, store))
        group.init_model()
        group.compute_teacher_log_prob(batch)
        group.shutdown()
        for key, found in zip(batch.keys, servers, strict=True):
            np.testing.assert_allclose(found, store.columns["teacher_log_prob"][key], atol=1e-4)


def test_logits_are_made_a_few_tokens_at_a_time(model_dirs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = load(model_dirs["qwen2"]), random.Random(2)
    rows = [([1, 2], [rng.randrange(VOCAB) for _ in range(n)], 1.0) for n in (30, 1, 17)]
    whole = score_rows(model, rows)
    most = 0
    linear = torch.nn.functional.linear

    def measured(hidden: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        nonlocal most
        if len(weight) == VOCAB:
            most = max(most, len(hidden))
        return linear(hidden, weight, *more)

    monkeypatch.setattr(scoring, "LOGITS_BYTES", 5 * 4 * VOCAB)
    monkeypatch.setattr(torch.nn.functional, "linear", measured)
    parts = score_rows(model, rows)
    assert most == 5
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


async def test_a_pass_keeps_to_its_tokens_and_every_row_is_answered_once(model_dirs: dict[str, str]) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    queue = ScoreQueue(load(model_dirs["qwen2"]), max_tokens=64)
    loop = asyncio.get_running_loop()
    asked = [
        ScoreRequest([1] * rng.randint(1, 20), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 80))], 1.0,
                     loop.create_future())
        for _ in range(40)
    ]  # fmt: skip
    gone = rng.sample(asked, 5)
    for request in asked:
        queue.submit(request)
    for request in gone:
        request.owner.cancel()
    answered: list[ScoreRequest] = []
    while queue.waiting:
        scored = queue.step(0)
        assert len(scored) == 1 or max(r.length for r in scored) * len(scored) <= 64
        answered += scored
    assert len(answered) == len(set(map(id, answered))) == 35
    assert not set(map(id, gone)) & set(map(id, answered))
    assert queue.tokens_scored == sum(len(r.response) for r in answered)


async def test_numbers_that_are_not_finite_are_an_error_of_their_row(
    model_dirs: dict[str, str], tmp_path: Path
) -> None:
    model = load(model_dirs["llama"])
    with torch.inference_mode():
        model.lm_head.weight[3] = torch.nan
    model.save_pretrained(tmp_path)
    server = TorchServer(str(tmp_path), max_num_seqs=1, max_model_len=64)
    with pytest.raises(FloatingPointError, match="weights are broken"):
        await server.score([1, 2], [3, 4])
    assert (await server.load()).rows_scored == 0, "and the server is there for others"
    await server.close()


async def test_an_engine_that_breaks_while_it_scores_fails_all_that_wait(
    model_dirs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(scoring, "score_rows", broken)
    server = TorchServer(model_dirs["qwen2"], max_num_seqs=1, max_model_len=64)
    found = await asyncio.gather(*(server.score([1, 2], [3, 4]) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [ServerDied] * 3
    with pytest.raises(ServerDied, match="out of memory"):
        await server.load()
    await server.close()
