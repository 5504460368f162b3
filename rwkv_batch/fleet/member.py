"""One engine of a fleet: its link by Unix socket or as a Ray actor, its load, its availability."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.fleet.actors.plan import PREFIX, parse_address
from rwkv_batch.fleet.routing import load_of
from rwkv_batch.ipc.client import Connect, EngineClient, unix_connector
from rwkv_batch.ipc.served_model import ModelStatus, ServedModel
from rwkv_batch.ipc.wire import NO_LOAD
from rwkv_batch.request import Job, Load


def dial(address: str) -> Connect:
    if not address.startswith(PREFIX):
        return unix_connector(address)
    from rwkv_batch.fleet.actors.link import actor_connector

    return actor_connector(parse_address(address))


POLL_INTERVAL_S = 0.25
MAX_SILENT_POLLS = 8
"""Polls without a message after which an engine is lost: two seconds.

Counting polls instead of time ignores pauses of this process.
"""
MAX_SILENT_POLLS_LAST_ENGINE = 40
"""The same for the only available engine. Giving it up helps no job, and a busy machine may delay its messages."""
CONNECT_TIMEOUT_S = 2.0
"""Seconds after which a ready engine without a connection is not expected."""


class Member:
    """One engine of a fleet. Any thread."""

    def __init__(self, info: ServedModel, on_change: Callable[[Member, bool], None]) -> None:
        self.info = info
        self.client = EngineClient(dial(info.address), self._changed, self._reported)
        self.has_refused = False
        """whether it refused work because it ends or drains; reset on reconnection"""
        self.connection = 0
        """number of the connection, increased when the engine connects or is lost"""
        self.is_linked = False
        """whether it is connected, changed together with `connection`"""
        self.assigned_rows = 0
        """rows of jobs in flight that this process sent to it; the fleet counts them"""
        self._on_change = on_change
        self._expected_until = 0.0
        """time.monotonic() until which its first connection is expected"""
        self._new_until = 0.0
        self._lock = threading.Lock()
        self.report = NO_LOAD
        """its last report"""
        self._sent: dict[str, float] = {}
        """load of each job that is on its way to the engine and not in its reports yet"""
        self._num_received = 0
        self._silent_polls = 0
        if info.status is ModelStatus.READY:
            self._expect()

    def update(self, info: ServedModel) -> None:
        if info.status is ModelStatus.READY and self.info.status is not ModelStatus.READY:
            self._expect()
        self.info = info

    def _expect(self) -> None:
        self._expected_until = time.monotonic() + CONNECT_TIMEOUT_S

    @property
    def name(self) -> str:
        return self.info.engine

    @property
    def is_available(self) -> bool:
        return self.client.is_connected and not self.has_refused and not self.info.is_draining

    @property
    def is_expected(self) -> bool:
        """Whether it became ready and this process will soon connect to it."""
        return not self.is_linked and time.monotonic() < self._expected_until

    @property
    def is_new(self) -> bool:
        """Whether it connected a moment ago. An engine that started before it may still be seen as loading."""
        return time.monotonic() < self._new_until

    @property
    def load(self) -> float:
        """Return the engine's load, in the unit of `choose`. It is its last report and the jobs on their way."""
        with self._lock:
            return load_of(self.report.rows, self.report.prompt_tokens) + sum(self._sent.values())

    @property
    def num_unanswered(self) -> int:
        """Number of jobs on their way to the engine. Its last report does not include them."""
        return len(self._sent)

    @property
    def draining_error(self) -> ErrorInfo:
        """The error of a job that it refuses while draining.

        It is used if no other engine comes. The service itself continues.
        """
        message = f"{self.name} is being removed or restarted, and no other engine accepts work; retry in 2 s"
        return ErrorInfo(kind=ErrorKind.DRAINING, message=message, retry_after_s=2.0)

    def on_sent(self, job: Job) -> None:
        with self._lock:
            self._sent[job.job_id] = load_of(job.num_rows, sum(row.num_prompt_tokens for row in job.rows))

    def on_refused(self, job_id: str) -> None:
        with self._lock:
            self._sent.pop(job_id, None)

    def mark_failed(self, connection: int) -> None:
        """Send it no more work on this connection, because it refused some."""
        with self._lock:
            self.has_refused = self.has_refused or connection == self.connection

    def poll(self, is_last: bool = False) -> None:
        """Drop the connection if the engine is silent. Called every `POLL_INTERVAL_S`.

        is_last: no other engine accepts work, so wait longer
        """
        num_received, self._num_received = self._num_received, self.client.num_received
        self._silent_polls = (
            0 if num_received != self._num_received or not self.client.is_connected else self._silent_polls + 1
        )
        if self._silent_polls >= (MAX_SILENT_POLLS_LAST_ENGINE if is_last else MAX_SILENT_POLLS):
            self._silent_polls = 0
            self.client.drop()

    def _reported(self, load: Load, job_id: str | None) -> None:
        with self._lock:
            self.report = load
            if job_id is not None:
                self._sent.pop(job_id, None)

    def _changed(self, is_connected: bool) -> None:
        with self._lock:
            self._sent.clear()
            if self.connection == 0:
                self._new_until = time.monotonic() + CONNECT_TIMEOUT_S
            self.connection += 1
            self.is_linked = is_connected
            self._expected_until = 0.0
            self.has_refused = False
        self._on_change(self, is_connected)
