"""Finding what a path in the configuration names, and looking into a Python file without running it."""

from __future__ import annotations

import ast
from functools import cache
from itertools import chain
from pathlib import Path

from agent_loop.plugins import is_path_spec

REPOSITORY = Path(__file__).resolve().parents[2]


def roots() -> list[Path]:
    """Where a relative path is looked up: the working directory, then the checkout this package runs from."""
    cwd = Path.cwd()
    from_checkout = (REPOSITORY / "pyproject.toml").is_file() and cwd != REPOSITORY
    return [cwd, REPOSITORY] if from_checkout else [cwd]


def find(path: str) -> Path | None:
    """The absolute path of an existing file or directory; None if there is none."""
    given = Path(path).expanduser()
    candidates = [given] if given.is_absolute() else [root / given for root in roots()]
    return next((candidate.resolve() for candidate in candidates if _exists(candidate)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, a directory that cannot be entered
        return False


def looked_in(path: str) -> str:
    """For error messages: where `find` looked."""
    return "" if Path(path).expanduser().is_absolute() else f" (looked in {', '.join(map(str, roots()))})"


def split_file_object(reference: str) -> tuple[str, str] | None:
    """("path/to/file.py", "Name") of "path/to/file.py:Name"; None for a registered name."""
    path, _, name = reference.rpartition(":")
    return (path, name) if is_path_spec(reference) else None


def defines(file: Path, name: str) -> bool:
    """Whether the module binds `name` at its top level. Raises SyntaxError naming file and line."""
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    return name in {bound for node in tree.body for bound in _bound_names(node)}


def definitions(file: Path) -> list[str]:
    """The public functions and classes that stand in the file itself. Raises SyntaxError."""
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]


@cache
def registered(package: str, decorator: str) -> list[str]:
    """The names that the modules of a package of ours register at their top level; importing them may load torch."""
    directory = REPOSITORY.joinpath(*package.split("."))
    bodies = (ast.parse(file.read_text(encoding="utf-8")).body for file in directory.glob("*.py"))
    calls = [
        call
        for node in chain.from_iterable(bodies)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == decorator
    ]
    return sorted(str(arg.value) for call in calls for arg in call.args[:1] if isinstance(arg, ast.Constant))


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
