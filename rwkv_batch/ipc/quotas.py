"""The ledger of API keys' limits. One engine holds it for all processes; each of them has a copy.

Rows count while they run or wait. Limits per minute are token buckets that hold one minute's worth. A request is
admitted if its bucket is not empty. Then the bucket pays for its real usage and may become negative; a running request
is never cut. A request counts once, by its id, whoever reports it and how often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.request import ClientLimits, Usage

_MINUTE_S = 60.0
_ROWS_RETRY_S = 1.0


class Balance(msgspec.Struct, frozen=True, array_like=True):
    """The rest of a client's limits in this minute. None: not limited."""

    client: str
    limits: ClientLimits
    requests: float | None
    tokens: float | None
    own_requests: int = 0
    own_tokens: int = 0
    """used by the process that reports, and not subtracted from the levels: others may not have heard of it"""


class CountedJob(msgspec.Struct, array_like=True):
    usage: Usage
    sampled: int = 0
    """charged"""
    replayed: int = 0
    """charged, of its session"""


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
        return max(0.0, (level - self.level) * _MINUTE_S / per_minute)


@dataclass(slots=True)
class _Client:
    limits: ClientLimits
    rows: int = 0
    tokens: TokenBucket | None = None
    requests: TokenBucket | None = None
    spent: tuple[int, int] = (0, 0)
    spent_before: tuple[int, int] = (0, 0)
    """requests and tokens since the last `Quotas.age`, and between the two last calls"""

    def refill(self, limits: ClientLimits, now: float) -> None:
        """Refill the buckets. `limits` replace earlier ones."""
        self.limits = limits
        self.requests = _refilled(self.requests, limits.requests_per_minute, now)
        self.tokens = _refilled(self.tokens, limits.tokens_per_minute, now)

    def spend(self, requests: int, tokens: int) -> None:
        if self.requests is not None:
            self.requests.level -= requests
        if self.tokens is not None:
            self.tokens.level -= tokens
        self.spent = self.spent[0] + requests, self.spent[1] + tokens


@dataclass(slots=True)
class Quotas:
    """Current usage of all API keys. Any thread may call."""

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clients: dict[str, _Client] = field(default_factory=dict)
    """those with jobs, and those that have used something and whose limits are not full again"""
    _jobs: dict[str, CountedJob] = field(default_factory=dict)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def count(self, usage: Usage) -> ErrorInfo | None:
        """Count a job's usage. Returns the error if a limit is reached, None for a job that counts already."""
        with self._lock:
            if usage.job_id in self._jobs:
                return None
            client = self._refilled_client(usage.client, usage.limits)
            error = self._limit_error(client, usage, usage.limits)
            if error is None:
                self._add(client, usage)
        return error

    def add(self, usage: Usage) -> None:
        """Count a job that the ledger admitted."""
        with self._lock:
            if usage.job_id not in self._jobs:
                self._add(self._refilled_client(usage.client, usage.limits), usage)

    def _add(self, client: _Client, usage: Usage) -> None:
        client.rows += usage.rows
        client.spend(1, usage.prompt_tokens)
        self._jobs[usage.job_id] = CountedJob(usage)

    def charge(self, job_id: str, sampled: int, replayed: int = 0, *, is_total: bool = False) -> CountedJob | None:
        """Charge further tokens of a job, and return them. Returns None if there are none.

        is_total: the numbers are since the job's start
        """
        with self._lock:
            if (job := self._jobs.get(job_id)) is None:
                return None
            if is_total:
                sampled, replayed = sampled - job.sampled, replayed - job.replayed
            charged = CountedJob(job.usage, max(0, sampled), max(0, replayed))
            if not (charged.sampled or charged.replayed):
                return None
            job.sampled += charged.sampled
            job.replayed += charged.replayed
            self._clients[job.usage.client].spend(0, (charged.sampled + charged.replayed) * job.usage.states)
            return charged

    def end(self, job_id: str, refund: bool = False) -> CountedJob | None:
        """Remove a job and return it, if it counts.

        refund: no engine admitted the job, so it costs nothing
        """
        with self._lock:
            job = self._jobs.pop(job_id, None)
            if job is not None:
                client = self._clients[job.usage.client]
                client.rows -= job.usage.rows
                if refund:
                    client.spend(-1, -job.usage.prompt_tokens)
            return job

    def refund(self, usage: Usage) -> None:
        """Give back what a job paid when it was counted. Call for a job that is not counted any more."""
        with self._lock:
            self._refilled_client(usage.client, usage.limits).spend(-1, -usage.prompt_tokens)

    # Copies ----------------------------------------------------------------------------------------------------

    def balances(self) -> list[Balance]:
        """Return the balances of clients that have used something, and forget the others."""
        balances = []
        with self._lock:
            for name, client in list(self._clients.items()):
                client.refill(client.limits, self.clock())
                requests, tokens = _level(client.requests), _level(client.tokens)
                limits = client.limits
                if requests != limits.requests_per_minute or tokens != limits.tokens_per_minute:
                    balances.append(Balance(name, limits, requests, tokens))
                elif not client.rows:
                    del self._clients[name]
        return balances

    def age(self) -> None:
        """Call for each report of the ledger. It has what was spent before the last one."""
        with self._lock:
            for client in self._clients.values():
                client.spent_before, client.spent = client.spent, (0, 0)

    def own_balances(self) -> list[Balance]:
        """Return `balances`. What was spent here is apart, as far as other copies may lack it."""
        balances = []
        for balance in self.balances():
            with self._lock:
                client = self._clients[balance.client]
                requests, tokens = map(sum, zip(client.spent, client.spent_before, strict=True))
            levels = (_plus(balance.requests, requests), _plus(balance.tokens, tokens))
            balances.append(Balance(balance.client, balance.limits, *levels, requests, tokens))
        return balances

    def jobs(self) -> list[CountedJob]:
        with self._lock:
            return [CountedJob(job.usage, job.sampled, job.replayed) for job in self._jobs.values()]

    def merge(self, balances: Iterable[Balance], jobs: Iterable[CountedJob] = ()) -> None:
        """Take over what another copy knows. Of two levels the lower one counts, so a repetition changes nothing.

        But usage of its process that is given apart is subtracted each time: see `own_balances`.
        """
        with self._lock:
            for balance in balances:
                client = self._refilled_client(balance.client, balance.limits)
                _lower(client.requests, balance.requests)
                _lower(client.tokens, balance.tokens)
                client.spend(balance.own_requests, balance.own_tokens)
            for job in jobs:
                if job.usage.job_id not in self._jobs:
                    self._refilled_client(job.usage.client, job.usage.limits).rows += job.usage.rows
                    self._jobs[job.usage.job_id] = job

    def replace(self, balances: Iterable[Balance]) -> None:
        """Take over the balances of the ledger. Clients that are not named have used nothing."""
        with self._lock:
            self._clients = {name: client for name, client in self._clients.items() if client.rows}
            for client in self._clients.values():
                client.tokens = client.requests = None
        self.merge(balances)

    def _refilled_client(self, name: str, limits: ClientLimits) -> _Client:
        client = self._clients.setdefault(name, _Client(limits))
        client.refill(limits, self.clock())
        return client

    def _limit_error(self, client: _Client, job: Usage, limits: ClientLimits) -> ErrorInfo | None:
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


def _level(bucket: TokenBucket | None) -> float | None:
    return None if bucket is None else bucket.level


def _plus(level: float | None, used: int) -> float | None:
    return None if level is None else level + used


def _lower(bucket: TokenBucket | None, level: float | None) -> None:
    if bucket is not None and level is not None:
        bucket.level = min(bucket.level, level)


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
