"""What a data row asks for itself reaches the sessions and the trainer."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import Summary
from tests.runtime.test_local_run import run

AGENT = '''
from agent_loop.trajectory import Trajectory


class Watcher:
    """Writes down what it was asked."""

    async def run(self, row, ctx):
        with open(__file__ + ".seen", "a") as seen:
            print(row["raw_prompt"][0]["content"], row["images"], row["tool_selection"], file=seen)
        trajectory = Trajectory(prompt_ids=ctx.chat.render_prompt(row["raw_prompt"]), num_turns=2)
        await ctx.sample(trajectory, turn=0)
        return [trajectory]
'''


def trained(make_config, tmp_path: Path) -> tuple[Path, Summary]:
    rows = [
        {"prompt": f"{n} + 1 = ?", "answer": str(n + 1), "n": n, "images": [{"bytes": None, "path": f"{n}.png"}]}
        for n in (2, 3, 4, 7)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "watcher.py").write_text(AGENT)
    return run(
        make_config(
            f"data.train_files={tmp_path}/own.jsonl",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "trainer.total_training_steps=3",
            "trainer.val_before_train=false",
            "data.val_files=[]",
            f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/watcher.py:Watcher",
        )
    )


def test_groups_of_different_size_are_sampled_and_trained_whole(make_config, tmp_path: Path) -> None:
    path, summary = trained(make_config, tmp_path)
    assert summary.groups.trained == 12
    assert [line["rows/trained"] for line in read_metrics(path)] == [2 + 3 + 4 + 7] * 3


def test_the_agent_gets_the_media_of_its_row(make_config, tmp_path: Path) -> None:
    trained(make_config, tmp_path)
    seen = set((tmp_path / "watcher.py.seen").read_text().splitlines())
    assert seen >= {f"{n} + 1 = ? [{{'bytes': None, 'path': '{n}.png'}}] None" for n in (2, 3, 4, 7)}
