"""The whole page: files and policy, password, language, a lost engine, hostile text."""

from __future__ import annotations

import gzip
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Page, expect

from test.routes.web.conftest import PASSWORD, WAIT_MS, Opener
from test.serving import ROOT, Service, wait_for

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
WEB = ROOT / "routes" / "web"
MOST_BYTES = 320_000
"""Of all files, as they are sent."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a password."""
    folder = tmp_path_factory.mktemp("locked")
    running = Service(folder, program="test/fake_app.py", PYTHONPATH=".", RWKV_PASSWORD=PASSWORD)
    running.headers = {"Authorization": f"Bearer {quote(PASSWORD)}"}
    try:
        yield running.wait_ready()
    finally:
        running.close()


def test_files_are_small_public_and_cached(locked: Service) -> None:
    locked_out = httpx.Client(base_url=locked.url, timeout=60, headers={"Accept-Encoding": "identity"})
    index = locked_out.get("/")
    assert index.status_code == 200
    assert index.headers["content-type"].startswith("text/html")
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    etag = index.headers["etag"]
    assert locked_out.get("/", headers={"If-None-Match": etag}).status_code == 304
    assert locked_out.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    for path in WEB.rglob("*.js"):
        answer = locked_out.get(f"/web/{path.relative_to(WEB).as_posix()}")
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"].startswith("text/javascript")
        assert "content-encoding" not in answer.headers
    sizes = []
    for path in (path for path in WEB.rglob("*") if path.is_file()):
        url = f"/web/{path.relative_to(WEB).as_posix()}"
        with locked_out.stream("GET", url, headers={"Accept-Encoding": "br, gzip;q=0.8"}) as answer:
            sent = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == "gzip" and "Accept-Encoding" in answer.headers["vary"]
        assert gzip.decompress(sent) == path.read_bytes() and answer.headers["etag"] != etag
        sizes.append(len(sent))
    assert sum(sizes) < MOST_BYTES
    assert "content-encoding" not in locked_out.get("/", headers={"Accept-Encoding": "gzip;q=0"}).headers
    for hidden in ("../app.py", "%2e%2e/app.py", "nothing.js", "chat"):
        assert locked_out.get(f"/web/{hidden}").status_code == 404


def test_texts_exist_in_every_language_and_are_used() -> None:
    english, *others = (read_keys(path) for path in sorted((WEB / "text").iterdir()))
    assert others and all(keys == english for keys in others)
    code = "".join(path.read_text("utf-8") for path in WEB.rglob("*.js") if path.parent.name not in ("text", "vendor"))
    prefixes = set(re.findall(r"t\(`([\w.]+)\.\$\{", code)) | {"theme", "reason", "panel", "language"}
    for key in english:
        assert f'"{key}"' in code or key.rpartition(".")[0] in prefixes, f"{key} is used nowhere"
    for key in re.findall(r'\bt\("([\w.]+)"', code):
        assert key in english, f"{key} has no text"


def read_keys(path: Path) -> set[str]:
    return set(re.findall(r'^  "?([^":]+)"?:', path.read_text("utf-8"), re.MULTILINE))


def test_a_password_is_requested_once_per_tab(locked: Service, open_page: Opener) -> None:
    page = open_page(locked)
    dialog = page.locator("dialog[open]")
    expect(dialog).to_be_visible()
    page.fill("#password", "wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("Unauthorized: invalid or missing password")
    page.fill("#password", PASSWORD)
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    page.reload()
    expect(page.locator("#tiers")).to_be_visible()
    expect(dialog).to_have_count(0)
    assert PASSWORD not in page.url
    assert "sesame" not in locked.log.read_text()
    other = open_page(locked)
    expect(other.locator("dialog[open]")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(dialog).to_be_visible()


def test_the_page_in_chinese(fake: Service, open_page: Opener) -> None:
    page = open_page(fake, locale="zh-CN")
    expect(page.get_by_role("button", name="新对话")).to_be_visible()
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    page.get_by_role("button", name="English").click()
    expect(page.get_by_role("button", name="New chat")).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="New chat")).to_be_visible()


def test_a_lost_engine_shows_a_notice_and_the_page_recovers(tmp_path: Path, open_page: Opener, shots: Path) -> None:
    service = Service(tmp_path, program="test/fake_app.py", PYTHONPATH=".")
    try:
        service.wait_ready()
        page = open_page(service)
        expect(page.locator("#model")).not_to_be_empty()  # it knows the engine
        page.fill("#question", "die")
        page.keyboard.press("Enter")
        # The service's message, with the remedy.
        expect(page.locator(".turn [role=alert]")).to_contain_text("engine")
        expect(page.locator("#notice")).to_contain_text(re.compile("not available|restarted"))
        expect(page.locator("#notice")).to_contain_text("The engine has restarted")
        page.screenshot(path=shots / "restarted.png")
        page.click("text=New chat")
        page.fill("#question", "hello")
        page.keyboard.press("Enter")
        expect(page.locator(".turn .markdown")).to_contain_text("hello")
        service.process.send_signal(signal.SIGKILL)
        service.process.wait(60)
        expect(page.locator("#notice")).to_contain_text("does not respond")
    finally:
        service.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_an_answer_continues_after_the_service_was_started_again(
    tmp_path: Path, open_page: Opener, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    service = Service(tmp_path, program="test/fake_app.py", PYTHONPATH=".")
    port = service.port
    try:
        service.wait_ready()
        page = open_page(service, viewport={"width": width, "height": 800})
        say_long(page, "hello ")
        expect(page.locator(".turn .markdown")).to_contain_text("hello")
        page.fill("#question", "not yet sent")
        service.process.send_signal(signal.SIGKILL)
        service.process.wait(60)
        before = len(page.locator(".turn .markdown").inner_text())
        monkeypatch.setattr("test.serving.free_port", lambda: port)
        service = Service(tmp_path, program="test/fake_app.py", state_db=service.state_db, PYTHONPATH=".")
        expect(page.locator(".turn .resumed")).to_be_visible()
        wait_for(lambda: len(page.locator(".turn .markdown").inner_text()) > before, 30, "the answer continues")
        assert page.locator("#question").input_value() == "not yet sent"
        page.click("#stop")
        expect(page.locator("#send")).to_be_visible()
    finally:
        service.close()


def say_long(page: Page, text: str) -> None:
    """Send a message whose answer does not end by itself."""
    page.get_by_text("Parameters").first.click()
    page.fill("#chat-max_tokens", "1000000")
    page.fill("#question", text)
    page.keyboard.press("Enter")


HOSTILE = (
    "**bold** <script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'><svg onload='window.hurt = 3'></svg>"
    "<iframe srcdoc='<script>parent.hurt = 4</script>'></iframe> [a](javascript:window.hurt=5) "
    "<a href='javascript:window.hurt=6'>b</a> ![c](https://example.org/seen.png) <form action='//example.org'>"
    "<style>body { display: none }</style><b onclick='window.hurt = 7' id='app'>c</b> "
)


def test_script_in_an_answer_does_not_run(fake: Service, open_page: Opener) -> None:
    page = open_page(fake)
    page.fill("#question", HOSTILE)
    page.keyboard.press("Enter")
    answer = page.locator(".turn .markdown")
    expect(answer.locator("strong").first).to_have_text("bold")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    for link in answer.locator("a").all():
        page.evaluate("link => link.click()", link.element_handle())
    assert page.evaluate("window.hurt") is None
    assert answer.locator("script, img, svg, iframe, form, style, [onclick], [id]").count() == 0
    assert answer.locator("a[href^='javascript']").count() == 0
    expect(page.locator("body")).to_be_visible()


def heap_bytes(page: Page) -> int:
    """Return the used JavaScript heap after a collection."""
    size: int = page.evaluate("() => { gc(); return performance.memory.usedJSHeapSize; }")
    return size


def dropped_characters(page: Page) -> int:
    """Return the number of characters that the page dropped from an answer."""
    reported = page.get_by_text("characters are no longer shown").inner_text()
    return int(re.sub(r"\D", "", reported))


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
    wait_for(lambda: dropped_characters(page) > 4_000_000, 30, "megabytes have come")
    last = heap_bytes(page)
    page.click("#stop")
    assert last < first + 20_000_000


def test_a_closed_page_leaves_nothing_running(fake: Service) -> None:
    wait_for(lambda: fake.status()["running_rows"] == 0, 20, "no row runs")
