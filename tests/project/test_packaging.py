"""What is pinned, declared and shipped agrees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import streamrl

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamrl", "agent_loop", "transfer_queue")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCH = re.search(r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def pins(*files: str) -> dict[str, str]:
    lines = [line for file in files for line in (ROOT / "requirements" / file).read_text().splitlines()]
    parts = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): pin for name, _, pin in parts}


def test_the_pinned_versions_satisfy_what_the_project_declares():
    assert TORCH is not None
    pinned = pins("cpu.txt") | {"torch": TORCH[1]}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def imported(package: str) -> set[str]:
    """Top-level names of all modules that a package imports anywhere."""
    names: set[str] = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES)


def test_everything_imported_is_declared():
    optional = [name for extra in PROJECT["optional-dependencies"].values() for name in extra]
    declared = {canonicalize_name(Requirement(line).name) for line in [*PROJECT["dependencies"], *optional]}
    providers = packages_distributions()
    for name in set.union(*map(imported, PACKAGES)):
        assert {canonicalize_name(provider) for provider in providers[name]} & declared, name


def test_nothing_is_pinned_twice():
    assert not set(pins("cpu.txt")) & set(pins("dev.txt"))


def test_the_version_is_in_the_changelog():
    assert f"## {streamrl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n" in (ROOT / "LICENSE").read_text()


def test_the_wheel_holds_the_three_packages_with_configs_and_nothing_else(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert {"streamrl/configs/train.yaml", "streamrl/configs/experiment/calculator.yaml"} <= set(names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
