"""A headless Chromium and a dashboard served by its own process, for the tests that look at real pages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

PAGES = ("overview", "queue", "timeline", "staleness", "learning", "fleet", "alerts")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Playwright's loop runs in this thread until the block is left."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Dashboard:
    """`streamrl dash` of a run, as a user starts it."""

    def __init__(self, run_dir: Path, *arguments: str, port: int = 0) -> None:
        command = [
            sys.executable,
            "-c",
            "from streamrl.main import script; script()",
            "dash",
            str(run_dir),
            "--port",
            str(port),
            *arguments,
        ]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"(http://\S+:(\d+))/#key=(\S+)", line)
        assert found, line + self._process.stdout.read()
        self.url, self.port, self.key = found[1], int(found[2]), found[3]

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Page:
    """A page of the dashboard that remembers every request and complaint."""

    def __init__(
        self, browser: Any, dashboard: Dashboard, *, size: tuple[int, int] = (1280, 720), dark: bool = False
    ) -> None:
        self.dashboard = dashboard
        self.requests: list[str] = []
        self.complaints: list[str] = []
        theme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda told: told.type in ("error", "warning") and self.complaints.append(told.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, name: str = "overview", *, key: bool = False) -> Self:
        self.page.goto(f"{self.dashboard.url}/#{f'key={self.dashboard.key}' if key else name}")
        self.page.wait_for_selector("main .card, main .empty")
        if key:
            self.show(name)
        return self

    def show(self, name: str) -> None:
        """Go to another page, as a click in the navigation does."""
        self.page.click(f"nav a[href='#{name}']")
        self.page.wait_for_selector(f"nav a[href='#{name}'][aria-current=page]")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait_for(self, expression: str, seconds: float) -> None:
        """Until the JavaScript expression is true. (Playwright's own wait needs eval(), which the pages forbid.)"""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {expression}; the page says {self.text('body')[:2000]}")
            self.page.wait_for_timeout(30)

    @property
    def elsewhere(self) -> list[str]:
        """Requests that left the origin."""
        return [url for url in self.requests if not url.startswith((self.dashboard.url, "data:"))]

    def close(self) -> None:
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
