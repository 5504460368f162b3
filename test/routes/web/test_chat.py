"""The chat panel in a browser: first screen, branches, sessions, files."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from programs.chat.commands import Console
from test.routes.web.conftest import DESK, PHONE, Opener, at_width, both_widths
from test.serving import ROOT, Service

pytestmark = pytest.mark.browser


def say(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.keyboard.press("Enter")


def answers(page: Page, turns: int) -> list[str]:
    """Return the visible answers. First wait until the tree has `turns` turns and none of them is growing."""
    expect(page.locator(".tree .node")).to_have_count(1 + turns)
    expect(page.locator("#send")).to_be_visible()
    return page.locator(".turn .markdown").all_inner_texts()


def greedy(page: Page) -> None:
    page.get_by_text("Parameters").first.click()
    page.fill("#chat-temperature", "0")
    page.keyboard.press("Tab")
    page.get_by_text("Parameters").first.click()


@both_widths
def test_a_chat_from_the_first_screen_to_its_branches(
    demo: Service, open_page: Opener, shots: Path, width: int
) -> None:
    page = open_page(demo, width=width)
    look = "" if width > 900 else "phone-"
    expect(page.locator("#about-model")).to_contain_text("rwkv7 answers: rwkv7-demo")
    expect(page.locator(".welcome")).to_contain_text("small demo model")
    expect(page.locator(".welcome h2")).to_be_in_viewport()
    expect(page.get_by_role("button", name="Copy")).to_be_in_viewport(ratio=1)
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator(".side.right")).to_be_hidden()  # no empty part
    page.screenshot(path=shots / f"{look}first-screen.png")
    greedy(page)
    page.locator(".examples button").first.click()
    answers(page, 1)
    expect(page.locator(".turn .speed")).to_have_text(re.compile(r"\d+ tokens, first after [\d.]+ s, [\d,]+ tokens/s"))
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    first = page.locator(".turn").first
    first.get_by_role("button", name="Edit").click()
    expect(first.locator("textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(first.locator("textarea")).to_have_count(0)
    first.get_by_role("button", name="Edit").click()
    first.locator("textarea").fill("My name is Peter.")
    first.get_by_role("button", name="Send as new branch").click()
    answers(page, 3)
    say(page, "What is my name?")
    assert "Peter" in answers(page, 4)[-1]
    expect(page.locator(".siblings")).to_have_text(re.compile("2/2"))
    expect(page.locator(".tree .dot.hollow")).to_have_count(0)
    expect(page.locator(".sessions li.shown .tier")).to_have_text(re.compile("engine|RAM|disk"))
    page.screenshot(path=shots / f"{look}chat.png")
    for side in ("left", "right") if width <= 900 else ():
        page.click(f".side.{side} > summary")
    # Back to the first branch by its node: its state is unchanged.
    page.locator(".tree .node", has_text="My name is Anna").click()
    say(page, "What is my name?")
    assert "Anna" in answers(page, 5)[-1]
    page.locator(".turn").last.get_by_role("button", name="Regenerate").click()
    assert "Anna" in answers(page, 6)[-1]
    current = page.locator(".tree [aria-current]")
    current.focus()
    expect(page.locator(".siblings").last).to_contain_text("3/3")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".siblings").last).to_contain_text("2/3")
    for _ in range(2):
        page.keyboard.press("ArrowUp")
    expect(current).to_have_text("Start")
    expect(current).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".siblings").first).to_contain_text("2/2")
    page.on("dialog", lambda dialog: dialog.accept(f"My chat {width}"))
    page.locator(".sessions li.shown").get_by_role("button", name="Rename").click()
    expect(page.locator(".sessions li.shown .title")).to_have_text(f"My chat {width}")
    page.fill("#chat-search", f"CHAT {width}")
    expect(page.locator(".sessions li")).to_have_count(1)
    page.fill("#chat-search", "no such chat")
    expect(page.locator(".sessions li")).to_have_count(0)
    expect(page.get_by_text("No chat has “no such chat” in its name.")).to_be_visible()


def show_sides(page: Page) -> None:
    """Open the list of chats and the tree, which a phone folds."""
    for side in ("left", "right"):
        if page.locator(f".side.{side}:not([open]) > summary").is_visible():
            page.click(f".side.{side} > summary")


@at_width(DESK)
def test_sessions_are_exported_imported_and_deleted(
    demo: Service, open_page: Opener, tmp_path: Path, width: int
) -> None:
    page = open_page(demo, width=width)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
    show_sides(page)
    page.locator(".menu summary").click()
    files = []
    for button in ("State of this turn", "Conversation", "Text (.md)"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=button).click()
        file = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(file)
        files.append(file)
    name = page.locator(".sessions li.shown .title").inner_text()
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".sessions li.shown").get_by_role("button", name="Delete").click()
    expect(page.locator(".sessions li", has_text=name)).to_have_count(0)
    terminal = Console()
    for role, text in (("user", "My name is Anna."), ("assistant", "Got it.")):
        terminal.conversation.say(role, text)
    terminal.conversation.switch_branch("other")
    terminal.handle_command(f"/save {tmp_path / 'saved.json'}")
    for file in (*files, tmp_path / "saved.json"):
        # The state continues, and the text is sent again.
        page.set_input_files("#import-file", file)
        expect(page.locator(".tree .node")).to_have_count(2)
        expect(page.locator("#chat-done")).to_contain_text(
            f"Imported {'the state of ' * (file == files[0])}{file.name}"
        )
        say(page, "What is my name?")
        assert "Anna" in answers(page, 2)[-1]
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".tree .node")).to_have_count(1)
    for name, said in (
        ("page.html", "this is not a chat. Choose"),
        ("page.safetensors", "give a file of /state/export"),
    ):
        (tmp_path / name).write_text("<!doctype html><title>A page</title>")
        page.set_input_files("#import-file", tmp_path / name)
        expect(page.get_by_role("alert")).to_contain_text(said)


@at_width(PHONE)
def test_a_session_of_another_browser_outlives_the_engine(demo: Service, open_page: Opener, width: int) -> None:
    turn = {"contents": ["User: My name is Anna.\n\nAssistant:"], "temperature": 0, "max_tokens": 30}
    assert demo.post("/multi_state/chat/completions", {**turn, "session_id": f"elsewhere-{width}"}).status_code == 200
    page = open_page(demo, width=width)
    greedy(page)
    expect(page.locator("#model")).not_to_be_empty()  # it knows the engine
    os.kill(demo.pids()["engine"], signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("The engine has restarted")
    show_sides(page)
    page.locator("#other-sessions summary").click()
    page.locator(".sessions .name", has_text=f"elsewhere-{width}").click()
    expect(page.locator(".turn")).to_contain_text("Its text is not in this browser")
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    page.reload()
    show_sides(page)
    page.locator(".sessions .name").first.click()
    expect(page.locator(".turn")).to_have_count(2)
    show_sides(page)
    expect(page.locator(".tree .dot.hollow")).to_have_count(0)


def test_a_chat_starts_from_a_tuned_state(demo: Service, open_page: Opener) -> None:
    file = {"content": ("chinese.pth", (ROOT / "demo" / "tuned" / "chinese.pth").read_bytes())}
    assert demo.request("POST", "/v1/states", data={"name": "short"}, files=file).status_code == 200
    page = open_page(demo)
    expect(page.locator("#chat-model")).to_have_value("rwkv7")
    page.select_option("#chat-state", "short")
    with page.expect_request("**/multi_state/chat/completions") as first:
        say(page, "Hello")
    assert (first.value.post_data_json or {})["state"] == "short"
    answers(page, 1)
    with page.expect_request("**/multi_state/chat/completions") as second:
        say(page, "Hello")
    assert "state" not in (second.value.post_data_json or {}), "the session has its state"
    answers(page, 2)
    assert demo.request("DELETE", "/v1/states/short").status_code == 200
