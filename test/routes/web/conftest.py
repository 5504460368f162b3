"""A real Chromium for the tests of the page, and their services."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from test.conftest import IS_LONG
from test.serving import Service

pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright

BROWSERS = ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium")
"""The first existing one is used. The headless shell takes a third of the CPU time to open a page."""
CHROMIUM = Path(os.environ.get("RWKV_TEST_CHROMIUM") or next(filter(os.path.exists, BROWSERS), BROWSERS[0]))
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --js-flags=--expose-gc"
).split()
WAIT_MS = 300_000 if "RWKV_SCREENSHOTS" in os.environ else 100_000
"""Pictures need a service, not a quick one."""
expect.set_options(timeout=WAIT_MS)
PASSWORD = "芝麻开门 sesame"
DESK, PHONE = 1280, 390
both_widths = pytest.mark.parametrize("width", [DESK, PHONE])
Opener = Callable[..., Page]


def at_width(usual: int) -> pytest.MarkDecorator:
    """One width for a panel that other tests show at the other one; both for `make test-long` and for screenshots."""
    return both_widths if IS_LONG or "RWKV_SCREENSHOTS" in os.environ else pytest.mark.parametrize("width", [usual])


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium. Skipped without it, except in CI.

    Only for these files: Playwright keeps this thread's event loop running, so no other test could use one.
    """
    if not CHROMIUM.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a Chromium at {CHROMIUM}: apt-get install chromium-headless-shell")
        pytest.skip(f"no Chromium at {CHROMIUM}")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=WAIT_MS)
        yield started
        started.close()


def _watch(page: Page, troubles: list[str], service: Service) -> None:
    """Record forbidden events of a page: errors, policy violations, requests to other hosts."""
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("request", lambda one: one.url.startswith((service.url, "data:", "blob:")) or troubles.append(one.url))

    def said(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            troubles.append(message.text)

    page.on("console", said)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Open the page of a service in a new profile. Check its record afterwards."""
    troubles: list[str] = []
    with contextlib.ExitStack() as opened:

        def opener(service: Service, panel: str = "chat", width: int = 1280, height: int = 800, **options: Any) -> Page:
            options = {"locale": "en-US", "viewport": {"width": width, "height": height}, **options}
            context = browser.new_context(**options)
            opened.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            _watch(page, troubles, service)
            page.goto(f"{service.url}/#{panel}")
            return page

        yield opener
    assert troubles == []


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of screenshots: RWKV_SCREENSHOTS, else a temporary one."""
    folder = Path(os.environ.get("RWKV_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
