"""The batch panel with the demo model, and runs in the background."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from test.routes.web.conftest import DESK, Opener, at_width
from test.serving import Service

pytestmark = pytest.mark.browser
WHO = ("I", "You", "We", "They", "The teacher", "My brother", "Her mother", "Our friends")
WHAT = (
    "like tea", "went to Beijing yesterday", "will read two books", "want to buy a red car", "can speak Chinese",
    "live in a big city", "saw three cats in the garden", "would like some coffee",
)  # fmt: skip


def test_a_table_is_imported_and_its_results_downloaded(demo: Service, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(demo, "batch")
    table = tmp_path / "greetings.csv"
    table.write_text('from,text,to\nEnglish,"Good morning",Chinese\nEnglish,"How are you?",Chinese\n', "utf-8")
    page.set_input_files("#batch-file", table)
    expect(page.get_by_text("{from} {text} {to}")).to_be_visible()
    page.fill("#batch-template", "User: Translate into {to}: {text}\n\nAssistant: <think>\n</think>")
    page.select_option("#batch-route", "/big_batch/completions")
    page.locator("#panel-batch summary").click()
    page.fill("#batch-temperature", "0")
    page.fill("#batch-most", "40")
    page.click("#batch-start")
    expect(page.locator("#batch-figures")).to_have_attribute("data-done", "2")
    with page.expect_download() as waiting:
        page.click("#batch-jsonl")
    results = [json.loads(line) for line in Path(waiting.value.path()).read_text("utf-8").splitlines()]
    assert [(one["text"], one["output"], one["finish_reason"]) for one in results] == [
        ("Good morning", "早上好", "stop"),
        ("How are you?", "你好吗？", "stop"),
    ]
    page.locator(".card").first.click()
    expect(page.locator("dialog[open] .output")).to_contain_text("早上好")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)


@at_width(DESK)
def test_a_background_run_is_found_again_after_a_reload(demo: Service, open_page: Opener, width: int) -> None:
    page = open_page(demo, "batch", width=width)
    lines = [f"Translate into Chinese: {text}" for text in ("Good morning", "How are you?", "Hello world")]
    page.fill("#batch-lines", "\n".join(lines))
    page.select_option("#batch-way", "background")
    page.click("#batch-start")
    expect(page.locator("#batch-figures")).to_be_visible()
    page.reload()
    expect(page.locator("#batch-figures")).to_have_attribute("data-ended", "true")
    expect(page.locator(".card")).to_have_count(3)
    page.select_option("#batch-sort", "longest")
    texts = page.locator(".card-body").all_inner_texts()
    assert texts == sorted(texts, key=len, reverse=True) and "早上好" in "".join(texts)
    with page.expect_download() as waiting:
        page.click("#batch-csv")
    table = Path(waiting.value.path()).read_text("utf-8").splitlines()
    assert table[0] == "line,output,finish_reason" and table[1].startswith(f"{lines[0]},早上好")
    page.locator("#batch-runs summary").click()
    expect(page.locator("#batch-runs li").first).to_contain_text("complete · 3 / 3")


def test_many_rows_of_a_real_model(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo, "batch")
    page.click("text=Translation")
    lines = [f"{who} {what}." for who in WHO for what in WHAT]
    page.fill("#batch-lines", "one")
    expect(page.locator("#batch-start")).to_have_text("Run 1 row")
    page.fill("#batch-lines", "\n".join(lines))
    expect(page.locator("#batch-start")).to_have_text(f"Run {len(lines)} rows")
    page.click("#batch-start")
    expect(page.locator("#batch-figures")).to_have_attribute("data-done", str(len(lines)))
    page.select_option("#batch-filter", "stop")
    assert int(page.locator(".wall").get_attribute("data-rows") or 0) > len(lines) * 0.9
    expect(page.locator("#batch-rate")).to_have_text(re.compile(r"^[\d,]+$"))
    page.screenshot(path=shots / "batch.png")
