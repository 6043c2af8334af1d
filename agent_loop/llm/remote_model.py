"""A model that somebody else serves, as a run is told of it: a judge for rewards, or a teacher.

Plain values, which go to the processes that call the model; its key does not, it is found there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_loop.llm.keys import ApiKey

if TYPE_CHECKING:
    from agent_loop.llm.openai_remote import OpenAIRemote


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """`url` ends with the version, as in https://host/v1. The key, if it needs one, is in the environment variable
    `key_env` or in the file `key_file`."""

    url: str
    model: str
    key_env: str | None = None
    key_file: str | None = None
    concurrency: int = 16
    """Calls that one process has open."""
    deadline: float = 120.0
    """Seconds of one call, with all its tries and waits."""

    def open(self) -> OpenAIRemote:
        """For one event loop. Raises KeyMissing."""
        from agent_loop.llm.openai_remote import OpenAIRemote  # an HTTP client, which most workers never need

        key = ApiKey.find(env=self.key_env, file=self.key_file)
        return OpenAIRemote(self.url, self.model, key=key, concurrency=self.concurrency, deadline=self.deadline)
