"""The dashboard shows the values of /metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from test.routes.web.conftest import WAIT_MS, Opener
from test.serving import Service, wait_for

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
SHOWN = (
    "rwkv_completion_tokens_total", "rwkv_prompt_tokens_total", "rwkv_cached_prompt_tokens_total", "rwkv_running_rows",
    "rwkv_waiting_rows", "rwkv_pool_sessions", "rwkv_pool_l1_sessions", "rwkv_pool_l2_sessions", "rwkv_pool_slots_free",
    "rwkv_pool_slots_total", "rwkv_pool_prefix_cache_hits", "rwkv_pool_prefix_cache_misses",
    "rwkv_pool_prefix_cache_saved_tokens",
)  # fmt: skip


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
    for rows in (1, 3, 6, 2, 5):
        demo.post("/v1/chat/completions", {"contents": prompts * rows, "max_tokens": 40 * rows, "ignore_eos": True})
    page.locator("#panel-dashboard").evaluate("(place) => place.scrollTo(0, 0)")
    page.screenshot(path=shots / "dashboard.png")
    points = page.evaluate("import('./web/dashboard/series.js').then(({series}) => series.get().times.length)")
    page.reload()
    expect(page.locator('[data-series="first_p50"]')).not_to_have_text("–")
    kept = page.evaluate("import('./web/dashboard/series.js').then(({series}) => series.get().times.length)")
    assert kept >= points, "the figures of this tab outlive a reload"
