"""The dashboard shows the values of /metrics; the administrator's panel changes states and sessions."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from test.routes.web.conftest import PHONE, Opener, at_width
from test.serving import ROOT, Service, wait_for

pytestmark = pytest.mark.browser
SHOWN = (
    "rwkv_completion_tokens_total", "rwkv_prompt_tokens_total", "rwkv_cached_prompt_tokens_total", "rwkv_running_rows",
    "rwkv_waiting_rows", "rwkv_pool_sessions", "rwkv_pool_l1_sessions", "rwkv_pool_l2_sessions", "rwkv_pool_slots_free",
    "rwkv_pool_slots_total", "rwkv_pool_prefix_cache_hits", "rwkv_pool_prefix_cache_misses",
    "rwkv_pool_prefix_cache_saved_tokens",
)  # fmt: skip

KEY_METRICS = """rwkv_client_requests_total{client="team-a",outcome="taken"} 3.0
rwkv_client_requests_total{client="team-a",outcome="refused"} 1.0
rwkv_client_tokens_total{client="team-a",kind="prompt"} 1200.0
"""
AGES = """import('./web/dashboard/series.js')
.then(({series}) => series.get().times.map((time) => Date.now() / 1000 - time))"""
TWO_HOURS = """() => { const times = Array.from({ length: 720 }, (_, at) => Date.now() / 1000 - 10 * (720 - at));
return JSON.stringify({ times, values: { running: times } }); }"""

RECORD_LABELS = """globalThis.labels = []; const drawing = CanvasRenderingContext2D.prototype;
const write = drawing.fillText;
drawing.fillText = function (text, ...more) { labels.push(text); write.call(this, text, ...more); };"""


def reported(service: Service) -> dict[str, float]:
    """Return the samples of /metrics without labels, except the engine's name."""
    lines = re.findall(r'^(\w+)\{engine="engine-0"\} (\S+)$', service.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in lines if name in SHOWN}


def shown(page: Page, metric: str) -> float:
    return float(page.locator(f'[data-metric="{metric}"]').inner_text().replace(",", ""))


def equal(page: Page, service: Service) -> Callable[[], bool]:
    def compare() -> bool:
        metrics = reported(service)
        return all(shown(page, name) == metrics[name] for name in SHOWN)

    return compare


def test_the_dashboard_shows_the_metrics(demo: Service, open_page: Opener, shots: Path) -> None:
    page = open_page(demo, "dashboard")
    expect(page.locator('[data-metric="rwkv_pool_slots_total"]')).to_be_visible()
    prompts = [f"English: I have {number} cats.\n\nChinese:" for number in range(20)]
    for _ in range(2):
        body = {"contents": prompts, "max_tokens": 20, "stream": True}
        assert demo.post("/v1/chat/completions", body).status_code == 200
    demo.post(
        "/state/chat/completions", {"contents": ["User: Hello\n\nAssistant:"], "session_id": "dash", "max_tokens": 4}
    )
    wait_for(equal(page, demo), 30, "the page shows what /metrics says")
    assert shown(page, "rwkv_completion_tokens_total") > 100
    count = re.search(r"^rwkv_first_token_seconds_count\{.*\} (\S+)", demo.get("/metrics").text, re.MULTILINE)
    assert count
    assert float(count[1]) >= 40
    expect(page.locator('[data-series="first_p50"]')).not_to_have_text("–")
    expect(page.locator('[data-series="between_p95"]')).not_to_have_text("–")
    refused = page.locator('[data-metric="rwkv_http_requests_total:422"]')
    before = int(refused.inner_text().replace(",", "")) if refused.count() else 0
    demo.post("/v1/chat/completions", {"contents": []})
    expect(refused).to_have_text(str(before + 1))
    expect(page.get_by_text("Unavailable samplers")).to_be_visible()
    errors = page.locator("#errors tr", has_text="contents")
    expect(errors.first).to_contain_text("422")
    requests = page.locator("#requests tbody tr")
    page.fill("#requests-search", "/state/chat")
    expect(requests.filter(has_not_text="/state/chat")).to_have_count(0)
    expect(requests.first).to_contain_text("/state/chat")
    page.fill("#requests-search", "")
    page.select_option("#requests-kind", "errors")
    expect(requests.first).to_have_class("bad")
    page.select_option("#requests-kind", "all")
    assert page.locator('[data-metric="hit-rate"]').inner_text().endswith("%")
    expect(page.locator("#panel-dashboard .figures-box:not(:has(td))")).to_have_count(0)
    for rows in (1, 3, 6, 2, 5) if "RWKV_SCREENSHOTS" in os.environ else ():  # for the picture
        demo.post("/v1/chat/completions", {"contents": prompts * rows, "max_tokens": 40 * rows, "ignore_eos": True})
    page.locator("#panel-dashboard").evaluate("(place) => place.scrollTo(0, 0)")
    page.screenshot(path=shots / "dashboard.png")
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator('[data-series="first_p50"]')).to_be_visible()
    assert page.evaluate("document.querySelector('#panel-dashboard').scrollWidth") <= 390
    page.screenshot(path=shots / "phone-dashboard.png")
    points = len(page.evaluate(AGES))
    page.reload()
    expect(page.locator('[data-series="first_p50"]')).not_to_have_text("–")
    assert len(page.evaluate(AGES)) >= points, "the figures of this tab outlive a reload"
    page.add_init_script(f"sessionStorage['rwkv.series'] = ({TWO_HOURS})(); {RECORD_LABELS}")
    page.reload()
    assert 3_500 < page.evaluate(AGES)[0] <= 3_600, "an hour of them is shown"
    labels = wait_for(lambda: [one for one in page.evaluate("labels") if ":" in one], 30, "the plots have times")
    assert all(label.endswith(":00") for label in labels), "an hour has no labels of seconds"


@at_width(PHONE)
def test_a_state_is_uploaded_used_and_deleted(demo: Service, open_page: Opener, shots: Path, width: int) -> None:
    page = open_page(demo, "admin", width=width)
    states = page.locator("#admin-states")
    states.get_by_label("Name").fill("chinese")
    states.get_by_label("File").set_input_files(ROOT / "demo" / "tuned" / "chinese.pth")
    states.get_by_role("button", name="Add").click()
    expect(states.locator("li")).to_contain_text("chinese uploaded")
    expect(states.get_by_role("button", name="Add")).to_be_disabled()
    page.screenshot(path=shots / ("admin.png" if width > 900 else "phone-admin.png"))
    assert (
        demo.post("/v1/chat/completions", {"contents": ["x"], "state": "chinese", "max_tokens": 1}).status_code == 200
    )
    page.on("dialog", lambda dialog: dialog.accept())
    states.get_by_role("button", name="Delete chinese").click()
    expect(states.locator("li")).to_have_count(0)
    assert (
        demo.post("/v1/chat/completions", {"contents": ["x"], "state": "chinese", "max_tokens": 1}).status_code == 404
    )


def test_a_refusal_is_shown_and_sessions_are_searched(demo: Service, open_page: Opener) -> None:
    for name in range(7):
        body = {"contents": ["User: Hi\n\nAssistant:"], "session_id": f"find-{name}", "max_tokens": 1}
        assert demo.post("/state/chat/completions", body).status_code == 200
    body = {"contents": ["x"], "max_tokens": 1}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    file = demo.request("POST", "/openai/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", line)}).json()
    demo.post("/openai/v1/batches", {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"})
    page = open_page(demo, "chat")
    limits = {"rows": 64, "tokens_per_minute": 9000, "requests_per_minute": None}
    status = {**demo.status(), "keys": [{"name": "team-a", "admin": True, **limits}]}
    page.route(f"{demo.url}/status", lambda route: route.fulfill(json=status))
    page.route("**/metrics", lambda route: route.fulfill(body=KEY_METRICS))
    page.click("text=Admin")
    batch = re.compile(r"^(waiting|running|ending|complete) · \d / 1 · /v1/chat/completions$")
    expect(page.locator("#admin-batches li small").first).to_have_text(batch)
    expect(page.locator("#admin-clients li")).to_have_text(
        "team-a 3 requests, 1 refused, 1,200 tokens in, 0 out · admin rights · rows: at most 64 · "
        "tokens a minute: at most 9,000"
    )
    expect(page.locator("#admin-sessions li small").first).to_contain_text("engine")
    models = page.locator("#admin-models")
    expect(models.locator("li")).to_have_text(re.compile(r"^rwkv7 rwkv7-demo-\w+\.safetensors$"))  # cannot be unloaded
    loading = {"id": "big", "status": "loading", "created": time.time() - 30, "error": "", "loaded": 0.43}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [loading]}))
    page.evaluate("location.hash = 'chat'")
    page.click("text=Admin")
    expect(models.locator("li small")).to_have_text(re.compile(r"loading · 43 % · \d+ secs?"))
    loading |= {"status": "failed", "error": "too little memory"}
    expect(models.locator("li small")).to_have_text("failed · too little memory")
    page.unroute("**/v1/models")
    models.get_by_label("Name").fill("other")
    models.get_by_label("File").fill("absent.pth")
    models.get_by_role("button", name="Add").click()
    expect(models.get_by_role("alert")).to_contain_text("--models-dir")
    sessions = page.locator("#admin-sessions")
    sessions.get_by_label("by name").check()
    names = sessions.locator("li b").all_inner_texts()
    assert names == sorted(names, key=str.lower) and len(names) >= 7
    sessions.get_by_label("Search").fill("FIND-3")
    expect(sessions.locator("li b")).to_have_text("find-3")
    page.on("dialog", lambda dialog: dialog.accept())
    sessions.get_by_role("button", name="Delete find-3").click()
    expect(sessions.locator("li")).to_have_count(0)
    expect(page.locator("#admin-engines li small")).to_have_text("ready · cpu")
