"""Enforces the limits of API keys. Exact over all HTTP workers, because all jobs pass here.

Rows count while they run or wait. Limits per minute are token buckets that hold one minute's worth. A request is
admitted if its bucket is not empty. Then the bucket pays for its real usage and may become negative; a running request
is never cut. A new engine process starts with full buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.ipc.metrics import Metrics
from rwkv_batch.request import ClientLimits, Job, JobEvents, Usage

_MINUTE_S = 60.0
_ROWS_RETRY_S = 1.0


@dataclass(slots=True)
class TokenBucket:
    """A bucket refilled with a number of units per minute."""

    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """Add the units for the time since the last call."""
        self.level = min(float(per_minute), self.level + (now - self.at) * per_minute / _MINUTE_S)
        self.at = now

    def wait_s(self, level: float, per_minute: int) -> float:
        """Seconds until the bucket reaches `level`."""
        return max(0.0, (level - self.level) * _MINUTE_S / per_minute)


@dataclass(slots=True)
class _Client:
    rows: int = 0
    tokens: TokenBucket | None = None
    requests: TokenBucket | None = None


@dataclass(slots=True)
class Quotas:
    """Current usage of all API keys. Any thread may call."""

    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clients: dict[str, _Client] = field(default_factory=dict)
    """at most one entry per configured key"""
    _jobs: dict[str, Usage] = field(default_factory=dict)

    def acquire(self, job: Job) -> ErrorInfo | None:
        """Count a job against its client's limits. Returns the error if a limit is reached.

        Jobs without limits pass. So do jobs resumed from a lost engine, which were counted there.
        """
        usage = job.usage
        return None if usage is None or job.attempt else self.count(usage)

    def count(self, usage: Usage) -> ErrorInfo | None:
        """Count usage, also for a job that another engine runs. Returns the error if a limit is reached."""
        with self._lock:
            client = self._clients.setdefault(usage.client, _Client())
            error = self._limit_error(client, usage, usage.limits)
            if error is None:
                client.rows += usage.rows
                self._jobs[usage.job_id] = usage
                if client.requests is not None:
                    client.requests.level -= 1
                if client.tokens is not None:
                    client.tokens.level -= usage.prompt_tokens
        self.metrics.observe_client_request(usage.client, usage.prompt_tokens, error is not None)
        return error

    def observe(self, events: JobEvents) -> None:
        """Charge the tokens of a step, and remove an ended job."""
        if events.job_id in self._jobs:
            self.charge(events.job_id, sum(delta.num_tokens for delta in events.deltas), events.done)

    def charge(self, job_id: str, tokens: int, done: bool) -> None:
        """Charge sampled tokens, and remove the job if it is done."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        with self._lock:
            client = self._clients[job.client]
            if client.tokens is not None:
                client.tokens.level -= tokens * job.states
            if done:
                self._release(client, job)
        self.metrics.observe_client_tokens(job.client, tokens)

    def refund(self, job_id: str) -> None:
        """Undo the charge of a refused job, except for its request."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                client = self._clients[job.client]
                if client.tokens is not None:
                    client.tokens.level += job.prompt_tokens
                self._release(client, job)

    def _release(self, client: _Client, job: Usage) -> None:
        if self._jobs.pop(job.job_id, None) is not None:
            client.rows -= job.rows

    def _limit_error(self, client: _Client, job: Usage, limits: ClientLimits) -> ErrorInfo | None:
        now = self.clock()
        client.requests = _refilled(client.requests, limits.requests_per_minute, now)
        client.tokens = _refilled(client.tokens, limits.tokens_per_minute, now)
        if error := limits.rows_error(job.client, job.rows, job.states):
            return error
        if limits.rows is not None and client.rows + job.rows > limits.rows:
            reason = (
                f"has {client.rows} rows in progress and may have {limits.rows} at once, this request has {job.rows}"
            )
            return _refused(job, reason, _ROWS_RETRY_S)
        if client.requests is not None and limits.requests_per_minute and client.requests.level < 1:
            wait_s = client.requests.wait_s(1, limits.requests_per_minute)
            return _refused(job, f"may send {limits.requests_per_minute} requests a minute", wait_s)
        if client.tokens is not None and limits.tokens_per_minute and client.tokens.level <= 0:
            wait_s = client.tokens.wait_s(1, limits.tokens_per_minute)
            return _refused(job, f"may use {limits.tokens_per_minute} tokens a minute", wait_s)
        return None


def _refilled(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(float(per_minute), now)
    bucket.refill(per_minute, now)
    return bucket


def _refused(job: Usage, reason: str, wait_s: float) -> ErrorInfo:
    message = f"the key {job.client} {reason}; retry in {wait_s:.1f} s"
    return ErrorInfo(kind=ErrorKind.OVERLOADED, message=message, retry_after_s=wait_s)
