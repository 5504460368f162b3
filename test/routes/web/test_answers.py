"""Answers as they come: stop, reasoning, maths, keys, text files, hostile text, long streams, many rows."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from test.conftest import IS_LONG
from test.routes.web.conftest import DESK, PHONE, Opener, at_width
from test.routes.web.test_chat import say
from test.serving import Service, wait_for

pytestmark = pytest.mark.browser
ROWS = 1000
FRAMES = 30


@at_width(DESK)
def test_keys_a_dropped_file_and_a_stopped_answer(fake: Service, open_page: Opener, tmp_path: Path, width: int) -> None:
    page = open_page(fake, width=width)
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
    expect(page.locator(".turn .markdown")).to_contain_text("two")
    page.keyboard.press("Escape")
    expect(page.locator(".turn")).to_contain_text("Stopped")
    length = len(page.locator(".turn .markdown").inner_text())
    wait_for(lambda: fake.status()["running_rows"] == 0, 20, "the row is cancelled")
    assert len(page.locator(".turn .markdown").inner_text()) == length
    page.locator(".transcript").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("stop the answer")
    page.keyboard.press("Escape")
    page.get_by_text("Parameters").first.click()
    page.get_by_role("button", name="Precise").first.click()
    expect(page.locator("#chat-temperature")).to_have_value("0.3")
    page.get_by_role("button", name="Balanced").first.click()
    expect(page.locator("#chat-temperature")).to_have_value("")


HOSTILE = (
    "**bold** <script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'><svg onload='window.hurt = 3'></svg>"
    "<iframe srcdoc='<script>parent.hurt = 4</script>'></iframe> [a](javascript:window.hurt=5) "
    "<a href='javascript:window.hurt=6'>b</a> ![c](https://example.org/seen.png) <form action='//example.org'>"
    "<style>body { display: none }</style><b onclick='window.hurt = 7' id='app'>c</b> "
    "$\\text{<img src=x onerror='window.hurt = 8'>}$ "
)


def test_reasoning_is_collapsed_and_script_does_not_run(fake: Service, open_page: Opener) -> None:
    page = open_page(fake)
    page.select_option("#think", "on")
    say(page, f">Let me see.</think>{HOSTILE}")
    answer = page.locator(".turn .markdown")
    expect(answer.locator("math").first).to_be_visible()
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    expect(answer.locator("strong").first).to_have_text("bold")
    for link in answer.locator("a").all():
        page.evaluate("link => link.click()", link.element_handle())
    assert page.evaluate("window.hurt") is None
    assert answer.locator("script, img, svg, iframe, form, style, [onclick], [id]").count() == 0
    assert answer.locator("a[href^='javascript']").count() == 0
    expect(page.locator("body")).to_be_visible()
    thought = page.locator(".turn details.thought")
    expect(thought.locator("summary")).to_have_text("Reasoning")
    expect(thought.locator(".text")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator(".text")).to_have_text("Let me see.")


SHOWN = {
    "costs $5 or $10": "<p>costs $5 or $10</p>",
    "`$x$`": "<p><code>$x$</code></p>",
    "so $x_1$": "<p>so <math><msub><mi>x</mi><mn>1</mn></msub></math></p>",
    r"\(\frac12\)": "<p><math><mfrac><mn>1</mn><mn>2</mn></mfrac></math></p>",
    "$$\na\n- b\n$$": '<math display="block"><mrow><mi>a</mi><mo>−</mo><mi>b</mi></mrow></math>',
    r"\[\sqrt[3]{x}\]": '<math display="block"><mroot><mi>x</mi><mn>3</mn></mroot></math>',
    r"$\sum_i^n$": "<p><math><munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover></math></p>",
    r"$\left(x\right.$": '<p><math><mrow><mo fence="true" stretchy="true">(</mo><mi>x</mi><mo fence="true" '
    'stretchy="true"></mo></mrow></math></p>',
    r"$f'(x)$": '<p><math><mrow><msup><mi>f</mi><mo>′</mo></msup><mo stretchy="false">(</mo><mi>x</mi>'
    '<mo stretchy="false">)</mo></mrow></math></p>',
    r"$\text{if }x<3.5$": "<p><math><mrow><mtext>if&nbsp;</mtext><mi>x</mi><mo>&lt;</mo><mn>3.5</mn></mrow></math></p>",
    r"$\mathbb{R}\hat y$": '<p><math><mrow><mi>ℝ</mi><mover accent="true"><mi>y</mi><mo stretchy="false">^</mo></mover>'
    "</mrow></math></p>",
    r"$\begin{bmatrix}1&2\\3&4\end{bmatrix}$": '<p><math><mrow><mo fence="true" stretchy="true">[</mo>'
    '<mtable columnalign="center"><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd>'
    '<mtd><mn>4</mn></mtd></mtr></mtable><mo fence="true" stretchy="true">]</mo></mrow></math></p>',
    r"$\unknown{x}$": r"<p><code>\unknown{x}</code></p>",
    f"${'{' * 2000}$": f"<p><code>{'{' * 2000}</code></p>",
    "3. three": '<ol start="3">\n<li>three</li>\n</ol>',
}
"""Markdown with LaTeX -> HTML. Attributes are sorted."""
READ = """texts => import('/web/markdown.js').then(({ markdown }) => texts.map(text => {
    const place = document.createElement('div');
    place.innerHTML = markdown(text);
    for (const one of place.querySelectorAll('*')) {
        const given = [...one.attributes].map(({ name, value }) => [name, value]).sort();
        for (const [name] of given) one.removeAttribute(name);
        for (const [name, value] of given) one.setAttribute(name, value);
    }
    return place.innerHTML.trim();
}))"""


@at_width(PHONE)
def test_maths_code_and_tables_are_shown(fake: Service, open_page: Opener, shots: Path, width: int) -> None:
    page = open_page(fake, width=width)
    given = "$$\\sum_{k=1}^{n} k = \\frac{n(n+1)}{2}$$\n\n| a | b |\n|---|---|\n| $x^2$ | `code` |\n\n```\n1\n```\n\n"
    say(page, given)
    answer = page.locator(".turn .markdown")
    expect(answer.locator("table math msup").first).to_be_visible()
    page.click("#stop")
    expect(answer.locator("math mfrac").first).to_be_visible()
    expect(answer.get_by_role("button", name="Copy").first).to_be_visible()
    box = answer.locator("math").first.bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= width, "a formula fits, or scrolls"
    page.screenshot(path=shots / f"{'' if width > 900 else 'phone-'}maths.png")
    assert dict(zip(SHOWN, page.evaluate(READ, list(SHOWN)), strict=True)) == SHOWN


def heap_bytes(page: Page) -> int:
    """Return the used JavaScript heap after a collection."""
    size: int = page.evaluate("() => { gc(); return performance.memory.usedJSHeapSize; }")
    return size


def dropped_characters(page: Page) -> int:
    """Return the number of characters that the page dropped from an answer."""
    reported = page.get_by_text("characters are no longer shown").inner_text()
    return int(re.sub(r"\D", "", reported))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_tab_does_not_grow_with_long_streams(fake: Service, open_page: Opener) -> None:
    """Megabytes in one answer. With RWKV_LONG_TESTS=1, for ten minutes."""
    seconds = 600 if os.environ.get("RWKV_LONG_TESTS") else 0
    page = open_page(fake)
    page.fill("#question", "flood")
    page.get_by_text("Parameters").first.click()
    page.fill("#chat-max_tokens", "1000000")
    page.locator("#question").press("Enter")
    expect(page.get_by_text("characters are no longer shown")).to_be_visible()
    first = heap_bytes(page)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(1)
    wait_for(lambda: dropped_characters(page) > 1_000_000, 30, "a megabyte has come")
    last = heap_bytes(page)
    page.click("#stop")
    assert last < first + 20_000_000


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


@pytest.mark.long
def test_a_thousand_rows_stream_together(fake: Service, open_page: Opener) -> None:
    page = open_page(fake, "batch")
    page.fill("#batch-template", "Row {line} says something. ")
    page.fill("#batch-lines", "\n".join(f"number {index}" for index in range(ROWS)))
    page.fill("#batch-most", "100000")
    page.click("#batch-start")
    expect(page.locator(".wall")).to_have_attribute("data-rows", str(ROWS))
    expect(page.locator('.card[data-state="running"]').first).to_be_visible()
    for width in (DESK, PHONE) if IS_LONG else (DESK,):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.querySelector('#panel-batch').scrollWidth") <= width
        cards = page.locator(".card").count()
        assert cards < 100, "only the cards in view exist"
        seen = page.evaluate(COUNT_FRAMES, [FRAMES, cards])  # until the rows have grown too
        assert seen["written"] <= cards * (seen["frames"] + 1), "each is written once a frame, however much comes"
    expect(page.locator("#batch-rate")).not_to_have_text("–")
    page.click("#batch-stop")
    expect(page.locator("#batch-figures")).to_have_attribute("data-ended", "true")
    page.select_option("#batch-filter", "stopped")
    expect(page.locator(".wall")).to_have_attribute("data-rows", str(ROWS))
    page.select_option("#batch-filter", "error")
    expect(page.locator(".card")).to_have_count(0)


@at_width(PHONE)
def test_rows_are_shown_by_their_state(fake: Service, open_page: Opener, width: int) -> None:
    page = open_page(fake, "batch", width=width)
    page.fill("#batch-template", "{line}")
    page.fill("#batch-lines", "one\nmore of one\n\ntwo")
    expect(page.locator("#batch-start")).to_have_text("Run 3 rows")
    page.select_option("#batch-unit", "block")
    expect(page.locator("#batch-start")).to_have_text("Run 2 rows")
    page.fill("#batch-most", "3")
    page.click("#batch-start")
    expect(page.locator('.card[data-state="length"]')).to_have_count(2)
    for state, count in (("error", 0), ("length", 2), ("stop", 0), ("all", 2)):
        page.select_option("#batch-filter", state)
        expect(page.locator(".card:visible")).to_have_count(count)


def test_a_background_run_is_cancelled(fake: Service, open_page: Opener) -> None:
    page = open_page(fake, "batch")
    page.fill("#batch-template", "{line}")
    page.fill("#batch-lines", "\n".join(f"number {index}" for index in range(20)))
    page.fill("#batch-most", "100000")
    page.select_option("#batch-way", "background")
    page.click("#batch-start")
    page.locator("#batch-runs summary").click()
    page.locator("#batch-runs").get_by_role("button", name="Cancel").click()
    expect(page.locator("#batch-figures")).to_have_attribute("data-ended", "true")
    expect(page.locator("#batch-runs li").first).to_contain_text("stopped")


def test_closed_pages_leave_nothing_running(fake: Service) -> None:
    wait_for(lambda: fake.status()["running_rows"] == 0, 20, "no row runs")
