"""In the engine's process: jobs that are not admitted yet, and the ledger of API keys' limits with its metrics."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from rwkv_batch.errors import ErrorInfo
from rwkv_batch.ipc.metrics import Metrics
from rwkv_batch.ipc.quotas import Balance, CountedJob, Quotas
from rwkv_batch.ipc.wire import RestoreQuotas, UsageReport
from rwkv_batch.request import Job, JobEvents, Load, Usage, original_id


class Arrivals:
    """Jobs submitted to an engine but not admitted yet. Any thread."""

    def __init__(self, engine_load: Callable[[], Load]) -> None:
        """engine_load: returns the engine's own load"""
        self._engine_load = engine_load
        self._lock = threading.Lock()
        self._rows = self._prompt_tokens = 0

    def add(self, job: Job) -> None:
        self._count(job, 1)

    def remove(self, job: Job) -> None:
        self._count(job, -1)

    def _count(self, job: Job, times: int) -> None:
        tokens = sum(row.num_prompt_tokens for row in job.rows)
        with self._lock:
            self._rows += times * job.num_rows
            self._prompt_tokens += times * tokens

    @property
    def load(self) -> Load:
        """Return the total load. A job may be counted twice for a moment, but is always counted."""
        with self._lock:
            rows, prompt_tokens = self._rows, self._prompt_tokens
        known = self._engine_load()
        return Load(known.rows + rows, known.prompt_tokens + prompt_tokens)


_MAX_CUT_OFF = 4096
CONNECT_S = 0.5
"""Seconds in which workers usually connect to a new engine. One that connects later is not awaited."""
TAKEOVER_S = 5.0
"""Seconds that a takeover waits for the copies of connected workers. One that hangs must not stop all keys."""


class HeldLedger:
    """Counts jobs of all engines, if this one holds the ledger. Any thread may call.

    owner: the connection of the job's HTTP worker. A worker that reconnects restores its jobs, so the end of its
    earlier connection must not remove them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._quotas = Quotas()
        self._owners: dict[str, object] = {}
        self._cut_off: OrderedDict[str, Usage] = OrderedDict()
        """Jobs that ended with their connection, newest last. They have paid, also if nobody got the answer."""
        self._restored: set[object] = set()
        self._unrestored: set[object] = set()
        """connected workers, by whether they restored their copies of the ledger"""
        self._opened_at = time.monotonic()
        self._takeover_ends_at: float | None = None
        """time.monotonic() until which workers that lost an earlier holder are awaited; None: none lost one"""

    def add_worker(self, worker: object) -> None:
        self._unrestored.add(worker)

    @property
    def is_complete(self) -> bool:
        """Whether it counts what all workers know of a lost holder's ledger.

        One of them may know of usage that the others have not heard of.
        """
        ends_at = self._takeover_ends_at
        if ends_at is None:
            return True
        return time.monotonic() >= (ends_at if self._unrestored else self._opened_at + CONNECT_S)

    def acquire(self, usage: Usage, owner: object) -> ErrorInfo | None:
        """Returns the error if a limit is reached."""
        paid = self._cut_off.pop(usage.job_id, None)
        if paid is not None:  # its worker lost the answer and counts it again
            self._quotas.refund(paid)
        is_new = paid is None and usage.job_id not in self._quotas
        refusal = self._quotas.count(usage)
        if is_new:
            self._metrics.observe_client_request(usage.client, usage.prompt_tokens, refusal is not None)
        if refusal is None:
            self._owners[usage.job_id] = owner
        return refusal

    def report(self, report: UsageReport) -> None:
        """Charge a job's uncharged tokens, and remove the job at its end."""
        self._observe(self._quotas.charge(report.job_id, report.sampled, report.replayed, is_total=True))
        if report.done:
            self._owners.pop(report.job_id, None)
            self._quotas.end(report.job_id, report.refund)

    def observe(self, events: JobEvents, owner: object) -> None:
        """Charge a step's tokens of a job that runs here. Its HTTP worker reports the total again."""
        if not self._quotas.has_jobs:
            return
        job_id = original_id(events.job_id)
        self._observe(self._quotas.charge(job_id, events.num_sampled, events.num_replayed))
        if events.done and events.error is None and self._owners.get(job_id) is owner:
            self._owners.pop(job_id, None)
            self._quotas.end(job_id)

    def _observe(self, charged: CountedJob | None) -> None:
        if charged is not None:
            self._metrics.observe_client_tokens(charged.usage.client, charged.sampled, charged.replayed)

    def restore(self, known: RestoreQuotas, owner: object) -> None:
        if known.has_moved and self._takeover_ends_at is None:
            self._takeover_ends_at = time.monotonic() + TAKEOVER_S
        for job in known.jobs:
            self._cut_off.pop(job.usage.job_id, None)
        self._owners.update((job.usage.job_id, owner) for job in known.jobs)
        self._quotas.merge(known.balances, known.jobs)
        self._restored.add(owner)
        self._unrestored.discard(owner)

    def release(self, worker: object) -> None:
        """Handle that the worker counts its jobs elsewhere. Its copy will be missing when it comes back."""
        self._remove_worker(worker)
        self._unrestored.add(worker)

    def _remove_worker(self, worker: object) -> None:
        self._unrestored.discard(worker)
        self._restored.discard(worker)
        if not self._restored:
            self._takeover_ends_at = None

    def end_all(self, owner: object) -> None:
        """End the jobs of a worker that is gone."""
        self._remove_worker(owner)
        for job_id in [job_id for job_id, known in self._owners.copy().items() if known is owner]:
            self._owners.pop(job_id, None)
            if (job := self._quotas.end(job_id)) is not None:
                self._cut_off[job_id] = job.usage
        while len(self._cut_off) > _MAX_CUT_OFF:
            self._cut_off.popitem(last=False)

    def balances(self) -> list[Balance]:
        """Return clients' balances. Leaves out clients that have used nothing."""
        return self._quotas.balances()
