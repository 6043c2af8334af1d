"""A model that is given the policy's token ids must mean the same tokens by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENIZER = "actor_rollout_ref.model.tokenizer_path"


def same_tokens(key: str, who: str, own: Path, policy: Path, *, may_know_more: bool = False) -> Iterator[str]:
    """`key` names `who`'s model, whose tokenizer is in the directory `own`; the policy's is in `policy`."""
    if not (policy / "tokenizer.json").is_file():
        return  # reported elsewhere
    if not (own / "tokenizer.json").is_file():
        yield (
            f"{key}: {own} has no tokenizer.json, so nobody can tell whether its tokens are the policy's; if they are, "
            f"copy {policy / 'tokenizer.json'} there"
        )
        return
    if (own / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes():
        return
    try:
        ours, theirs = vocabulary(policy), vocabulary(own)
    except Exception as error:  # noqa: BLE001  # the library raises Exception itself
        yield f"{key}: a tokenizer.json cannot be read ({str(error).splitlines()[0]})"
        return
    compared = ours.keys() if may_know_more else ours.keys() | theirs.keys()
    differ = sorted(token for token in compared if ours.get(token) != theirs.get(token))
    if differ:
        first = differ[0]
        yield (
            f"{key}: {len(differ)} tokens have other ids in the {who}'s tokenizer than in the policy's ({TOKENIZER}), "
            f"for instance {first!r}: {theirs.get(first, 'none')} there, {ours.get(first, 'none')} here; a {who} must "
            "have the policy's tokenizer"
        )


def vocabulary(directory: Path) -> dict[str, int]:
    """Token -> id. Raises Exception for a tokenizer.json that cannot be read."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()


def json_object(path: Path) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    read = json.loads(path.read_text())
    if not isinstance(read, dict):
        raise ValueError(f"{path} is no JSON object")
    return read
