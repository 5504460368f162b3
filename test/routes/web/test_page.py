"""The whole page: files and policy, password, language, first paint, a lost engine and a lost service."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Page, expect

from rwkv_batch.translation.documents.formats import ENDINGS
from test.conftest import IS_LONG
from test.routes.web.conftest import DESK, PASSWORD, PHONE, Opener, at_width
from test.serving import ROOT, Service, wait_for

pytestmark = pytest.mark.browser
WEB = ROOT / "routes" / "web"
MOST_BYTES = 320_000
"""Of all files, as they are sent."""
MAX_BUSY_MS = 500
"""Of the page's thread until the first paint, slowed down four times."""


def start_locked(folder: Path, state_db: Path | None = None) -> Service:
    running = Service(folder, program="test/fake_app.py", state_db=state_db, PYTHONPATH=".", RWKV_PASSWORD=PASSWORD)
    running.headers = {"Authorization": f"Bearer {quote(PASSWORD)}"}
    return running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with start_locked(tmp_path_factory.mktemp("locked")) as running:
        yield running


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


def test_the_page_lists_the_endings_that_the_service_translates() -> None:
    code = (WEB / "translate" / "files.js").read_text("utf-8")
    lists = re.findall(r'^const (?:ENDINGS|ALIASES) = \(?\s*"(.*?)"', code, re.MULTILINE)
    assert sorted(" ".join(lists).split()) == sorted(ENDINGS)


def read_keys(path: Path) -> set[str]:
    return set(re.findall(r'^  "?([^":]+)"?:', path.read_text("utf-8"), re.MULTILINE))


def sign_in(page: Page) -> None:
    page.fill("#password", PASSWORD)
    page.keyboard.press("Enter")
    expect(page.locator("dialog[open]")).to_have_count(0)


@at_width(PHONE)
def test_a_password_is_requested_once_per_tab(locked: Service, open_page: Opener, width: int) -> None:
    page = open_page(locked, width=width, locale="zh-CN")
    dialog = page.locator("dialog[open]")
    expect(dialog).to_be_visible()
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    page.fill("#password", "wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("密码或 API 密钥不正确")
    expect(page.get_by_text("退出登录")).to_have_count(0)
    sign_in(page)
    expect(page.get_by_role("button", name="退出登录")).to_be_visible()
    expect(page.get_by_text("新对话").first).to_be_attached()
    page.get_by_role("button", name="English").click()
    expect(page.get_by_text("New chat").first).to_be_attached()
    page.reload()
    expect(page.locator("#tiers")).to_be_attached()
    expect(page.get_by_text("New chat").first).to_be_attached()
    expect(dialog).to_have_count(0)
    assert PASSWORD not in page.url
    assert "sesame" not in locked.log.read_text()
    page.get_by_role("button", name="Sign out").click()
    expect(dialog).to_be_visible()


def test_the_first_paint_is_recorded(locked: Service, open_page: Opener, shots: Path) -> None:
    """Record the time to the first paint, with the CPU slowed down four times.

    `busy_ms` is the time that the page's thread worked until then. Other programs change it less than the wall time.
    """
    page = open_page(locked)
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": 4})
    browser = page.context.browser
    assert browser is not None
    browser.start_tracing(page=page, categories=["blink.user_timing", "loading", "toplevel"])
    page.reload()
    expect(page.locator("#password")).to_be_visible()
    events = json.loads(browser.stop_tracing())["traceEvents"]
    paint = next(one for one in reversed(events) if one["name"] == "firstContentfulPaint")
    begin = max(one["ts"] for one in events if one["name"] == "navigationStart" and one["pid"] == paint["pid"])
    busy = sum(
        one.get("tdur", 0)
        for one in events
        if one["name"].endswith("RunTask")
        and (one["pid"], one["tid"]) == (paint["pid"], paint["tid"])
        and begin <= one["ts"] <= paint["ts"]
    )
    figures = {"first_paint_ms": (paint["ts"] - begin) / 1000, "busy_ms": busy / 1000, "slowed_down": 4}
    (shots / "first-paint.json").write_text(json.dumps(figures), "utf-8")
    assert 0 < figures["busy_ms"] < MAX_BUSY_MS


def say_long(page: Page, text: str) -> None:
    """Send a message whose answer does not end by itself."""
    page.get_by_text("Parameters").first.click()
    page.fill("#chat-max_tokens", "1000000")
    page.fill("#question", text)
    page.keyboard.press("Enter")


def test_answers_continue_after_the_service_was_started_again(
    locked: Service, open_page: Opener, shots: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """First the engine ends, then the service. This test is the last one of `locked`."""
    pages = [open_page(locked, width=width) for width in ((DESK, PHONE) if IS_LONG else (DESK,))]
    for page in pages:
        sign_in(page)
        expect(page.locator("#model")).not_to_be_empty()  # it knows the engine
    wide = pages[0]
    wide.fill("#question", "die")
    wide.keyboard.press("Enter")
    # The service's message, with the remedy.
    expect(wide.locator(".turn [role=alert]")).to_contain_text("engine")
    for page in pages:
        expect(page.locator("#notice")).to_contain_text("The engine has restarted")
    wide.screenshot(path=shots / "restarted.png")
    wide.click("text=New chat")
    for page in pages:
        say_long(page, "hello ")
        expect(page.locator(".turn .markdown")).to_contain_text("hello")
        page.fill("#question", "not yet sent")
    locked.process.send_signal(signal.SIGKILL)
    locked.process.wait(60)
    expect(wide.locator("#notice")).to_contain_text("does not respond")
    before = [len(page.locator(".turn .markdown").inner_text()) for page in pages]
    monkeypatch.setattr("test.serving.free_port", lambda: locked.port)
    again = start_locked(tmp_path, state_db=locked.state_db)
    try:
        for page, length in zip(pages, before, strict=True):
            expect(page.locator(".turn .resumed")).to_be_visible()
            wait_for(lambda: len(page.locator(".turn .markdown").inner_text()) > length, 30, "the answer continues")  # noqa: B023 - called at once
            assert page.locator("#question").input_value() == "not yet sent"
            page.click("#stop")
            expect(page.locator("#send")).to_be_visible()
    finally:
        again.close()
