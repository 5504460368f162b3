"""The translation panel: texts, files of each kind, settings for immersive-translate."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from test.routes.web.conftest import DESK, PHONE, Opener, at_width
from test.routes.web.test_accessibility import answer_at_once
from test.serving import Service, wait_for
from test.translation.documents import epub

pytestmark = pytest.mark.browser


def translated(page: Page) -> str:
    expect(page.locator("#translate-progress")).to_have_attribute("data-ended", "true")
    with page.expect_download() as waiting:
        page.click("#translate-download")
    return Path(waiting.value.path()).read_bytes().decode()


def translate(page: Page, text: str) -> str:
    if page.locator("#translate-edit").count():
        page.click("#translate-edit")
    page.fill("#translate-source", text)
    page.click("#translate-start")
    return translated(page)


def test_paragraphs_are_kept(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo, "translate")
    expect(page.locator("#translate-start")).to_have_text("Translate into 简体中文")
    expect(page.locator("#panel-translate")).to_contain_text("This is the small demo model")
    text = translate(page, "Good morning.\n\n\nHow are you?\n\nHello world!")
    assert text == "早上好。\n\n\n你好吗？\n\n你好，世界！"
    expect(page.locator("#translate-warnings")).to_have_count(0)
    expect(page.locator("#detected")).to_have_text("English")
    page.get_by_text("Settings for immersive-translate").click()
    assert page.locator("#plugin-url").input_value() == f"{demo.url}/translate/v1/batch-translate"
    page.click("#plugin-check")
    expect(page.locator("#plugin-result")).to_contain_text("Success")
    translation = translate(page, "Good morning.\nHow are you?\n  Total: %d\n")
    page.locator("#translate-warnings summary").click()
    warning = "3: the translation was split around 1 marker that the model did not keep"
    expect(page.locator("#translate-warnings li")).to_have_text(warning)
    assert translation.startswith("早上好。\n你好吗？\n  ") and translation.endswith("%d\n")
    page.locator("#translate-warnings li button").click()
    expect(page.locator(".segment.current .warning")).to_be_visible()
    page.select_option("#source-language", "en")
    page.reload()
    expect(page.locator("#translate-source")).to_have_value("Good morning.\nHow are you?\n  Total: %d\n")
    expect(page.locator("#source-language")).to_have_value("en")


@at_width(PHONE)
def test_a_segment_is_edited_by_keyboard_and_kept(demo: Service, open_page: Opener, shots: Path, width: int) -> None:
    page = open_page(demo, "translate", width=width)
    page.locator("#glossary summary").click()
    page.fill("#glossary-term", "tea")
    page.fill("#glossary-translation", "茶")
    page.keyboard.press("Enter")
    page.locator("#stored-glossaries summary").click()
    page.fill("#store-glossary", "house terms")
    page.keyboard.press("Enter")
    expect(page.locator("#stored-glossaries [role=alert]")).to_contain_text("Language of the terms")
    page.select_option("#source-language", "en")
    page.locator("#store-glossary").press("Enter")
    expect(page.locator("#stored-glossary option:checked")).to_have_text("house terms (en → zh: 1)")
    place = f"number {width}"
    page.fill("#translate-source", f"I like tea.\nGood morning.\nI live in house {place}.")
    with page.expect_request("**/batch-translate") as sent:
        page.locator("#translate-source").press("Control+Enter")
    assert (sent.value.post_data_json or {})["glossary_id"].startswith("glossary-")
    expect(page.locator("#translate-progress")).to_have_attribute("data-ended", "true")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#stored-glossaries").get_by_role("button", name="Delete").click()
    expect(page.locator("#stored-glossary option")).to_have_count(1)
    expect(page.locator(".source .term")).to_have_text("tea")
    expect(page.locator(".target .term")).to_have_text("茶")
    page.locator("#segments").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".segment.current .source")).to_have_text("I like tea.")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    editor = page.locator(".segment-editor textarea")
    expect(editor).to_be_focused()
    expect(page.locator(".alternatives")).not_to_contain_text("Loading")
    page.screenshot(path=shots / ("translate.png" if width > 900 else "phone-translate-segments.png"))
    editor.fill(f"早安（{width}）。")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".segment.current .source")).to_have_text(f"I live in house {place}.")
    expect(page.locator("#segments")).to_be_focused()
    assert f"早安（{width}）。" in translated(page)
    assert f"早安（{width}）。" in translate(page, "Good morning."), "the memory has it"
    expect(page.locator(".segment small.origin")).to_have_text("from the memory")
    page.click("#swap")
    expect(page.locator("#translate-source")).to_have_value(f"早安（{width}）。")
    expect(page.locator("#source-language")).to_have_value("zh-CN")
    expect(page.locator("#target-language")).to_have_value("en")
    page.locator("#history summary").click()
    page.locator("#history li button").nth(1).click()
    expect(page.locator(".segment .source").first).to_have_text("I like tea.")
    assert demo.request("DELETE", "/translate/v1/memory").status_code == 200


@pytest.mark.long
def test_a_hundred_thousand_characters_scroll(demo: Service, open_page: Opener) -> None:
    page = open_page(demo, "translate")
    page.route("**/batch-translate", answer_at_once)
    lines = [f"Line {number} has some more words in it." for number in range(2_800)]
    assert len("\n".join(lines)) > 100_000
    page.evaluate(
        "window.pauses = []; new PerformanceObserver((list) => list.getEntries().forEach((one) =>"
        " window.pauses.push(one.duration))).observe({ entryTypes: ['longtask'] })"
    )
    page.locator("#translate-source").evaluate(
        "(place, text) => { place.value = text; place.dispatchEvent(new Event('input', { bubbles: true })); }",
        "\n".join(lines),
    )  # faster than key by key
    page.click("#translate-start")
    text = translated(page)
    assert text.splitlines() == [f"<{line}>" for line in lines]
    assert page.locator("[data-row]").count() < 100, "only the rows in view exist"
    page.locator("#segments").evaluate("(place) => place.scrollTo(0, place.scrollHeight)")
    expect(page.get_by_text("<Line 2799 has some more words in it.>")).to_be_visible()
    page.locator("#segments").focus()
    page.keyboard.press("PageDown")
    expect(page.locator(".segment.current .source")).to_have_text("Line 9 has some more words in it.")
    print("longest pause in ms:", max(page.evaluate("window.pauses"), default=0))


FILES = {
    "notes.md": (
        "# Good morning\n\n- How are you?\n\n```\nHow are you?\n```\n",
        "# 早上好\n\n- 你好吗？\n\n```\nHow are you?\n```\n",
    ),
    "paper.tex": (
        "\\section{Good morning}\n\nHow are you? % a comment\n",
        "\\section{早上好}\n\n你好吗？ % a comment\n",
    ),
    "film.srt": (
        "1\n00:00:01,000 --> 00:00:02,000\nGood morning\n\n2\n00:00:03,000 --> 00:00:04,000\nHow are you?\n",
        "1\n00:00:01,000 --> 00:00:02,000\n早上好\n\n2\n00:00:03,000 --> 00:00:04,000\n你好吗？\n",
    ),
}


def drop_file(page: Page, place: str, name: str) -> None:
    """Drop a file on an element. The browser must not leave the page to show it."""
    script = """(element, name) => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["%PDF-1.7"], name));
      const about = { dataTransfer, bubbles: true, cancelable: true };
      const drop = (type) => element.dispatchEvent(new DragEvent(type, about));
      return drop("dragover") || drop("drop");
    }"""
    assert not page.locator(place).evaluate(script, name), "the page takes the file"


@at_width(DESK)
def test_files_are_translated_and_keep_their_format(
    demo: Service, open_page: Opener, tmp_path: Path, width: int
) -> None:
    page = open_page(demo, "translate", width=width)
    page.locator("#glossary summary").click()
    drop_file(page, "#glossary", "paper.pdf")
    expect(page.locator("#files [role=alert]")).to_contain_text("paper.pdf is of no known type. Convert it to")
    expect(page.locator("#translate-start")).to_be_disabled()  # nothing waits
    page.locator("#files").get_by_role("button", name="Remove").click()
    given = FILES if width > 900 else {"notes.md": FILES["notes.md"]}
    chips = page.locator("#files .chip")
    for name, (content, _) in given.items():
        (tmp_path / name).write_text(content, "utf-8")
    page.set_input_files("#translate-file", [tmp_path / name for name in given])
    noun = "file" if len(given) == 1 else "files"
    expect(page.locator("#translate-start")).to_have_text(f"Translate {len(given)} {noun} into 简体中文")
    page.click("#translate-start")
    for name, (_, translation) in given.items():
        file = tmp_path / name
        with page.expect_download() as waiting:
            chips.filter(has_text=name).get_by_role("button", name="Download").click()
        assert waiting.value.suggested_filename == f"{file.stem}.zh-CN{file.suffix}"
        assert Path(waiting.value.path()).read_text("utf-8") == translation
    book, broken = tmp_path / "book.epub", tmp_path / "broken.json"
    chapter = '<html xmlns="http://www.w3.org/1999/xhtml"><body><h1>Good morning</h1><p>How are you?</p></body></html>'
    book.write_bytes(epub(chapter, **{"style.css": "p {}" * 100}))
    broken.write_text("{", "utf-8")
    doubt = {"text": "How are you?", "translation": "你好吗？", "warning": "the translation lacks a number"}

    def add_doubt(route: Route) -> None:
        if route.request.method != "GET":
            return route.continue_()
        found = route.fetch()
        return route.fulfill(response=found, json=found.json() | {"doubtful": [doubt]})

    page.route(re.compile(r"/documents/doc_\w+$"), add_doubt)
    page.set_input_files("#translate-file", [book, broken])
    leaves = "dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    # the browser asks, because the files are not sent; `wait_for_function` needs eval, which the page's policy forbids
    wait_for(lambda: not page.evaluate(leaves), 10, "the browser asks")
    page.click("#translate-start")
    book_button = chips.filter(has_text="book.epub").get_by_role("button", name="Download")
    expect(book_button).to_be_visible()
    doubtful = chips.filter(has_text="book.epub").locator("li")
    expect(doubtful).to_have_text("How are you? → 你好吗？ the translation lacks a number")
    with page.expect_download() as waiting:
        book_button.click()
    assert waiting.value.suggested_filename == "book.zh-CN.epub"
    with zipfile.ZipFile(waiting.value.path()) as translated_book:
        assert translated_book.testzip() is None and translated_book.namelist()[0] == "mimetype"
        assert "<h1>早上好</h1><p>你好吗？</p>" in translated_book.read("OEBPS/text 1.xhtml").decode()
        assert translated_book.read("style.css") == b"p {}" * 100
    expect(chips.filter(has_text="broken.json").get_by_role("alert")).to_contain_text("broken.json")
    assert page.evaluate(leaves)
    chips.filter(has_text="broken.json").get_by_role("button", name="Remove").click()
    expect(chips).to_have_count(len(given) + 1)


def test_files_use_terms_and_memory_and_survive_a_reload(demo: Service, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(demo, "translate")
    page.locator("#glossary summary").click()
    page.fill("#glossary-term", "bread")
    page.fill("#glossary-translation", "奇怪的词")
    page.keyboard.press("Enter")
    pairs = [{"source": "Good morning, neighbours", "target": "大家早"}]
    kept = {"source_lang": "en", "target_lang": "zh-CN", "pairs": pairs}
    assert demo.request("POST", "/translate/v1/memory", json=kept).status_code == 200
    page.select_option("#source-language", "en")
    file = tmp_path / "two.txt"
    file.write_text("Good morning, neighbours\nI like bread.\n", "utf-8")
    page.set_input_files("#translate-file", [file])
    page.click("#translate-start")
    chip = page.locator("#files .chip")
    expect(chip.get_by_role("button", name="Download")).to_be_visible()
    page.reload()
    expect(chip).to_contain_text("two.txt")
    with page.expect_download() as waiting:
        chip.get_by_role("button", name="Download").click()
    assert Path(waiting.value.path()).read_text("utf-8") == "大家早\n我喜欢面包。\n", "the first is from the memory"
    expect(chip).to_contain_text("Warnings: 1")  # the model does not know such a translation of "bread"
    chip.get_by_role("button", name="Remove").click()
    page.reload()
    expect(page.locator("#translate-start")).to_be_visible()
    expect(chip).to_have_count(0)
