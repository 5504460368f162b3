"""Accessibility: axe finds nothing on desk and phone, light and dark; panels fit; the keyboard reaches everything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Page, Route, expect

from test.routes.web.conftest import Opener
from test.serving import Service

pytestmark = pytest.mark.browser
AXE = Path(AXE_FILE_PATH)
PANELS = ("chat", "batch", "translate", "tune", "dashboard", "admin")
DARK = {"color_scheme": "dark", "reduced_motion": "reduce"}
PHONE: dict[str, Any] = {"width": 390, "height": 780, "is_mobile": True, "has_touch": True}


def findings(page: Page, rules: list[str] | None = None) -> list[str]:
    """Return what axe finds; with `rules`, only those."""
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    result = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{one['id']} ({one['help']}): {node['html'][:200]} {node['failureSummary'][:300]}"
        for one in result["violations"]
        for node in one["nodes"]
    ]


def answer_at_once(route: Route) -> None:
    one = {"detected_source_lang": "en", "alternatives": [{"text": "other", "score": -1.0}], "source": "memory"}
    body = route.request.post_data_json or {}
    translations = [{**one, "index": at, "text": f"<{text}>"} for at, text in enumerate(body["text_list"])]
    warnings = [{"field": "text_list[0]", "message": "text_list[0]: it lacks a number"}]
    if not body.get("stream"):
        return route.fulfill(json={"translations": translations, "warnings": warnings})
    events = [json.dumps(event) for event in (*translations, {"warnings": warnings})]
    return route.fulfill(body="".join(f"data: {event}\n\n" for event in (*events, "[DONE]")))


def fill(page: Page) -> None:
    """Fill every panel and open every collapsed part."""
    page.fill("#question", "**Hello** `there`")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .markdown")).to_contain_text("Hello")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    page.evaluate("for (const one of document.querySelectorAll('main details')) one.open = true")
    expect(page.locator("#chat-temperature")).to_be_visible()


@pytest.mark.parametrize(
    "options",
    [{}, DARK | PHONE, pytest.param(DARK, marks=pytest.mark.long), pytest.param(PHONE, marks=pytest.mark.long)],
    ids=["desktop", "dark phone", "dark", "phone"],
)
def test_axe_finds_nothing(fake: Service, open_page: Opener, options: dict[str, Any]) -> None:
    page = open_page(fake, **options)
    fill(page)
    page.evaluate(AXE.read_text("utf-8"))
    found = {}
    for panel in PANELS:
        page.locator(f"header a[href='#{panel}']").click()
        if panel == "batch":
            page.fill("#batch-lines", "one\ntwo")
            page.fill("#batch-most", "40")
            page.click("#batch-start")
            expect(page.locator("#batch-figures")).to_have_attribute("data-done", "2")
            expect(page.locator("#batch-figures")).to_be_in_viewport()
        if "reduced_motion" in options:
            assert page.evaluate("document.getAnimations().length") == 0
        if panel == "translate":
            page.route("**/batch-translate", answer_at_once)
            page.fill("#translate-source", "Hello\nworld")
            page.locator("#translate-source").press("Control+Enter")
            page.locator(".segment .target button").first.click()
            expect(page.locator(".alternatives button").first).to_be_visible()
        if panel == "dashboard":
            expect(page.locator('[data-metric="rwkv_running_rows"]')).to_be_visible()
        width = page.evaluate(
            "Math.max(...[document.body, ...document.querySelectorAll('main > section')].map(e => e.scrollWidth))"
        )
        assert width <= page.evaluate("innerWidth"), f"{panel} fits"
        found[panel] = findings(page, ["color-contrast"] if "color_scheme" in options else None)  # else as on the desk
    assert found == {panel: [] for panel in PANELS}


def test_the_keyboard_reaches_everything(fake: Service, open_page: Opener) -> None:
    page = open_page(fake)
    expect(page.locator("#tiers")).to_be_attached()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.textContent.trim().slice(0, 30)")
        )
    assert {"Batch", "New chat", "question", "think", "Parameters"} <= reached, reached
    page.locator("header a[href='#translate']").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#translate-source")).to_be_visible()
    assert re.search("#translate$", page.url)
