"""/metrics: latencies, refusals and devices."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rwkv_batch.errors import ErrorKind
from rwkv_batch.ipc.metrics import RECENT_REQUESTS, DeviceMonitor, DeviceStats, Metrics, TokenLatency
from rwkv_batch.ipc.wire import Observe
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


def test_rows_of_one_step_count_all_their_tokens() -> None:
    times = TokenLatency()
    times.arrived("a", 10.0)
    for at, tokens in ((10.1, 1), (10.2, 2)):
        times.observe([JobEvents(job_id="a", deltas=[Delta(row, b"x", tokens) for row in range(3)])], at)
    assert sample(rendered(times), "rwkv_inter_token_seconds_count") == 6
    assert abs(sample(rendered(times), "rwkv_inter_token_seconds_sum") - 0.3) < 1e-9


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
    assert sample(text, 'rwkv_jobs_refused_total{kind="overloaded"}') == 1 and not metrics._times._last
    assert sample(text, "rwkv_running_rows") == 3
    used = sample(text, 'rwkv_device_memory_used_bytes{device="cpu"}')
    assert 1e6 < used < sample(text, 'rwkv_device_memory_total_bytes{device="cpu"}')
    assert 'device="cuda:99"' not in text


def test_figures_of_keys_that_are_not_used_any_more_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rwkv_batch.ipc.metrics.MAX_CLIENTS", 2)
    metrics = Metrics()
    for number in range(5):
        metrics.observe_client_request(f"key-{number}", 7, is_refused=number == 3)
        metrics.observe_client_tokens("used", 1, 1)
    clients = set(re.findall('client="(.*?)"', metrics.render({})))
    assert clients == {"key-4", "used"}
    assert sample(metrics.render({}), 'rwkv_client_tokens_total{client="used",kind="completion"}') == 5


def samples(text: str) -> dict[str, float]:
    """All values of a page, without empty buckets and devices."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines if float(value) and "rwkv_device" not in name}


def test_every_metric_is_counted_under_its_name_and_labels() -> None:
    """Dashboards read these names."""
    metrics = Metrics()
    metrics.observe_request(Observe("/v1/chat", 200, 0.3, 0.02))
    metrics.observe_request(Observe("/v1/chat", 200, 400.0, 0.0))
    metrics.observe_client_request("key", 7, is_refused=False)
    metrics.observe_client_request("key", 9, is_refused=True)
    metrics.observe_client_tokens("key", 3, 0)
    metrics.observe_client_tokens("key", 2, 5)
    finish = Finish(reason=FinishReason.STOP, prompt_tokens=11, completion_tokens=9, cached_tokens=4)
    deltas = [Delta(0, b"x", 2), Delta(0, b"x", 3, finish), Delta(1, b"", 0, finish)]
    metrics.observe_events([JobEvents(job_id="unknown", deltas=deltas)])
    metrics.observe_events([JobEvents(job_id="unknown", deltas=deltas[:1])])
    status = {"jobs": {"/v1/chat": 3}, "pool": {"l1": {"slots": 5}}, "model_shape": {"layers": 2}, "draining": True}
    text = metrics.render({"jobs": {"gone": 1}}) and metrics.render(status)
    found = samples(text)
    for name, minimum in (("request", 0.5), ("first_byte", 0.025)):
        for bound in (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0):
            if bound >= minimum:
                assert found.pop(f'rwkv_http_{name}_seconds_bucket{{le="{bound}",route="/v1/chat"}}') == 1
    assert found == {
        'rwkv_http_requests_total{route="/v1/chat",status="200"}': 2,
        'rwkv_http_request_seconds_bucket{le="+Inf",route="/v1/chat"}': 2,
        'rwkv_http_request_seconds_count{route="/v1/chat"}': 2,
        'rwkv_http_request_seconds_sum{route="/v1/chat"}': 400.3,
        'rwkv_http_first_byte_seconds_bucket{le="+Inf",route="/v1/chat"}': 1,
        'rwkv_http_first_byte_seconds_count{route="/v1/chat"}': 1,
        'rwkv_http_first_byte_seconds_sum{route="/v1/chat"}': 0.02,
        "rwkv_completion_tokens_total": 7,
        "rwkv_prompt_tokens_total": 22,
        "rwkv_cached_prompt_tokens_total": 8,
        'rwkv_rows_finished_total{reason="stop"}': 2,
        'rwkv_client_requests_total{client="key",outcome="taken"}': 1,
        'rwkv_client_requests_total{client="key",outcome="refused"}': 1,
        'rwkv_client_tokens_total{client="key",kind="prompt"}': 7,
        'rwkv_client_tokens_total{client="key",kind="completion"}': 5,
        'rwkv_client_tokens_total{client="key",kind="replayed"}': 5,
        'rwkv_jobs{label="/v1/chat"}': 3,
        "rwkv_pool_l1_slots": 5,
        "rwkv_draining": 1,
    }
    meanings = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
    assert len(meanings) == 18
    assert [name for name, meaning in meanings if not re.fullmatch(r"[A-Z][a-zPT' ].*\.", meaning)] == []


def test_the_last_requests_are_kept_newest_first() -> None:
    metrics = Metrics()
    for number in range(RECENT_REQUESTS + 2):
        metrics.observe_request(Observe("/r", 200, 0.1, 0.0, {"at": number} if number != 3 else {}))
    recent = metrics.recent_requests()
    assert [recent[0], recent[-1], len(recent)] == [{"at": RECENT_REQUESTS + 1}, {"at": 1}, RECENT_REQUESTS]


def test_visible_devices_are_numbered_as_cuda_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monitor = DeviceMonitor()
    monkeypatch.setattr("rwkv_batch.ipc.metrics._FRESH_S", 3600.0)
    monkeypatch.setattr(monitor, "_nvml", SimpleNamespace(stats=lambda number: asked.append(number) or DeviceStats(7)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " GPU-abc, 3,")
    assert monitor.stats("cuda:1") == monitor.stats("cuda:1") == DeviceStats(7)
    assert [monitor.stats(name) for name in ("cuda", "cuda:2")] == [DeviceStats(7)] * 2
    assert asked == ["3", "GPU-abc", "2"], "what was just asked is known"
    assert monitor.stats("mps:0") == DeviceStats() and len(asked) == 3


class FakeNvml:
    """libnvidia-ml.so.1 with one GPU."""

    def __init__(self, name: str) -> None:
        assert name == "libnvidia-ml.so.1"
        self.starts, self.answers = True, 0
        self.asked: list[Any] = []

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0 if self.starts else 9

    def _handle(self, which: Any, target: Any) -> int:
        target._obj.value = 77
        self.asked.append(which)
        return 0 if which in (3, b"GPU-abc") else 6

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, target: Any) -> int:  # noqa: N802
        return self._handle(index.value, target)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, target: Any) -> int:  # noqa: N802
        return self._handle(uuid, target)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, target: Any) -> int:  # noqa: N802
        assert handle.value == 77
        target._obj.total, target._obj.free, target._obj.used = 80, 50, 30
        return self.answers

    def nvmlDeviceGetPowerUsage(self, handle: Any, target: Any) -> int:  # noqa: N802
        assert handle.value == 77
        target._obj.value = 123_400
        return self.answers


def test_a_gpus_memory_and_power_come_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeNvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monitor = DeviceMonitor()
    assert monitor.stats("cuda:3") == DeviceStats(30, 80, 123.4)
    assert monitor.stats("cuda:4") == DeviceStats()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc")
    assert monitor.stats("cuda:0") == DeviceStats(30, 80, 123.4)
    nvml: Any = monitor._nvml
    assert nvml._library.asked == [3, 4, b"GPU-abc"]
    nvml._library.answers = 1
    assert nvml.stats("3") == DeviceStats(), "values that the driver does not know are left out"


def test_without_nvml_gpus_have_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert DeviceMonitor().stats("cuda:0") == DeviceStats()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 9))
    assert DeviceMonitor().stats("cuda:0") == DeviceStats()


def test_the_cpus_memory_is_this_process_in_the_machine() -> None:
    used, total, power = DeviceMonitor().stats("cpu")
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) << 10
    machine = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) << 10
    assert used is not None and abs(used - resident) < 64 << 20
    assert (total, power) == (machine, None)


def test_without_proc_the_cpu_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (OSError("no /proc"), "none of pages", "1"):
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=[text]))
        assert DeviceMonitor().stats("cpu") == DeviceStats()


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
