"""A checkpoint becomes a model directory that `transformers` opens and that computes what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config.sections.actor import CheckpointConfig
from streamrl.errors import UserError
from streamrl.runtime.export import export, main
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.trainer.checkpoint import CheckpointStore, TrainerState
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import make_model, make_rows, settings

IDS = torch.arange(1, 13)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_model(tmp_path_factory.mktemp("model"))
    (Path(path) / "tokenizer.json").write_text("{}")
    return path


async def trained_run(model: str, run: Path, *, lora_rank: int = 0, hf: bool = False) -> torch.Tensor:
    """A run directory with the checkpoint of a model after an update; the logits of that model."""
    batch, store = make_rows(4, 2)
    saved = CheckpointConfig(save_contents=("model", "hf_model") if hf else ("model",))
    chosen = settings(model, lr=1e-2, checkpoint=saved, strategy="ddp")  # its parameters are plain tensors
    chosen = replace(chosen, model=replace(chosen.model, lora_rank=lora_rank, lora_alpha=8))
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, chosen, store))
    await group.init_model()
    await group.update_actor(batch)

    async def save(directory: Path) -> None:
        await group.save_checkpoint(str(directory / "actor"))

    await CheckpointStore(run / "checkpoints").save(TrainerState(3, 8), save)
    named = {"path": model, "tokenizer_path": None, "lora_rank": lora_rank, "lora_alpha": 8}
    (run / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": named}}))
    [worker] = group._ranks._workers.values()  # type: ignore[attr-defined]
    lm: Any = worker.engine.module.lm.eval()
    lm.set_attn_implementation("sdpa")  # the engine's own wants packed rows
    with torch.no_grad():
        logits = lm(input_ids=IDS).logits.float()
    await group.close()
    return logits


def logits_of(directory: Path | str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(input_ids=IDS).logits


async def test_an_export_opens_in_transformers_and_computes_what_was_trained(model: str, tmp_path: Path) -> None:
    trained = await trained_run(model, tmp_path / "run")
    assert "step 3 of" in export(tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(logits_of(tmp_path / "out"), trained, atol=1e-4, rtol=1e-4)
    assert (trained - logits_of(model)).abs().max() > 1e-2
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors"}


async def test_an_export_keeps_the_names_and_the_dtype_of_the_model(model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    await trained_run(str(half), tmp_path / "run")
    export(tmp_path / "run" / "checkpoints" / "global_step_3", tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (half, tmp_path / "out"))
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}


async def test_with_hf_model_each_checkpoint_holds_the_model(model: str, tmp_path: Path) -> None:
    trained = await trained_run(model, tmp_path / "run", hf=True)
    saved = CheckpointStore(tmp_path / "run/checkpoints").path(3) / "actor/huggingface"
    torch.testing.assert_close(logits_of(saved), trained, atol=1e-4, rtol=1e-4)


async def test_adapters_are_merged_or_written_alone(model: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    trained = await trained_run(model, tmp_path / "run", lora_rank=4)
    export(tmp_path / "run", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), trained, atol=1e-4, rtol=1e-4)
    export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits, trained, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "adapter/model.safetensors").exists()


async def test_what_cannot_be_exported_is_told_before_anything_is_written(model: str, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    await trained_run(model, run)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    for source, out, adapter, says in (
        (tmp_path / "none", "out", False, "there is no directory"),
        (tmp_path / "empty", "out", False, "neither a run directory"),
        (run, "full", False, "exists and is not an empty directory"),
        (run, "out", True, "has no adapters"),
    ):
        with pytest.raises(UserError, match=says):
            export(source, tmp_path / out, adapter=adapter)
    next((run / "checkpoints/global_step_3/actor/shards").iterdir()).write_bytes(b"")
    assert main([str(run), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
