"""The batch panel with hundreds of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from test.routes.web.conftest import WAIT_MS, Opener
from test.serving import Service

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
ROWS = 200
FRAMES = 30
WHO = ("I", "You", "We", "They", "The teacher", "My brother", "Her mother", "Our friends")
WHAT = (
    "like tea", "went to Beijing yesterday", "will read two books", "want to buy a red car", "can speak Chinese",
    "live in a big city", "saw three cats in the garden", "would like some coffee",
)  # fmt: skip

COUNT_FRAMES = """([most, rows]) => new Promise(resolve => {
    let frames = 0, written = 0;
    const watch = new MutationObserver(changes => { written += changes.length; });
    watch.observe(document.querySelector(".wall"), { subtree: true, characterData: true });
    const count = () => {
        frames += 1;
        if (frames < most || written <= rows) return requestAnimationFrame(count);
        watch.disconnect();
        resolve({ frames, written });
    };
    requestAnimationFrame(count);
})"""


def test_two_hundred_rows_stream_together(fake: Service, open_page: Opener) -> None:
    page = open_page(fake, "batch")
    page.fill("#batch-template", "Row {line} says something. ")
    page.fill("#batch-lines", "\n".join(f"number {index}" for index in range(ROWS)))
    page.fill("#batch-most", "100000")
    page.click("#batch-start")
    expect(page.locator(".card")).to_have_count(ROWS)
    expect(page.locator('.card[data-state="running"]')).to_have_count(ROWS)
    seen = page.evaluate(COUNT_FRAMES, [FRAMES, ROWS])  # until the rows have grown too
    assert seen["written"] <= ROWS * (seen["frames"] + 1), "each is written once a frame, however much comes"
    expect(page.locator("#batch-rate")).not_to_have_text("–")
    page.click("#batch-stop")
    expect(page.locator('.card[data-state="stopped"]')).to_have_count(ROWS)


def test_a_table_is_imported_and_its_results_downloaded(demo: Service, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(demo, "batch")
    table = tmp_path / "greetings.csv"
    table.write_text('from,text,to\nEnglish,"Good morning",Chinese\nEnglish,"How are you?",Chinese\n', "utf-8")
    page.set_input_files("#batch-file", table)
    expect(page.get_by_text("{from} {text} {to}")).to_be_visible()
    page.fill("#batch-template", "{from}: {text}\n\n{to}:")
    page.select_option("#batch-route", "/big_batch/completions")
    page.locator("#panel-batch summary").click()
    page.fill("#batch-temperature", "0")
    page.fill("#batch-most", "40")
    page.click("#batch-start")
    expect(page.locator("#batch-figures")).to_have_attribute("data-done", "2")
    with page.expect_download() as waiting:
        page.click("#batch-jsonl")
    results = [json.loads(line) for line in Path(waiting.value.path()).read_text("utf-8").splitlines()]
    assert [(one["text"], one["output"].strip(), one["finish_reason"]) for one in results] == [
        ("Good morning", "早上好", "stop"),
        ("How are you?", "你好吗？", "stop"),
    ]
    page.locator(".card").first.click()
    expect(page.locator("dialog[open] .output")).to_contain_text("早上好")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)


def test_rows_are_shown_by_their_state(fake: Service, open_page: Opener) -> None:
    page = open_page(fake, "batch")
    page.fill("#batch-template", "{line}")
    page.fill("#batch-lines", "one\ntwo")
    page.fill("#batch-most", "3")
    page.click("#batch-start")
    expect(page.locator('.card[data-state="length"]')).to_have_count(2)
    for state, count in (("error", 0), ("length", 2), ("stop", 0), ("all", 2)):
        page.select_option("#batch-filter", state)
        expect(page.locator(".card:visible")).to_have_count(count)


def test_many_rows_of_a_real_model(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo, "batch")
    page.click("text=Translation")
    lines = [f"{who} {what}." for who in WHO for what in WHAT]
    page.fill("#batch-lines", "\n".join(lines))
    page.click("#batch-start")
    expect(page.locator("#batch-figures")).to_have_attribute("data-done", str(len(lines)))
    assert page.locator('.card[data-state="stop"]').count() > len(lines) * 0.9
    expect(page.locator("#batch-rate")).to_have_text(re.compile(r"^[\d,]+$"))
    page.screenshot(path=shots / "batch.png")
