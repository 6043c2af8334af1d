"""Whether a class of the user's can be made and used as it will be. Its file is read for that, not run.

What does not show without running it (a base from elsewhere, a decorator, a factory) is not judged.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.signatures import signature_of

HARMLESS_BASES = ("object", "Protocol", "ABC", "Generic")
"""They bring neither a constructor nor methods of their own."""
FIELD = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True, slots=True)
class Use:
    """How a class is made, and what is called of it then."""

    methods: tuple[str, ...]
    """As they are called, arguments included."""
    positional: tuple[str, ...] = ()
    """What its constructor is given besides keywords."""


SAMPLER = Use(("choose(ready, count, version)",))
TRACKER = Use(("log(metrics, step)", "finish()"), ("run",))
TOOL = Use(("call(arguments, ctx)",))
AGENT_LOOP = Use(("run(row, ctx)",))


def class_misfits(file: Path, name: str, use: Use, keywords: Iterable[str] = (), said_by: str = "") -> Iterator[str]:
    """Why the class `name` of `file` cannot be made with these keywords, which the setting `said_by` gives, or used.
    Raises SyntaxError."""
    chain, complete = _chain(ast.parse(file.read_text(encoding="utf-8"), filename=str(file)), name)
    if not chain:
        return
    keywords, signature = tuple(keywords), _constructor(chain, complete)
    if signature is not None:
        try:
            signature.bind(*use.positional, **dict.fromkeys(keywords))
        except TypeError as error:
            given = ", ".join([*use.positional, *(f"{keyword}=..." for keyword in keywords)])
            settings = f" ({said_by})" if said_by else ""
            yield f"{file}: {name}{signature} is made as {name}({given}){settings}: {error} (docs/extending.md)"
    bound = {bound for node in chain for bound in _names(node)}
    if absent := [method for method in use.methods if complete and method.partition("(")[0] not in bound]:
        verl = "; it is written for verl, whose buffers poll the queue themselves"
        foreign = verl if use is SAMPLER and "sample" in bound else ""
        yield f"{file}: {name} has no method {' or '.join(absent)} (docs/extending.md){foreign}"


def _chain(tree: ast.Module, name: str) -> tuple[list[ast.ClassDef], bool]:
    """The class and its bases as far as the file has them, nearest first; whether those are all."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    chain: list[ast.ClassDef] = []
    complete, waiting = True, [name] if name in classes else []
    while waiting:
        node = classes[waiting.pop(0)]
        chain.append(node)
        complete = complete and not node.keywords  # a metaclass
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            called = plain.attr if isinstance(plain, ast.Attribute) else plain.id if isinstance(plain, ast.Name) else ""
            if called in classes and classes[called] not in chain:
                waiting.append(called)
            elif called not in HARMLESS_BASES:
                complete = False
    return chain, complete


def _constructor(chain: list[ast.ClassDef], complete: bool) -> inspect.Signature | None:
    """Without self; None where it does not show."""
    for node in chain:
        if any(isinstance(n, ast.FunctionDef) and n.name == "__new__" for n in node.body):
            return None
        if made := [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]:
            signature = signature_of(made[-1].args)
            own = list(signature.parameters.values())[1:]
            return None if made[-1].decorator_list else signature.replace(parameters=own)
        if node.decorator_list or (node.bases and not complete):
            return None
    return inspect.Signature() if complete else None


def _names(node: ast.ClassDef) -> Iterator[str]:
    """What the body of a class binds."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign | ast.ClassDef):
            pass
        else:  # an `if`, say
            yield from (n.name for n in ast.walk(statement) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
