"""Prometheus metrics of all HTTP workers. The engine's process keeps them, so every worker returns the same."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rwkv_batch.errors import ErrorKind
from rwkv_batch.ipc.metric_help import DEVICE_HELP, help_of
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.request import JobEvents

_FRESH_S = 1.0
RECENT_REQUESTS = 500
"""Requests of the access log that are kept in memory."""
MAX_CLIENTS = 1000
"""API keys with figures of their own. Keys are renamed and removed while the service runs."""


class DeviceStats(NamedTuple):
    """Memory in bytes and power in watts of a device. None: unknown."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """NVML's functions. Raises OSError if the library is missing or does not start."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._library.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")

    def stats(self, number: str) -> DeviceStats:
        """Return statistics of the GPU with this index or UUID.

        number: as in CUDA_VISIBLE_DEVICES
        """
        handle = ctypes.c_void_p()
        if number.isdecimal():
            found = self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(number)), ctypes.byref(handle))
        else:
            found = self._library.nvmlDeviceGetHandleByUUID(number.encode(), ctypes.byref(handle))
        if found != 0:
            return DeviceStats()
        memory, milliwatts = _Memory(), ctypes.c_uint()
        has_memory = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        has_power = self._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) == 0
        return DeviceStats(
            memory.used if has_memory else None,
            memory.total if has_memory else None,
            milliwatts.value / 1000 if has_power else None,
        )


def _cpu_stats() -> DeviceStats:
    """Resident memory of this process, and the machine's total."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceStats(pages * os.sysconf("SC_PAGE_SIZE"), total)
    return DeviceStats()


class DeviceMonitor:
    """Memory and power of devices, at most a second old. Any thread.

    Devices have names such as "cuda:0" and "cpu". GPUs: through NVML, which does not touch CUDA. So no stream
    waits and no graph capture fails. CPU: /proc.
    """

    def __init__(self) -> None:
        self._nvml: _Nvml | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._nvml = _Nvml()
        self._known: dict[str, tuple[float, DeviceStats]] = {}

    def stats(self, device: str) -> DeviceStats:
        """Return a device's statistics. All fields are None for an unknown device."""
        now = time.monotonic()
        updated_at, stats = self._known.get(device, (-_FRESH_S, DeviceStats()))
        if now - updated_at >= _FRESH_S:
            stats = self._query(device)
            self._known[device] = (now, stats)
        return stats

    def _query(self, device: str) -> DeviceStats:
        kind, _, number = device.partition(":")
        if kind == "cpu":
            return _cpu_stats()
        if kind != "cuda" or self._nvml is None:
            return DeviceStats()
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        index = int(number or 0)
        return self._nvml.stats(visible[index] if index < len(visible) else str(index))


FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Seconds; inclusive upper bounds of the buckets."""


class Buckets:
    """Counts of values by upper bound. One thread writes; a reader may see a value half added."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self._name, self._meaning, self._bounds = name, meaning, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def count(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> HistogramMetricFamily:
        """Return Prometheus' cumulative buckets."""
        so_far, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts.copy(), strict=True):
            so_far += count
            buckets.append((floatToGoString(bound), so_far))
        return HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)


class TokenLatency(Collector):
    """Histograms of the time to first token and between tokens.

    The time to first token starts at a job's arrival. `arrived` and `forget` run on any thread, `observe` on the
    engine's.
    """

    def __init__(self) -> None:
        self._first_token = Buckets(
            "rwkv_first_token_seconds",
            "Seconds from a job's arrival to the first tokens of a row that are sent (chunk_size gathers them).",
            FIRST_TOKEN_BOUNDS,
        )
        self._inter_token = Buckets(
            "rwkv_inter_token_seconds",
            "Seconds from token to token of a row: the time between two deltas by the tokens of the second.",
            INTER_TOKEN_BOUNDS,
        )
        self._last: dict[str, tuple[float, dict[int, float]]] = {}
        """per job its arrival, and per row the time of its last delta"""

    def arrived(self, job_id: str, now: float) -> None:
        """Record a job's arrival. `now` is time.monotonic()."""
        self._last[job_id] = (now, {})

    def forget(self, job_id: str) -> None:
        """Drop a job's record. Call for a job that was refused or whose client has gone."""
        self._last.pop(job_id, None)

    def observe(self, events: Sequence[JobEvents], now: float) -> None:
        """Record the events of one step. `now` is time.monotonic()."""
        delta_counts: dict[tuple[float, int], int] = {}
        """deltas by time of the row's previous delta and number of tokens: few keys, because rows share their steps"""
        for event in events:
            known = self._last.get(event.job_id)
            if known is None:
                continue
            arrival, rows = known
            for delta in event.deltas:
                tokens = delta.num_tokens
                if not tokens:
                    continue
                before = rows.get(delta.row)
                if before is not None:
                    delta_counts[before, tokens] = delta_counts.get((before, tokens), 0) + 1
                elif delta.finish is None or tokens == 1:  # a whole row in one delta shows no first token
                    self._first_token.count(now - arrival)
                rows[delta.row] = now
            if event.done:
                self.forget(event.job_id)
        for (before, tokens), deltas in delta_counts.items():
            self._inter_token.count((now - before) / tokens, tokens * deltas)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        yield self._first_token.family()
        yield self._inter_token.family()


disable_created_metrics()

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters and histograms of /metrics. Any thread may call: prometheus_client locks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, labelnames=["route"], buckets=_SECONDS, registry=self._registry)
        self._requests = counter("rwkv_http_requests", "HTTP requests ended.", ["route", "status"])
        self._seconds = histogram("rwkv_http_request_seconds", "Seconds from a request's arrival to its last byte.")
        self._first_byte = histogram(
            "rwkv_http_first_byte_seconds", "Seconds from a request's arrival to the first byte of its answer's text."
        )
        self._completion_tokens = counter("rwkv_completion_tokens", "Tokens sent to HTTP workers.")
        self._prompt_tokens = counter("rwkv_prompt_tokens", "Prompt tokens of ended rows.")
        self._cached_tokens = counter("rwkv_cached_prompt_tokens", "Prompt tokens that were not computed.")
        self._rows = counter("rwkv_rows_finished", "Rows ended.", ["reason"])
        self._jobs = gauge("rwkv_jobs", "Jobs that run or wait, by route.", ["label"])
        self._client_requests = counter(
            "rwkv_client_requests", "Requests that generate, by API key.", ["client", "outcome"]
        )
        self._client_tokens = counter(
            "rwkv_client_tokens",
            "Tokens of prompts and answers, and of sessions that were read again, by API key.",
            ["client", "kind"],
        )
        self._refused = counter("rwkv_jobs_refused", "Jobs that the engine did not take, by reason.", ["kind"])
        self._devices = {
            name: gauge(f"rwkv_device_{name}", DEVICE_HELP[name], ["device"]) for name in DeviceStats._fields
        }
        self._watch = DeviceMonitor()
        self._times = TokenLatency()
        self._registry.register(self._times)
        self._gauges: dict[str, Gauge] = {}
        self._clients: OrderedDict[str, None] = OrderedDict()
        """API keys with figures"""
        self._clients_lock = threading.Lock()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        self._rendering = threading.Lock()

    def observe_arrival(self, job_id: str) -> None:
        self._times.arrived(job_id, time.monotonic())

    def observe_refusal(self, job_id: str, kind: ErrorKind) -> None:
        self.forget(job_id)
        self._refused.labels(kind.value).inc()

    def forget(self, job_id: str) -> None:
        self._times.forget(job_id)

    def observe_request(self, seen: Observe) -> None:
        self._requests.labels(seen.route, str(seen.status)).inc()
        self._seconds.labels(seen.route).observe(seen.seconds)
        if seen.first_byte_s > 0:
            self._first_byte.labels(seen.route).observe(seen.first_byte_s)
        if seen.entry:
            self._recent.append(seen.entry)

    def recent_requests(self) -> list[dict[str, Any]]:
        """Return the access log's fields of the last requests, newest first."""
        return list(reversed(self._recent.copy()))

    def observe_client_request(self, client: str, prompt_tokens: int, is_refused: bool) -> None:
        self._keep_client(client)
        self._client_requests.labels(client, "refused" if is_refused else "taken").inc()
        if not is_refused:
            self._client_tokens.labels(client, "prompt").inc(prompt_tokens)

    def observe_client_tokens(self, client: str, sampled: int, replayed: int) -> None:
        """Count a client's tokens.

        replayed: tokens of the client's sessions that were read again
        """
        self._keep_client(client)
        self._client_tokens.labels(client, "completion").inc(sampled)
        if replayed:
            self._client_tokens.labels(client, "replayed").inc(replayed)

    def _keep_client(self, client: str) -> None:
        """Make a client the most recent one. Above `MAX_CLIENTS`, remove the oldest one's figures."""
        with self._clients_lock:
            self._clients[client] = None
            self._clients.move_to_end(client)
            if len(self._clients) > MAX_CLIENTS:
                gone, _ = self._clients.popitem(last=False)
                for counter in (self._client_requests, self._client_tokens):
                    counter.remove_by_labels({"client": gone})

    def observe_events(self, events: Sequence[JobEvents]) -> None:
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
            self._gauges[name] = Gauge(f"rwkv_{name}", help_of(name), registry=self._registry)
        return self._gauges[name]


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every nested number: {"pool": {"l1": {"sessions": 3}}} -> ("pool_l1_sessions", 3)."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}_")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)
