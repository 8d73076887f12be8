"""A real headless Chromium for tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A Playwright browser over the Chromium of the system. Skips the test where either is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=arguments, timeout=120_000)
        try:
            yield opened
        finally:
            opened.close()


@contextlib.contextmanager
def fresh_page(opened: Any, *, width: int, timeout: int) -> Iterator[Any]:
    """A page of its own, `width` pixels wide, whose waits end after `timeout` ms. An error of its scripts fails the test."""
    page = opened.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(timeout)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert wrong == [], wrong
