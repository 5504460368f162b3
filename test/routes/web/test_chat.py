"""The chat panel in a browser: streams, branches, sessions, files."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from test.routes.web.conftest import WAIT_MS, Opener
from test.serving import ROOT, Service, wait_for

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)


def say(page: Page, text: str) -> None:
    """Send a message."""
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


def test_an_answer_streams_in_and_the_session_remembers(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    expect(page.locator(".sessions li.shown .tier")).to_have_text(re.compile("memory|RAM|disk"))
    page.screenshot(path=shots / "chat.png")


def test_a_turn_is_regenerated_edited_and_branched(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    first = page.locator(".turn").first
    first.get_by_role("button", name="Edit").click()
    first.locator("textarea").fill("My name is Peter.")
    first.get_by_role("button", name="Send as new branch").click()
    answers(page, 3)
    say(page, "What is my name?")
    assert "Peter" in answers(page, 4)[-1]
    expect(page.locator(".siblings")).to_have_text(re.compile("2/2"))
    nodes = page.locator(".tree .node")
    expect(page.locator(".tree .dot.hollow")).to_have_count(0)
    page.screenshot(path=shots / "branches.png")
    # Back to the first branch by its node: its state is unchanged.
    nodes.filter(has_text="My name is Anna.").click()
    say(page, "What is my name?")
    assert "Anna" in answers(page, 5)[-1]
    page.locator(".turn").last.get_by_role("button", name="Regenerate").click()
    assert "Anna" in answers(page, 6)[-1]


def test_the_chat_continues_after_a_stopped_answer(fake: Service, open_page: Opener) -> None:
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
    expect(page.locator("#model")).not_to_be_empty()  # it knows the engine
    os.kill(service.pids()["engine"], signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("The engine has restarted")
    page.reload()
    page.locator(".sessions .name").first.click()
    expect(page.locator(".turn")).to_have_count(1)
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]
    expect(page.locator(".tree .dot.hollow")).to_have_count(0)


def test_sessions_are_exported_imported_and_deleted(demo: Service, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(demo)
    greedy(page)
    say(page, "My name is Anna.")
    answers(page, 1)
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
    for file in files:
        # The state continues, and the text is sent again.
        page.set_input_files("#import-file", file)
        expect(page.locator(".tree .node")).to_have_count(2)
        say(page, "What is my name?")
        assert "Anna" in answers(page, 2)[-1]
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".tree .node")).to_have_count(1)


def test_a_session_of_another_browser_is_continued(demo: Service, open_page: Opener) -> None:
    turn = {"contents": ["User: My name is Anna.\n\nAssistant:"], "temperature": 0, "max_tokens": 30}
    assert demo.post("/multi_state/chat/completions", {**turn, "session_id": "elsewhere"}).status_code == 200
    page = open_page(demo)
    greedy(page)
    page.locator("#other-sessions summary").click()
    page.locator(".sessions .name", has_text="elsewhere").click()
    expect(page.locator(".turn")).to_contain_text("Its text is not in this browser")
    say(page, "What is my name?")
    assert "Anna" in answers(page, 2)[-1]


def test_reasoning_is_collapsed(fake: Service, open_page: Opener) -> None:
    page = open_page(fake)
    page.select_option("#think", "on")
    say(page, ">Let me see.</think>The answer.")
    expect(page.locator(".turn .markdown")).to_contain_text("The answer.")
    page.click("#stop")
    thought = page.locator(".turn details.thought")
    expect(thought.locator("summary")).to_have_text("Reasoning")
    expect(thought.locator(".text")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator(".text")).to_have_text("Let me see.")


def test_the_first_screen_names_the_model_and_answers_an_example(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo)
    expect(page.locator("#about-model")).to_contain_text("rwkv7 answers: rwkv7-demo")
    expect(page.locator(".welcome")).to_contain_text("small demo model")
    expect(page.locator("#question")).to_be_focused()
    page.screenshot(path=shots / "first-screen.png")
    page.locator(".examples button").nth(1).click()
    answers(page, 1)
    expect(page.locator(".turn .speed")).to_have_text(re.compile(r"\d+ tokens, first after [\d.]+ s, [\d,]+ tokens/s"))


def test_chats_are_renamed_and_searched(demo: Service, open_page: Opener) -> None:
    page = open_page(demo)
    say(page, "Hello")
    answers(page, 1)
    page.on("dialog", lambda dialog: dialog.accept("My first chat"))
    page.locator(".sessions li.shown").get_by_role("button", name="Rename").click()
    expect(page.locator(".sessions li.shown .title")).to_have_text("My first chat")
    page.fill("#chat-search", "FIRST")
    expect(page.locator(".sessions li")).to_have_count(1)
    page.fill("#chat-search", "no such chat")
    expect(page.locator(".sessions li")).to_have_count(0)


def test_keys_stop_an_answer_and_list_themselves(fake: Service, open_page: Opener) -> None:
    page = open_page(fake)
    say(page, "word")
    expect(page.locator(".turn .markdown")).to_contain_text("word")
    page.keyboard.press("Escape")
    expect(page.locator(".turn")).to_contain_text("Stopped")
    page.locator(".transcript").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("stop the answer")
    page.keyboard.press("Escape")
    page.get_by_text("Parameters").first.click()
    page.get_by_role("button", name="Precise").first.click()
    expect(page.locator("#chat-temperature")).to_have_value("0.3")
    page.get_by_role("button", name="Balanced").first.click()
    expect(page.locator("#chat-temperature")).to_have_value("")


def test_a_chat_starts_from_a_tuned_state(demo: Service, open_page: Opener) -> None:
    file = {"content": ("chinese.pth", (ROOT / "demo" / "tuned" / "chinese.pth").read_bytes())}
    assert demo.request("POST", "/v1/states", data={"name": "short"}, files=file).status_code == 200
    page = open_page(demo)
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


@pytest.mark.parametrize("width", [1280, 390])
def test_a_text_file_is_dropped_and_a_draft_outlives_a_reload(
    fake: Service, open_page: Opener, tmp_path: Path, width: int
) -> None:
    page = open_page(fake, viewport={"width": width, "height": 800})
    page.fill("#question", "Read this:")
    page.locator(".composer").evaluate(
        "(place) => { const data = new DataTransfer(); data.items.add(new File(['one\\ntwo'], 'notes.txt'));"
        "place.dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true })); }"
    )
    expect(page.locator("#question")).to_have_value("Read this:\nnotes.txt:\n```\none\ntwo\n```\n")
    page.reload()
    expect(page.locator("#question")).to_have_value(re.compile("notes.txt"))
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\0")
    page.set_input_files("#chat-file", binary)
    expect(page.locator(".composer [role=alert]")).to_contain_text("picture.png is no UTF-8 text")
    page.locator("#question").press("Control+Enter")
    expect(page.locator(".turn .user")).to_contain_text("notes.txt")
    expect(page.locator("#question")).to_have_value("")
    page.click("#stop")


def test_arrow_keys_walk_the_tree(demo: Service, open_page: Opener) -> None:
    page = open_page(demo)
    say(page, "Hello")
    answers(page, 1)
    page.locator(".turn").first.get_by_role("button", name="Regenerate").click()
    answers(page, 2)
    current = page.locator(".tree [aria-current]")
    current.focus()
    expect(page.locator(".siblings")).to_contain_text("2/2")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".siblings")).to_contain_text("1/2")
    page.keyboard.press("ArrowUp")
    expect(current).to_have_text("Start")
    expect(current).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".siblings")).to_contain_text("2/2")
