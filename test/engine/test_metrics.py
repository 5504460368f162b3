"""/metrics: latencies, refusals and devices."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rwkv_batch.errors import ErrorKind
from rwkv_batch.ipc.metrics import Metrics, TokenLatency
from rwkv_batch.request import Delta, Finish, FinishReason, JobEvents

FINISH = Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=9)


def sample(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in\n{text}"
    return float(found[1])


def rendered(times: TokenLatency) -> str:
    registry = CollectorRegistry()
    registry.register(times)
    return generate_latest(registry).decode()


def test_first_tokens_and_the_times_between() -> None:
    times = TokenLatency()
    times.arrived("a", 10.0)
    times.observe([JobEvents(job_id="a", deltas=[Delta(0, b"x", 1)])], 10.2)
    times.observe([JobEvents(job_id="a", deltas=[Delta(0, b"xx", 4), Delta(1, b"x", 2)])], 10.28)
    times.observe([JobEvents(job_id="a", deltas=[Delta(1, b"", 0, FINISH)], done=True)], 11.0)
    text = rendered(times)
    assert sample(text, "rwkv_first_token_seconds_count") == 2
    assert sample(text, 'rwkv_first_token_seconds_bucket{le="0.1"}') == 0
    assert sample(text, 'rwkv_first_token_seconds_bucket{le="0.25"}') == 1
    assert abs(sample(text, "rwkv_first_token_seconds_sum") - 0.48) < 1e-9
    # four tokens in 80 ms: four times 20 ms
    assert sample(text, 'rwkv_inter_token_seconds_bucket{le="0.015"}') == 0
    assert sample(text, "rwkv_inter_token_seconds_count") == 4
    assert abs(sample(text, "rwkv_inter_token_seconds_sum") - 0.08) < 1e-9


def test_a_row_in_one_delta_and_a_dropped_job_have_no_latencies() -> None:
    times = TokenLatency()
    times.arrived("whole", 0.0)
    times.observe([JobEvents(job_id="whole", deltas=[Delta(0, b"x", 9, FINISH)], done=True)], 5.0)
    times.arrived("gone", 0.0)
    times.forget("gone")
    times.observe([JobEvents(job_id="gone", deltas=[Delta(0, b"x", 1)])], 5.0)
    assert sample(rendered(times), "rwkv_first_token_seconds_count") == 0
    assert not times._last


def test_refusals_and_devices_are_reported() -> None:
    metrics = Metrics()
    metrics.observe_arrival("a")
    metrics.observe_refusal("a", ErrorKind.OVERLOADED)
    text = metrics.render({"devices": ["cpu", "cpu", "cuda:99"], "running_rows": 3})
    assert sample(text, 'rwkv_jobs_refused_total{kind="overloaded"}') == 1
    assert sample(text, "rwkv_running_rows") == 3
    used = sample(text, 'rwkv_device_memory_used_bytes{device="cpu"}')
    assert 1e6 < used < sample(text, 'rwkv_device_memory_total_bytes{device="cpu"}')
    assert 'device="cuda:99"' not in text


def test_two_threads_may_render_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, texts = Metrics(), []
    other = threading.Thread(target=lambda: texts.append(metrics.render({"rows": 1})))

    def make_late(*arguments: Any, **options: Any) -> Any:
        if not other.ident:
            other.start()
            other.join(0.3)  # a second thread renders meanwhile, or right after
        return Gauge(*arguments, **options)

    monkeypatch.setattr("rwkv_batch.ipc.metrics.Gauge", make_late)
    texts.append(metrics.render({"rows": 1}))
    other.join()
    assert [sample(text, "rwkv_rows") for text in texts] == [1, 1]
