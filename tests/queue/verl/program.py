"""A program of verl 0.9.1's own classes around `transfer_queue`, for tests/queue/test_verl.py.

It runs in an environment that has verl, and says one JSON line per scene. Nothing of verl is replaced, but the LLM
server, which a fake answers for.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")

import ray
import tensordict
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils import transferqueue_utils as bridge
from verl.workers.rollout.replica import TokenOutput

import transfer_queue as tq

calls: collections.Counter[str] = collections.Counter()


def counted_in_workers() -> None:
    """In a worker: note each call of a verb in a file of the run."""
    path = os.environ["TQ_CALLS"]
    for name in ("async_kv_put", "async_kv_batch_put", "init"):
        function = getattr(tq, name)

        def call(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            with open(path, "a") as file:
                file.write(f"{_name}\n")
            return _function(*args, **kwargs)

        setattr(tq, name, call)


def counted() -> None:
    """Count what verl calls of `tq`, in this process."""
    for name in ("kv_list", "kv_clear", "kv_batch_get", "kv_batch_put", "init"):
        function = getattr(tq, name)

        def call(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _function(*args, **kwargs)

        setattr(tq, name, call)
    for name in ("async_get_data", "async_put", "async_kv_retrieve_meta", "async_kv_retrieve_keys"):
        method = getattr(tq.TransferQueueClient, name)

        async def acall(self: Any, *args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            calls[_name] += 1
            return await _method(self, *args, **kwargs)

        setattr(tq.TransferQueueClient, name, acall)


def say(scene: str, **what: Any) -> None:
    sys.stdout.write(json.dumps({"scene": scene, **what, "calls": dict(calls)}) + "\n")
    sys.stdout.flush()
    calls.clear()


# --- the worker that generates ---------------------------------------------------------------------------------------


class FakeServer:
    """Stands where verl has its LLM server client."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        await asyncio.sleep(0)
        if len(prompt_ids) > 60:
            raise RuntimeError("the server refuses long prompts")
        return TokenOutput(token_ids=[5, 6, 7, 2], log_probs=[-0.5] * 4, extra_fields={"min_global_steps": 3})


def tiny_model(directory: Path) -> str:
    """A model that only consists of a tokenizer and a config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], additional_special_tokens=special,
        chat_template="{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )  # fmt: skip
    fast.save_pretrained(directory)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen2Config(vocab_size=300, num_key_value_heads=1, **sizes, architectures=["Qwen2ForCausalLM"]).save_pretrained(
        directory
    )
    return str(directory)


def configuration(model: str) -> Any:
    """verl's own defaults for a trainer."""
    import verl.trainer.config as package
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(package.__file__).parent), version_base=None):
        config = compose("ppo_trainer", [
            f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.prompt_length=64",
            "actor_rollout_ref.rollout.response_length=16",
        ])  # fmt: skip
    OmegaConf.resolve(config)
    return config


def agent_loop_worker(model: str) -> None:
    config = configuration(model)
    tq.kv_batch_put(
        keys=["u0", "u1"], partition_id="train",
        tags=[{"is_prompt": True, "status": "pending", "global_steps": 3}] * 2,
        fields=TensorDict({"data_source": NonTensorStack("a", "b")}, batch_size=[2]),
    )  # fmt: skip
    worker = AgentLoopWorkerTQ.remote(config, FakeServer())
    messages = [[{"role": "user", "content": "short"}], [{"role": "user", "content": "long " * 9}]]
    batch = TensorDict(
        {
            "uid": NonTensorStack("u0", "u1"),
            "raw_prompt": NonTensorStack(*messages),
            "index": torch.arange(2),
            "data_source": NonTensorStack("a", "b"),
        },
        batch_size=[2],
    )
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor_data(batch, "global_steps", 3)
    ray.get(worker.generate_sequences.remote(batch))
    deadline = time.monotonic() + 60
    states = tq.kv_list("train")["train"]
    while {states[uid]["status"] for uid in ("u0", "u1")} & {"pending", "running"} and time.monotonic() < deadline:
        time.sleep(0.05)  # as verl's own trainer waits
        states = tq.kv_list("train")["train"]
    calls.update(Path(os.environ["TQ_CALLS"]).read_text().split())
    del calls["kv_list"]  # ours
    rows = sorted(key for key in states if key.startswith("u0_"))
    got = tq.kv_batch_get(rows, "train", select_fields=["input_ids", "responses", "raw_prompt", "nothing", "num_turns"])
    say(
        "agent loop worker",
        tags=states,
        rows=rows,
        fields=sorted(got.keys()),
        responses=[row.tolist() for row in got["responses"].unbind()],
        lengths=got["input_ids"].offsets().diff().tolist(),
        prompts=[str(prompt) for prompt in got["raw_prompt"]],
    )
    ray.kill(worker)


# --- the buffer that the trainer samples from ------------------------------------------------------------------------


def replay_buffer(cls: type[ReplayBuffer]) -> None:
    tq.get_client().clear_partition("train")
    refilled: list[int] = []
    buffer = cls(
        "async" if cls is ReplayBufferAsync else "sync", OmegaConf.create({}), 2, "drop", OmegaConf.create({}),
        poll_interval=0.01, refill_fn=refilled.append, filter_groups_metric=None,
    )  # fmt: skip
    uids = [f"p{i}" for i in range(4)]
    steps = [4, 5, 1, 5]
    for uid, step in zip(uids, steps, strict=True):
        tq.kv_put(uid, "train", tag={"is_prompt": True, "status": "pending", "global_steps": step})
        keys = [f"{uid}_{session}_0" for session in range(2)]
        scores = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
        fields = TensorDict({"rm_scores": scores}, batch_size=[2])
        tq.kv_batch_put(keys, "train", fields=fields, tags=[{"status": "success", "seq_len": i + 2} for i in range(2)])
        tq.kv_put(uid, "train", tag={"status": "running" if uid == uids[3] else "finished"})
    calls.clear()
    meta, metrics = buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    counts = dict(calls)
    left = tq.kv_list("train")["train"]
    calls.clear()
    calls.update(counts)
    say(
        cls.__name__, keys=meta.keys, tags=meta.tags, partition=meta.partition_id, metrics=metrics, refilled=refilled,
        left=sorted(left), statuses=[left[uid]["status"] for uid in sorted(left) if "_" not in uid],
    )  # fmt: skip


# --- the bridge of a training worker ---------------------------------------------------------------------------------


@bridge.tqbridge()
def compute(data: TensorDict) -> TensorDict:
    """What a worker of verl does: rows in, a column out."""
    lengths = data["responses"].offsets().diff()
    doubled = torch.nested.nested_tensor_from_jagged(data["responses"].values() * 2, data["responses"].offsets())
    out = TensorDict({"doubled": doubled, "length": lengths}, batch_size=[len(data)])
    assert data["temperature"] == 0.5
    return out


@bridge.tqbridge()
async def compute_async(data: TensorDict) -> TensorDict:
    return TensorDict({"later": torch.ones(len(data), 2)}, batch_size=[len(data)])


def worker_bridge() -> None:
    responses = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 1, 2)], layout=torch.jagged)
    meta = tq.kv_batch_put(
        ["a", "b", "c"],
        "bridge",
        fields=TensorDict({"responses": responses}, batch_size=[3]),
        tags=[{"i": i} for i in range(3)],
    )
    meta.extra_info["temperature"] = 0.5
    meta.reorder([2, 0, 1])
    calls.clear()
    first = compute(meta)
    batch = bridge.kv_batch_meta2batch_meta(first)
    pieces = batch.chunk(chunks=2)
    joined = tq.BatchMeta.concat(pieces)
    second = asyncio.run(compute_async(first))
    got = tq.kv_batch_get(second.keys, "bridge")
    say(
        "worker bridge",
        keys=first.keys,
        tags=first.tags,
        fields=[sorted(first.fields), sorted(second.fields)],
        doubled=[row.tolist() for row in got["doubled"].unbind()],
        length=got["length"].tolist(),
        later=[row.tolist() for row in got["later"].unbind()],
        pieces=[piece.size for piece in pieces],
        same=joined.global_indexes == batch.global_indexes,
        empty=tq.BatchMeta().size,
    )


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="tq-verl-"))
    os.environ["TQ_CALLS"] = str(directory / "calls")
    hook = {"worker_process_setup_hook": counted_in_workers, "env_vars": {"TQ_CALLS": os.environ["TQ_CALLS"]}}
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, runtime_env=hook
    )
    conf = OmegaConf.create({"enable": True, "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {
        "total_storage_size": 100000, "num_data_storage_units": 8}}})  # fmt: skip
    tq.init(conf)
    os.environ.pop("TQ_ADDRESS")  # workers find the queue through Ray
    counted()
    try:
        say("versions", tensordict=tensordict.__version__, manager=AgentLoopManagerTQ.__name__)
        agent_loop_worker(tiny_model(directory))
        replay_buffer(ReplayBuffer)
        replay_buffer(ReplayBufferAsync)
        worker_bridge()
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
