"""vLLM's own arguments, read from its source: to import it takes seconds, and a configuration is checked in one."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),),
}  # fmt: skip


@cache
def arguments() -> dict[str, str]:
    """The fields of AsyncEngineArgs and their annotations; empty where vLLM is not installed, or is another."""
    if (home := _home()) is None:
        return {}
    found: dict[str, str] = {}
    try:
        tree = ast.parse((home / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {
                each.target.id: ast.unparse(each.annotation) for each in fields if isinstance(each.target, ast.Name)
            }
    return found


def wrong_values(given: Mapping[str, Any]) -> Iterator[str]:
    """ "name=value: what it takes", as far as its annotation is of plain types or of the words that vLLM lists."""
    for name, value in given.items():
        annotation = arguments().get(name, "")
        parts = annotation.split(" | ")
        if all(part in PLAIN for part in parts):
            kinds = {kind for part in parts for kind in PLAIN[part]}
            if type(value) not in kinds:
                yield f"{name}={value}: vLLM takes {annotation}"
        elif (words := _words(parts[0])) and isinstance(value, str) and len(parts) == 1 and value not in words:
            yield f"{name}={value}: vLLM takes one of {', '.join(words)}"


@cache
def _words(alias: str) -> tuple[str, ...]:
    """Of `alias = Literal["a", "b"]` in its configuration."""
    home = _home()
    for file in sorted(home.glob("config/*.py")) if home is not None and alias.isidentifier() else ():
        found = re.search(rf"^{alias} = Literal\[(.*?)\]", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if found is not None:
            return tuple(re.findall(r"\"([^\"]+)\"", found[1]))
    return ()


def _home() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None
