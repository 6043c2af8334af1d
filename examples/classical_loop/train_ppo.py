"""PPO as one program over worker groups, by the names of verl's tutorials: generate, score, compare, update, in turn.

    python examples/classical_loop/train_ppo.py --steps 20            # one process
    python examples/classical_loop/train_ppo.py --steps 20 --ray      # two ranks, each a process

What it simplifies: generation waits for training and training for the slowest answer, all rows pass through this
process, and a death ends it. `streamrl train` (streamrl/trainer/loop.py) calls the same methods with references to rows
in the queue, and has none of that. The model, the tool, the questions and the reward are those of examples/calculator.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import ray
import torch

from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.rewards import REWARDS
from streamrl.algorithms.kl_control import kl_controller
from streamrl.config import StreamRLConfig, load_config
from streamrl.data import PromptDataset, train_dataset
from streamrl.protocol import DataProto
from streamrl.rollout.replica import RolloutServerConfig
from streamrl.runtime.settings import agent_worker
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, RayWorkerGroup, ResourcePool, WorkerGroup
from streamrl.workers.actor import ActorWorker
from streamrl.workers.critic import CriticWorker
from streamrl.workers.rollout import RolloutWorker
from streamrl.workers.row_store import NoRows
from streamrl.workers.settings import ActorSettings, CriticSettings
from transfer_queue.keys import prompt_uid

SETTINGS = [
    "experiment=calculator", "trainer.v1.trainer_mode=sync", "data.train_batch_size=16", "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.001", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.optim.staleness_aware=false",
    "actor_rollout_ref.rollout.tools.calculator.latency_mean=0", "critic.optim.lr=1e-3",
    "critic.model.enable_gradient_checkpointing=false", "trainer.critic_warmup=0",
]  # fmt: skip


@dataclass
class PPOTrainer:
    config: StreamRLConfig
    actor: WorkerGroup  # with the reference policy
    critic: WorkerGroup
    rollout: WorkerGroup
    prompts: PromptDataset
    directory: Path

    def fit(self, steps: int) -> Iterator[DataProto]:
        """The rows of each step with all their columns, and its metrics in `meta_info`."""
        for group in (self.actor, self.critic, self.rollout):
            group.init_model()
        control = self.config.algorithm.kl_ctrl
        kl = kl_controller(control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon)
        for step in range(1, steps + 1):
            batch = self.next_prompts(step)
            batch.union(self.rollout.generate_sequences(batch))
            batch.union(self.compute_scores(batch))
            batch.union(self.actor.compute_log_prob(batch))
            batch.union(self.actor.compute_ref_log_prob(batch))
            batch.union(self.critic.compute_values(batch))
            batch.meta_info["kl_coef"] = kl.coef
            batch.union(self.actor.compute_rewards(batch))  # the scores, less the KL to the reference
            kl.update(batch.meta_info["metrics"]["actor/reward_kl_penalty"], len(batch))
            batch.union(self.actor.compute_advantage(batch))
            batch.union(self.critic.update_critic(batch))
            batch.union(self.actor.update_actor(batch))
            self.rollout.update_weights(self.actor.publish_weights(step))
            yield batch
        self.actor.save_checkpoint(str(self.directory / "actor"))
        self.critic.save_checkpoint(str(self.directory / "critic"))

    def next_prompts(self, step: int) -> DataProto:
        """n rows for each prompt of the step."""
        config, n = self.config, self.config.actor_rollout_ref.rollout.n
        first = (step - 1) * config.data.train_batch_size
        places = [divmod(first + i, len(self.prompts)) for i in range(config.data.train_batch_size)]
        rows = [self.prompts.at(epoch, position) for epoch, position in places]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        batch = DataProto.from_dict(None, {**columns, "uid": [prompt_uid(*place) for place in places]}).repeat(n)
        batch.non_tensor_batch["session"] = np.tile(np.arange(n), len(rows))
        batch.meta_info = {
            "version": step - 1, "temperature": config.actor_rollout_ref.rollout.temperature,
            "mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        }  # fmt: skip
        return batch

    def compute_scores(self, batch: DataProto) -> DataProto:
        """`token_level_scores` f32[B, R]: what the reward function says, at the last token that was sampled."""
        function, tensors = self.config.reward.custom_reward_function, batch.batch
        assert tensors is not None
        compute_score = REWARDS.resolve(f"{function.path}:{function.name}")
        scores = torch.zeros(tensors["responses"].shape)
        lengths = tensors["attention_mask"][:, -scores.shape[1] :].sum(1)
        for i in range(len(batch)):
            text = self.chat.decode(tensors["responses"][i, : lengths[i]].tolist(), skip_special_tokens=True)
            prompt = batch[i].non_tensor_batch
            score = compute_score(prompt["data_source"], text, prompt["reward_model"]["ground_truth"], None)
            scores[i, tensors["response_mask"][i].nonzero()[-1]] = float(score)
        metrics = {"critic/score/mean": float(scores.sum(1).mean())}
        return DataProto.from_dict({"token_level_scores": scores}, meta_info={"metrics": metrics})

    @cached_property
    def chat(self) -> ChatTokenizer:
        return ChatTokenizer.from_pretrained(self.config.actor_rollout_ref.model.path)


def workers(config: StreamRLConfig, directory: Path) -> dict[str, ClassWithInitArgs]:
    """What each rank holds, by role."""
    parts, data = config.actor_rollout_ref, config.data
    server = RolloutServerConfig(
        model_path=parts.model.path, max_num_seqs=parts.rollout.max_num_seqs, seed=config.trainer.seed,
        max_model_len=data.max_prompt_length + data.max_response_length,
    )  # fmt: skip
    return {
        "actor": ClassWithInitArgs(ActorWorker, ActorSettings.of(config), NoRows(), str(directory / "weights")),
        "critic": ClassWithInitArgs(CriticWorker, CriticSettings.of(config), NoRows()),
        "rollout": ClassWithInitArgs(RolloutWorker, server, agent_worker(config), data.max_prompt_length),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="PPO on the calculator task, as one loop over worker groups")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ray", action="store_true", help="two ranks in processes of their own")
    parser.add_argument("--out", type=Path, default=None, help="keep the checkpoint here")
    parser.add_argument("overrides", nargs="*", help="key=value, as for `streamrl train`")
    args = parser.parse_args(arguments)
    config = load_config([*SETTINGS, f"trainer.total_training_steps={args.steps}", *args.overrides]).config
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.out or Path(temporary)
        made = workers(config, directory)
        if args.ray:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            group: WorkerGroup = RayWorkerGroup(ResourcePool([2]), made, name="ppo")
        else:
            group = LocalWorkerGroup(made)
        try:
            trainer = PPOTrainer(config, **group.spawn(), prompts=train_dataset(config), directory=directory)
            for step, batch in enumerate(trainer.fit(args.steps), 1):
                metrics = batch.meta_info["metrics"]
                shown = ("critic/score/mean", "actor/reward_kl_penalty", "critic/vf_loss", "actor/grad_norm")
                print(f"step {step}:", ", ".join(f"{name} {metrics[name]:.4f}" for name in shown), flush=True)
        finally:
            group.shutdown()
            if args.ray:
                ray.shutdown()


if __name__ == "__main__":
    main()
