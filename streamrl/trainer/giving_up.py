"""When a run ends since it will not get better: too many prompt groups in a row failed, or were filtered out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrl.trainer.group_buffer import GroupBuffer
from transfer_queue.net.messages import Group

AGENTS = "The agent loop, its tools or the reward function is broken"
SERVERS = "The LLM servers, and not the agent loop, its tools or the reward function, are broken"
OF_SERVERS = ("broke the protocol", "servers died under this request", "LLM server")
"""In the reasons of agent_loop.llm."""


@dataclass(slots=True)
class GivingUp:
    """Counts, and says why in the words of the user's settings."""

    max_failed: int
    """Groups in a row."""
    max_filtered: int
    """Groups since the last lease; 0: any number."""
    any_success: Callable[[], bool]
    """Whether any session ever succeeded, asked once, when the first groups all failed alike."""
    _filtered: int = 0
    last_failure: str = ""
    """Why the last group failed."""
    _none_ever: bool | None = None

    def left(self, groups: Sequence[Group], buffer: GroupBuffer) -> None:
        """Groups that left untrained; `buffer` has been told."""
        failures = [group.reason for group in groups if group.reason.startswith("failed")]
        self.last_failure = failures[-1].removeprefix("failed: ") if failures else self.last_failure
        if self._none_ever is None and buffer.all_failed_alike:
            self._none_ever = not self.any_success()

    def leased(self) -> None:
        """Some could be trained."""
        self._filtered = 0

    def filtered(self, count: int) -> None:
        """Raises RuntimeError when these were too many."""
        self._filtered += count
        if 0 < self.max_filtered <= self._filtered:
            raise RuntimeError(
                f"{self._filtered} prompt groups since the last step were filtered out, as all samples of each scored "
                "the same: the data is too easy or too hard for this policy, or the reward does not discriminate "
                "(trainer.log_val_generations=4 shows answers). Raise algorithm.filter_groups.max_num_gen_batches "
                "(0: no limit) or change the data"
            )

    def failure(self, buffer: GroupBuffer) -> RuntimeError | None:
        """Why nothing more is to be expected."""
        if not self._none_ever and buffer.failed_in_a_row < self.max_failed:
            return None
        none = ", and no session ever succeeded" if self._none_ever else ""
        return RuntimeError(
            f"{buffer.failed_in_a_row} prompt groups in a row failed{none}, the last with: {self.last_failure}. "
            f"{SERVERS if any(words in self.last_failure for words in OF_SERVERS) else AGENTS} for every prompt"
        )
