"""The administrator's panel in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from test.routes.web.conftest import WAIT_MS, Opener
from test.serving import ROOT, Service

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)


def test_a_state_is_uploaded_used_and_deleted(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo, "admin")
    states = page.locator("#admin-states")
    states.get_by_label("Name").fill("chinese")
    states.get_by_label("File").set_input_files(ROOT / "demo" / "tuned" / "chinese.pth")
    states.get_by_role("button", name="Add").click()
    expect(states.locator("li b")).to_have_text("chinese")
    page.screenshot(path=shots / "admin.png")
    assert (
        demo.post("/v1/chat/completions", {"contents": ["x"], "state": "chinese", "max_tokens": 1}).status_code == 200
    )
    page.on("dialog", lambda dialog: dialog.accept())
    states.get_by_role("button", name="Delete chinese").click()
    expect(states.locator("li")).to_have_count(0)
    assert (
        demo.post("/v1/chat/completions", {"contents": ["x"], "state": "chinese", "max_tokens": 1}).status_code == 404
    )


def test_a_refusal_is_shown_and_sessions_are_searched(demo: Service, open_page: Opener) -> None:
    for name in range(7):
        body = {"contents": ["User: Hi\n\nAssistant:"], "session_id": f"find-{name}", "max_tokens": 1}
        assert demo.post("/state/chat/completions", body).status_code == 200
    page = open_page(demo, "admin")
    models = page.locator("#admin-models")
    models.get_by_label("Name").fill("other")
    models.get_by_label("File").fill("absent.pth")
    models.get_by_role("button", name="Add").click()
    expect(models.get_by_role("alert")).to_contain_text("--models-dir")
    sessions = page.locator("#admin-sessions")
    sessions.get_by_label("Search").fill("FIND-3")
    expect(sessions.locator("li b")).to_have_text("find-3")
    page.on("dialog", lambda dialog: dialog.accept())
    sessions.get_by_role("button", name="Delete find-3").click()
    expect(sessions.locator("li")).to_have_count(0)
    expect(page.locator("#admin-engines li small")).to_have_text(re.compile("ready"))
