"""Nothing in the shipped packages turns data into code: no pickle, no eval, no unpickling loaders, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("transfer_queue", "agent_loop", "streamrl")

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load",
    "os.system", "os.popen", "hydra.utils.instantiate", "instantiate",
}  # fmt: skip
METHODS = {"recv_pyobj", "send_pyobj"}


def banned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in the tree that may run data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rsplit(".", 1)[-1] in METHODS:
                yield node.lineno, name
            for keyword in node.keywords:
                enabled = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and enabled:
                    yield node.lineno, f"{keyword.arg}=True"


@pytest.mark.parametrize("package", SHIPPED)
def test_no_shipped_module_runs_data(package: str):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for line, what in banned(ast.parse(file.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval('1')",
        "torch.load('x')",
        "socket.recv_pyobj()",
        "subprocess.run('x', shell=True)",
        "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
    ],
)
def test_the_lint_sees(code: str):
    assert list(banned(ast.parse(code)))


def test_no_shipped_module_silences_a_security_rule():
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for package in SHIPPED
        for file in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "noqa" in line and any(rule in line for rule in ("S1", "S3", "S5", "S6"))
    ]
    assert found == []
