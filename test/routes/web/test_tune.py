"""The tuning panel: examples, errors by line, loss curve, before and after, publication."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from test.routes.web.conftest import Opener
from test.serving import Service, raise_priority, training_processes, wait_for

pytestmark = pytest.mark.browser
IS_FOR_DOCS = "RWKV_SCREENSHOTS" in os.environ
"""Their picture shows another answer. It needs more passes, which take most of the time."""
TRAINING_MS = 1_500_000 if IS_FOR_DOCS else 300_000
"""for a training on a busy machine; it starts a process of its own"""
WORDS = "one two three four five six seven eight nine ten eleven twelve".split()


def lines() -> list[str]:
    examples = [
        [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": "Good morning."}]
        for word in WORDS
    ]
    return [json.dumps({"messages": messages}) for messages in examples]


def test_a_running_job_shows_its_steps_and_the_time_left(fake: Service, open_page: Opener) -> None:
    made = {"created_at": 1, "finished_at": None, "model": "rwkv7", "fine_tuned_model": None, "error": None}
    job = {**made, "id": "ftjob-1", "status": "running", "estimated_finish": int(time.time()) + 600} | {
        "user_provided_suffix": "polite" * 10
    }
    losses: list[dict[str, Any]] = [{"step": 20, "total_steps": 80, "train_loss": 1.0}, {"step": 10, "train_loss": 2.0}]
    events = [{"type": "metrics", "message": f"Step {data['step']}/80", "data": data} for data in losses]
    page = open_page(fake, width=390)
    page.route("**/fine_tuning/jobs?*", lambda route: route.fulfill(json={"data": [job]}))
    page.route("**/ftjob-1/events?*", lambda route: route.fulfill(json={"data": events}))
    page.get_by_role("link", name="Tune").click()
    expect(page.locator("#tune-left")).to_have_text(re.compile(r"about \d+ mins left"))
    expect(page.locator("#tune-job h2")).to_have_text("polite" * 10)
    assert page.evaluate("document.querySelector('#tune-job').scrollWidth") <= 390, "a long name is not cut off"
    expect(page.get_by_role("status").filter(has_text="Step 20/80")).to_have_count(0)
    text = page.locator("#tune-curve text").first
    wait_for(lambda: text.evaluate("(one) => one.getScreenCTM().a") == 1, 30, "a number is as large on every screen")
    expect(page.locator("#tune-job progress")).to_have_attribute("value", "20")
    expect(page.locator("#tune-job")).to_contain_text("20 / 80")


@pytest.mark.timeout(1_800 if IS_FOR_DOCS else 500)
def test_examples_become_a_published_state(demo: Service, open_page: Opener, tmp_path: Path, shots: Path) -> None:
    """One training, shown on a desk and on a phone."""
    page = open_page(demo, "tune", height=1150)
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join([*lines(), "{", '{"messages": []}']), "utf-8")
    page.set_input_files("#tune-file", file)
    expect(page.locator("#tune-errors li").first).to_contain_text("line 13")
    expect(page.locator("#tune-start")).to_be_disabled()
    file.write_text("\n".join(lines()), "utf-8")
    page.set_input_files("#tune-file", file)
    expect(page.locator("#tune-start")).to_have_text("Start with 12 examples")
    expect(page.locator("#tune-preview li").first).to_have_text("Say one → Good morning.")
    page.fill("#tune-suffix", "polite")
    page.fill("#tune-epochs", "8" if IS_FOR_DOCS else "1")
    page.click("#tune-start")
    raise_priority(wait_for(lambda: training_processes(demo), 60, "the training runs"))
    expect(page.locator("#tune-job")).to_have_attribute("data-status", "succeeded", timeout=TRAINING_MS)
    expect(page.locator("#tune-job")).to_contain_text("only 12 lines differ")
    expect(page.locator("#tune-ask")).to_have_value("Say one")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 1150})
        expect(page.locator("#tune-curve")).to_be_visible()
        page.click("#tune-compare")
        expect(page.locator("#tune-answers .answer").last).to_contain_text(
            "Good morning" if IS_FOR_DOCS else re.compile(r"\w")
        )
        page.fill("#tune-name", f"polite-{width}")
        page.click("#tune-publish")
        expect(page.get_by_text(f"as the state polite-{width}")).to_be_visible()
        page.screenshot(path=shots / ("tune.png" if width > 900 else "phone-tune.png"))
        assert demo.request("DELETE", f"/v1/states/polite-{width}").status_code == 200
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#tune-job").get_by_role("button", name="Delete").click()
    expect(page.locator("#tune-compare")).to_have_count(0)
