"""The pages that are committed are the build of the sources that are committed, and small. Needs no Node."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import streamrl.dashboard

ROOT = Path(streamrl.dashboard.__file__).parent
WEB, STATIC = ROOT / "web", ROOT / "static"

MAX_GZIPPED = 150_000


def sources() -> list[str]:
    """As vite.config.ts lists them."""
    single = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"]
    below = [
        str(path.relative_to(WEB)) for name in ("src", "public") for path in (WEB / name).rglob("*") if path.is_file()
    ]
    return sorted([*single, *below])


def test_the_build_is_that_of_the_sources() -> None:
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path}\0{hashlib.sha256((WEB / path).read_bytes()).hexdigest()}\n".encode())
    assert digest.hexdigest() == (STATIC / "sources.sha256").read_text().strip(), "run `make dashboard` and commit"


def test_all_pages_together_are_small() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < MAX_GZIPPED


def test_the_pages_name_no_other_host() -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in (".html", ".css"):
            assert "//" not in path.read_text().replace("http://www.w3.org/", ""), path


def test_the_lock_file_names_no_registry_but_npms() -> None:
    packages = json.loads((WEB / "package-lock.json").read_text())["packages"]
    resolved = [package["resolved"] for package in packages.values() if "resolved" in package]
    assert [url for url in resolved if not url.startswith("https://registry.npmjs.org/")] == []
    assert all(package.get("integrity") for name, package in packages.items() if name)
