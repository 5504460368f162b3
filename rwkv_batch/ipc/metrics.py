"""Prometheus metrics of all HTTP workers. The engine's process keeps them, so every worker returns the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from rwkv_batch.errors import ErrorKind
from rwkv_batch.ipc.device_stats import DeviceMonitor, DeviceStats
from rwkv_batch.ipc.token_latency import TokenLatency
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.request import JobEvents

disable_created_metrics()

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters and histograms. Any thread may call: prometheus_client locks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rwkv_http_requests", "HTTP requests ended.", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "rwkv_http_request_seconds",
            "Seconds from a request's arrival to its last byte.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_byte = Histogram(
            "rwkv_http_first_byte_seconds",
            "Seconds from a request's arrival to the first byte of its answer's text.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._completion_tokens = Counter(
            "rwkv_completion_tokens", "Tokens sent to HTTP workers.", registry=self._registry
        )
        self._prompt_tokens = Counter("rwkv_prompt_tokens", "Prompt tokens of ended rows.", registry=self._registry)
        self._cached_tokens = Counter(
            "rwkv_cached_prompt_tokens", "Prompt tokens that were not computed.", registry=self._registry
        )
        self._rows = Counter("rwkv_rows_finished", "Rows ended.", ["reason"], registry=self._registry)
        self._jobs = Gauge("rwkv_jobs", "Jobs that run or wait, by route.", ["label"], registry=self._registry)
        self._client_requests = Counter(
            "rwkv_client_requests",
            "Requests that generate, by API key.",
            ["client", "outcome"],
            registry=self._registry,
        )
        self._client_tokens = Counter(
            "rwkv_client_tokens",
            "Tokens of prompts and answers, by API key.",
            ["client", "kind"],
            registry=self._registry,
        )
        self._refused = Counter(
            "rwkv_jobs_refused", "Jobs that the engine did not take, by reason.", ["kind"], registry=self._registry
        )
        self._devices = {
            name: Gauge(f"rwkv_device_{name}", f"A device's {name}.", ["device"], registry=self._registry)
            for name in DeviceStats._fields
        }
        self._watch = DeviceMonitor()
        self._times = TokenLatency()
        self._registry.register(self._times)
        self._gauges: dict[str, Gauge] = {}
        self._rendering = threading.Lock()

    def observe_arrival(self, job_id: str) -> None:
        """Record a submitted job."""
        self._times.arrived(job_id, time.monotonic())

    def observe_refusal(self, job_id: str, kind: ErrorKind) -> None:
        """Count a job that the engine refused."""
        self.forget(job_id)
        self._refused.labels(kind.value).inc()

    def forget(self, job_id: str) -> None:
        """Drop the job's latency record."""
        self._times.forget(job_id)

    def observe_request(self, seen: Observe) -> None:
        """Count an ended HTTP request."""
        self._requests.labels(seen.route, str(seen.status)).inc()
        self._seconds.labels(seen.route).observe(seen.seconds)
        if seen.first_byte_s > 0:
            self._first_byte.labels(seen.route).observe(seen.first_byte_s)

    def observe_client_request(self, client: str, prompt_tokens: int, is_refused: bool) -> None:
        """Count a request of an API key."""
        self._client_requests.labels(client, "refused" if is_refused else "taken").inc()
        if not is_refused:
            self._client_tokens.labels(client, "prompt").inc(prompt_tokens)

    def observe_client_tokens(self, client: str, completion_tokens: int) -> None:
        """Count a client's sampled tokens."""
        self._client_tokens.labels(client, "completion").inc(completion_tokens)

    def observe_events(self, events: Sequence[JobEvents]) -> None:
        """Count the events of one step."""
        self._times.observe(events, time.monotonic())
        tokens = 0
        for event in events:
            for delta in event.deltas:
                tokens += delta.num_tokens
                if delta.finish is not None:
                    self._prompt_tokens.inc(delta.finish.prompt_tokens)
                    self._cached_tokens.inc(delta.finish.cached_tokens)
                    self._rows.labels(delta.finish.reason.value).inc()
        self._completion_tokens.inc(tokens)

    def render(self, status: dict[str, Any]) -> str:
        """Return Prometheus text. Each number in `status` becomes a gauge, nested ones by their path."""
        with self._rendering:
            self._set(status)
            return generate_latest(self._registry).decode()

    def _set(self, status: dict[str, Any]) -> None:
        jobs: dict[str, int] = status.get("jobs", {})
        self._jobs.clear()
        for label, count in jobs.items():
            self._jobs.labels(label).set(count)
        for device in dict.fromkeys(status.get("devices", ())):
            for name, value in self._watch.stats(device)._asdict().items():
                if value is not None:
                    self._devices[name].labels(device).set(value)
        for name, value in _numbers({**status, "model_shape": None, "jobs": None}):
            self._gauge(name).set(value)

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"rwkv_{name}", f"The engine's {name}.", registry=self._registry)
        return self._gauges[name]


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every nested number: {"pool": {"l1": {"sessions": 3}}} -> ("pool_l1_sessions", 3)."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}_")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)
