"""Errors a user can mend. The command line shows them in one or two lines, without a traceback, with exit status 2."""

from __future__ import annotations

import re


class UserError(Exception):
    """Base: the message says what was wrong, with which value, and what to do."""


class ConfigError(UserError):
    """The configuration cannot run. `problems` holds one message per mistake; the first ones are shown."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DatasetError(UserError):
    """A dataset file is missing or a row of it is malformed; the message names file, line and column."""


class DamagedFileError(UserError, ValueError):
    """A file of a run directory does not hold what was written there; the message names file and place."""


def shortened(text: str, limit: int = 100) -> str:
    """For messages: a longer text is cut, and says how long it was."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def one_line(text: str) -> str:
    """A message on one line, without the bulk of values that nobody can read."""
    words = re.sub(r"\S{1000,}", lambda found: shortened(found[0]), re.sub(r"\s*\n\s*", " ", text.strip()))
    return shortened(words, 4000)
