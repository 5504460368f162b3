"""The translation panel: texts, files of each kind, settings for immersive-translate."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from test.routes.web.conftest import WAIT_MS, Opener
from test.serving import Service
from test.translation.documents import epub

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)


def ended(page: Page) -> str:
    """Return the complete translation."""
    expect(page.locator("#translate-progress")).to_have_attribute("data-ended", "true")
    return page.locator("#translate-target").input_value()


def test_paragraphs_are_kept(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo, "translate")
    page.fill("#translate-source", "Good morning.\n\n\nHow are you?\n\nHello world!")
    page.click("#translate-start")
    assert ended(page) == "早上好。\n\n\n你好吗？\n\n你好，世界！"
    expect(page.locator("#translate-warnings")).to_have_count(0)
    expect(page.locator("#detected")).to_have_text("English")
    page.get_by_text("Settings for immersive-translate").click()
    assert page.locator("#plugin-url").input_value() == f"{demo.url}/translate/v1/batch-translate"
    page.click("#plugin-check")
    expect(page.locator("#plugin-result")).to_contain_text("Success")
    page.screenshot(path=shots / "translate.png")
    page.fill("#translate-source", "Good morning.\nHow are you?\n  Hello {name}\n")
    page.click("#translate-start")
    warning = "3: the translation was split around 1 marker that the model did not keep"
    expect(page.locator("#translate-warnings li")).to_have_text(warning)
    translation = page.locator("#translate-target").input_value()
    assert translation.startswith("早上好。\n你好吗？\n  ") and translation.endswith("{name}\n")


FILES_KEY = {
    "notes.md": (
        "# Good morning\n\n- How are you?\n\n```\nHow are you?\n```\n",
        "# 早上好\n\n- 你好吗？\n\n```\nHow are you?\n```\n",
    ),
    "film.srt": (
        "1\n00:00:01,000 --> 00:00:02,000\nGood morning\n\n2\n00:00:03,000 --> 00:00:04,000\nHow are you?\n",
        "1\n00:00:01,000 --> 00:00:02,000\n早上好\n\n2\n00:00:03,000 --> 00:00:04,000\n你好吗？\n",
    ),
    "film.vtt": (
        "WEBVTT\n\nNOTE Good morning\n\n00:01.000 --> 00:02.000 align:start\nGood morning\n",
        "WEBVTT\n\nNOTE Good morning\n\n00:01.000 --> 00:02.000 align:start\n早上好\n",
    ),
    "texts.json": (
        json.dumps({"greeting": "Good morning", "n": 3, "more": [{"ask": "How are you?"}]}),
        json.dumps({"greeting": "早上好", "n": 3, "more": [{"ask": "你好吗？"}]}, ensure_ascii=False),
    ),
    "page.xliff": (
        '<?xml version="1.0"?>\n<xliff version="1.2"><file source-language="en"><body><trans-unit id="a">'
        "<source>Good morning</source></trans-unit></body></file></xliff>",
        "<?xml version='1.0' encoding='UTF-8'?>\n"
        '<xliff version="1.2"><file source-language="en" target-language="zh-CN"><body><trans-unit id="a">'
        '<source>Good morning</source><target state="needs-review-translation">早上好</target></trans-unit></body>'
        "</file></xliff>",
    ),
}


def test_files_are_translated_and_keep_their_format(demo: Service, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(demo, "translate")
    for name, (content, translation) in FILES_KEY.items():
        file = tmp_path / name
        file.write_text(content, "utf-8")
        page.set_input_files("#translate-file", file)
        expect(page.locator("#translate-source")).to_have_value(content)
        expect(page.locator("#translate-target")).to_have_value(translation)
        assert ended(page) == translation
        with page.expect_download() as waiting:
            page.click("#translate-download")
        assert waiting.value.suggested_filename == f"{file.stem}.zh-CN{file.suffix}"
        assert Path(waiting.value.path()).read_text("utf-8") == translation
    book = tmp_path / "book.epub"
    chapter = '<html xmlns="http://www.w3.org/1999/xhtml"><body><h1>Good morning</h1><p>How are you?</p></body></html>'
    book.write_bytes(epub(chapter, **{"style.css": "p {}" * 100}))
    page.set_input_files("#translate-file", book)
    expect(page.locator("#translate-target")).to_have_value("book.zh-CN.epub")
    ended(page)
    with page.expect_download() as waiting:
        page.click("#translate-download")
    assert waiting.value.suggested_filename == "book.zh-CN.epub"
    with zipfile.ZipFile(waiting.value.path()) as translated:
        assert translated.testzip() is None and translated.namelist()[0] == "mimetype"
        assert "<h1>早上好</h1><p>你好吗？</p>" in translated.read("OEBPS/text 1.xhtml").decode()
        assert translated.read("style.css") == b"p {}" * 100
    broken = tmp_path / "broken.json"
    broken.write_text("{", "utf-8")
    page.set_input_files("#translate-file", broken)
    expect(page.locator("#panel-translate [role=alert]")).to_contain_text("broken.json")
