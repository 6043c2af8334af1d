"""A teacher that somebody else serves: scores by `OpenAIRemote`, and failures as a session takes them."""

from __future__ import annotations

from agent_loop.llm.openai_remote import OpenAIRemote
from agent_loop.llm.protocol import CannotScore, Scores, ServerDied
from agent_loop.llm.remote_http import RemoteError, RemoteUnavailable
from agent_loop.llm.remote_model import RemoteModel


class RemoteTeacher:
    """Implements Scorer. One that cannot be reached is a lost server, not the session's failure."""

    def __init__(self, remote: OpenAIRemote) -> None:
        self._remote = remote

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], temperature: float, *, session: str
    ) -> Scores:
        """Raises ServerDied, and RemoteRefused, RemoteInvalid, CannotScore for what will not be better next time."""
        try:
            return await self._remote.score(prompt_ids, response_ids, temperature)
        except RemoteUnavailable as error:
            raise ServerDied(str(error)) from error


async def check_teacher(teacher: RemoteModel) -> None:
    """Before a run: it is there, takes the key, and tells log-probs of given tokens. Raises ValueError (KeyMissing is
    one) with what is wrong."""
    remote = teacher.open()
    try:
        await remote.score([0], [1])
    except (RemoteError, CannotScore) as error:
        raise ValueError(str(error)) from error
    finally:
        await remote.close()
