"""The chat panel in a real browser: answers that stream, branches, sessions, files."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from test.serving import Service, wait_for
from test.web.conftest import WAIT_MS, Opener

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)


def say(page: Page, text: str) -> None:
    """Send a message."""
    page.fill("#question", text)
    page.keyboard.press("Enter")


def answers(page: Page, turns: int) -> list[str]:
    """The shown answers, once the tree has so many turns and none grows any more."""
    expect(page.locator(".tree .node")).to_have_count(1 + turns)
    expect(page.locator("#send")).to_be_visible()
    return page.locator(".turn .markdown").all_inner_texts()


def greedy(page: Page) -> None:
    page.get_by_text("Decode parameters").first.click()
    page.fill("#chat-temperature", "0")
    page.keyboard.press("Tab")
    page.get_by_text("Decode parameters").first.click()


def test_an_answer_streams_in_and_the_session_remembers(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    expect(page.locator(".sessions li.shown .tier")).to_have_text(re.compile("VRAM|RAM|disk"))
    page.screenshot(path=shots / "chat.png")


def test_a_turn_is_asked_again_edited_and_branched(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    first = page.locator(".turn").first
    first.get_by_role("button", name="Edit").click()
    first.locator("textarea").fill("My name is Peter.")
    first.get_by_role("button", name="Ask as a branch").click()
    answers(page, 3)
    say(page, "What is my name?")
    assert "Peter" in answers(page, 4)[-1]
    expect(page.locator(".siblings")).to_have_text(re.compile("2/2"))
    nodes = page.locator(".tree .node")
    expect(page.locator(".tree .dot.hollow")).to_have_count(0)
    page.screenshot(path=shots / "branches.png")
    # Back to the first branch by its node: the old state goes on as if nothing had been.
    nodes.filter(has_text="My name is Anna.").click()
    say(page, "What is my name?")
    assert "Anna" in answers(page, 5)[-1]
    page.locator(".turn").last.get_by_role("button", name="Again").click()
    assert "Anna" in answers(page, 6)[-1]


def test_an_answer_is_stopped_and_the_chat_goes_on(fake: Service, open_page: Opener) -> None:
    page = open_page(fake)
    say(page, "word")
    expect(page.locator(".turn .markdown")).to_contain_text("word")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".turn")).to_contain_text("Stopped")
    wait_for(lambda: fake.status()["running_rows"] == 0, 20, "the row is cancelled")
    length = len(page.locator(".turn .markdown").inner_text())
    assert len(page.locator(".turn .markdown").inner_text()) == length


def test_a_session_is_resumed_after_the_server_was_killed(own_demo: Service, open_page: Opener) -> None:
    service = own_demo
    page = open_page(service)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
    before = service.pids()["engine"]
    os.kill(before, signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("restarted and is back")
    page.reload()
    page.locator(".sessions .name").first.click()
    expect(page.locator(".turn")).to_have_count(1)
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    expect(page.locator(".tree .dot.hollow")).to_have_count(0)
