"""The configuration reference: every key with its type, default and meaning, from the dataclasses themselves.

docs/config.md is this text: `streamrl config reference > docs/config.md`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from streamrl.config.root import StreamRLConfig
from streamrl.config.schema import describe, hints, show

_HEAD = """\
# Configuration

Every key of `streamrl train key=value ...`, generated from the dataclasses in `streamrl/config/sections/` by
`streamrl config reference > docs/config.md`. Keys are verl's where the meaning is the same; verl's keys that are none
of ours stand in `streamrl/config/verl_keys.py`. A list is written `key=[a,b]`, nothing is `key=null`.
"""


def reference() -> str:
    """Markdown: one table per section."""
    return _HEAD + "".join(_section(StreamRLConfig, ""))


def _section(section: type, prefix: str) -> Iterator[str]:
    docs, types = field_docs(section), hints(section)
    inner = [field for field in fields(section) if is_dataclass(types[field.name])]
    rows = [_row(field, prefix, types[field.name], docs.get(field.name, "")) for field in fields(section)
            if field not in inner]  # fmt: skip
    if rows:
        title = f"\n## {prefix.rstrip('.')}\n" if prefix else ""
        about = _about(section) if prefix else ""
        yield f"{title}{about}\n| key | takes | default | |\n|---|---|---|---|\n" + "".join(rows)
    for field in inner:
        yield from _section(types[field.name], f"{prefix}{field.name}.")


def _row(field: Field[Any], prefix: str, hint: Any, doc: str) -> str:
    cells = (f"`{prefix}{field.name}`", _cell(describe(hint)), f"`{_cell(_default(field))}`", _cell(doc))
    return f"| {' | '.join(cells)} |\n"


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, tuple):
        return f"[{', '.join(map(show, value))}]"
    return show(value) if value != "" else "''"


def _about(section: type) -> str:
    """The docstring that the class itself has (a dataclass without one is given its signature)."""
    doc = inspect.cleandoc(section.__doc__ or "")
    return "" if doc.startswith(f"{section.__name__}(") else f"\n{doc}\n" if doc else ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def field_docs(section: type) -> dict[str, str]:
    """Field -> the docstring that follows it in the source."""
    tree = _parsed(str(inspect.getfile(sys.modules[section.__module__])))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    docs: dict[str, str] = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[statement.target.id] = inspect.cleandoc(doc)
    return docs


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))
