"""PPO as one program over worker groups, by the names of verl's tutorials: generate, score, compare, update, in turn.

    python examples/classical_loop/train_ppo.py --steps 20            # one process
    python examples/classical_loop/train_ppo.py --steps 20 --ray      # two ranks, each a process
    python examples/classical_loop/train_ppo.py algorithm.adv_estimator=grpo reward.custom_reward_function.path=my.py

What it simplifies: generation waits for training and training for the slowest answer, all rows pass through this
process, and a death ends it. `streamrl train` (streamrl/trainer/loop.py) calls the same methods with references to rows
in the queue, and has none of that. The model, the tool, the questions and the reward are those of examples/calculator.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import ray
import torch

from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.rewards import RewardError, RewardFunction
from agent_loop.trajectory import Trajectory
from streamrl.algorithms.advantages import Estimator, estimator
from streamrl.algorithms.kl_control import kl_controller
from streamrl.config import StreamRLConfig, load_config
from streamrl.data import PromptDataset, train_dataset
from streamrl.errors import ConfigError, UserError, one_line
from streamrl.protocol import DataProto
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.runtime.settings import agent_worker
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, RayWorkerGroup, ResourcePool, WorkerGroup
from streamrl.workers.actor import ActorWorker
from streamrl.workers.critic import CriticWorker
from streamrl.workers.rollout import RolloutWorker
from streamrl.workers.row_store import NoRows
from streamrl.workers.settings import ActorSettings, CriticSettings
from transfer_queue.keys import prompt_uid, row_key

SETTINGS = [
    "experiment=calculator", "trainer.v1.trainer_mode=sync", "data.train_batch_size=16", "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.001", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.optim.staleness_aware=false",
    "actor_rollout_ref.rollout.tools.calculator.latency_mean=0", "critic.optim.lr=1e-3",
    "critic.model.enable_gradient_checkpointing=false", "trainer.critic_warmup=0",
]  # fmt: skip


HELP = """\
Of the keys of `streamrl train` (docs/config.md) these count:
  data.* but val_files; trainer.seed; reward.custom_reward_function.*, reward.timeout
  actor_rollout_ref.{model,actor,ref}.*, critic.*
  actor_rollout_ref.rollout.{n,temperature,top_p,top_k,max_num_seqs,tools,multi_turn,agent.default_agent_loop}
  algorithm.{adv_estimator,gamma,lam,norm_adv_by_std_in_grpo,kl_penalty,kl_ctrl}
and these do not: runtime, validation, checkpoints and resuming, trainer.v1, filter_groups, rollout_correction,
reward.overlong_buffer, distillation, transfer_queue, monitor. How many steps is --steps.
"""
USABLE = frozenset({"values", "lengths"})
"""Needs of estimators that this loop meets."""


@dataclass
class PPOTrainer:
    config: StreamRLConfig
    actor: WorkerGroup  # with the reference policy
    rollout: WorkerGroup
    prompts: PromptDataset
    directory: Path
    critic: WorkerGroup | None = None  # where the estimator needs values

    def fit(self, steps: int) -> Iterator[DataProto]:
        """The rows of each step with all their columns, and its metrics in `meta_info`."""
        for group in filter(None, (self.actor, self.critic, self.rollout)):
            group.init_model()
        control = self.config.algorithm.kl_ctrl
        kl = kl_controller(control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon)
        for step in range(1, steps + 1):
            batch = self.next_prompts(step)
            batch.union(self.rollout.generate_sequences(batch))
            batch.union(self.compute_scores(batch))
            batch.union(self.actor.compute_log_prob(batch))
            batch.union(self.actor.compute_ref_log_prob(batch))
            if self.critic is not None:
                batch.union(self.critic.compute_values(batch))
            batch.meta_info["kl_coef"] = kl.coef
            batch.union(self.actor.compute_rewards(batch))  # the scores, less the KL to the reference
            kl.update(batch.meta_info["metrics"]["actor/reward_kl_penalty"], len(batch))
            if self.estimator.per_session is not None:
                batch.meta_info["advantages"] = self.session_advantages(batch)
            batch.union(self.actor.compute_advantage(batch))
            if self.critic is not None:
                batch.union(self.critic.update_critic(batch))
            batch.union(self.actor.update_actor(batch))
            self.rollout.update_weights(self.actor.publish_weights(step))
            yield batch
        self.actor.save_checkpoint(str(self.directory / "actor"))
        if self.critic is not None:
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
        tensors = batch.batch
        assert tensors is not None
        scores = torch.zeros(tensors["responses"].shape)
        lengths = tensors["attention_mask"][:, -scores.shape[1] :].sum(1)

        async def score(i: int) -> float:
            prompt, length = batch[i].non_tensor_batch, int(lengths[i])
            answer = Trajectory(
                [], tensors["responses"][i, :length].tolist(), tensors["response_mask"][i, :length].tolist(),
                num_turns=int(prompt["num_turns"]),
            )  # fmt: skip
            return (await self.reward(prompt, answer, self.chat)).value

        async def all_scores() -> list[float]:
            return await asyncio.gather(*map(score, range(len(batch))))

        for i, value in enumerate(asyncio.run(all_scores())):
            scores[i, tensors["response_mask"][i].nonzero()[-1]] = value
        metrics = {"critic/score/mean": float(scores.sum(1).mean())}
        return DataProto.from_dict({"token_level_scores": scores}, meta_info={"metrics": metrics})

    def session_advantages(self, batch: DataProto) -> dict[str, float]:
        """One per row, of an estimator that compares the answers to a prompt."""
        assert batch.batch is not None
        uids, sessions = batch.non_tensor_batch["uid"], batch.non_tensor_batch["session"]
        _, group_index = np.unique(uids, return_inverse=True)
        found = self.estimator.sessions(
            batch.batch["token_level_rewards"].sum(1).double().numpy(), group_index,
            norm_by_std=self.config.algorithm.norm_adv_by_std_in_grpo,
            lengths=batch.batch["response_mask"].sum(1).double().numpy(),
        )  # fmt: skip
        keys = [row_key(uid, int(session)) for uid, session in zip(uids, sessions, strict=True)]
        return dict(zip(keys, found.tolist(), strict=True))

    @cached_property
    def estimator(self) -> Estimator:
        return estimator(self.config.algorithm.adv_estimator)

    @cached_property
    def reward(self) -> RewardFunction:
        """As an agent worker of `streamrl train` calls it."""
        agents = agent_worker(self.config)
        return RewardFunction(agents.reward, timeout=agents.reward_timeout, kwargs=agents.reward_kwargs)

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
    made = {
        "actor": ClassWithInitArgs(ActorWorker, ActorSettings.of(config), NoRows(), str(directory / "weights")),
        "rollout": ClassWithInitArgs(RolloutWorker, server, agent_worker(config), data.max_prompt_length),
    }
    if config.critic.enable:
        made["critic"] = ClassWithInitArgs(CriticWorker, CriticSettings.of(config), NoRows())
    return made


def checked(overrides: Sequence[str], steps: int) -> StreamRLConfig:
    """Raises ConfigError, also for what only `streamrl train` can do."""
    config = load_config([*SETTINGS, f"trainer.total_training_steps={steps}", *overrides]).config
    chosen = config.algorithm.adv_estimator
    if missing := estimator(chosen).needs - USABLE:
        raise ConfigError(
            f"algorithm.adv_estimator={chosen} needs {', '.join(missing)}, which only `streamrl train` has"
        )
    if not config.algorithm.use_kl_in_reward:
        raise ConfigError("algorithm.use_kl_in_reward=false: this loop always does; set algorithm.kl_ctrl.kl_coef=0")
    return config


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends with status 2 and a line on stderr for a mistake in what was asked for."""
    try:
        run(arguments)
    except (UserError, RewardError) as error:
        for problem in error.problems if isinstance(error, ConfigError) else (str(error),):
            print(f"error: {one_line(problem)}", file=sys.stderr)
        sys.exit(2)


def run(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        description="PPO on the calculator task, as one loop over worker groups",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ray", action="store_true", help="two ranks in processes of their own")
    parser.add_argument("--out", type=Path, default=None, help="keep the checkpoint here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see below")
    args = parser.parse_args(arguments)
    config = checked(args.overrides, args.steps)
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
                print(
                    f"step {step}:",
                    ", ".join(f"{name} {metrics[name]:.4f}" for name in shown if name in metrics),
                    flush=True,
                )
        finally:
            group.shutdown()
            if args.ray:
                ray.shutdown()


if __name__ == "__main__":
    main()
