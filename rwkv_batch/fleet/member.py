"""One engine as a fleet sees it: its link, what it has to do, whether it takes work."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.fleet.dial import dial
from rwkv_batch.fleet.routing import load_of
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.ipc.wire import NO_LOAD
from rwkv_batch.request import Job, Load

POLL_INTERVAL_S = 0.25
MAX_SILENT_POLLS = 8
"""An engine of which nothing was heard in so many looks is lost: after two seconds, unless this process stood still
too, which counts looks and not time."""
MAX_SILENT_POLLS_LAST_ENGINE = 40
"""The same where no other engine takes work: its loss helps nobody, and a busy machine may hold up its process."""


class Member:
    """See above. Any thread."""

    def __init__(self, info: ServedModel, on_change: Callable[[Member, bool], None]) -> None:
        self.info = info
        self.client = EngineClient(dial(info.address), self._changed, self._reported)
        self.has_refused = False
        """It has refused work because it dies or drains; over when it is connected anew."""
        self.connection = 0
        """Which one it is: every time that it comes or is lost begins another."""
        self.assigned_rows = 0
        """of jobs under way that this process has handed to it; the fleet counts them"""
        self._on_change = on_change
        self._lock = threading.Lock()
        self._load = NO_LOAD
        self._sent: dict[str, float] = {}
        """what jobs weigh that are on their way to it: its reports do not count them"""
        self._num_received = 0
        self._silent_polls = 0

    @property
    def name(self) -> str:
        """The engine's."""
        return self.info.engine

    @property
    def is_available(self) -> bool:
        """Whether jobs may be handed to it."""
        return self.client.is_connected and not self.has_refused and not self.info.is_draining

    @property
    def load(self) -> float:
        """Its last report and what is on its way to it, as `choose` counts."""
        with self._lock:
            return load_of(self._load.rows, self._load.prompt_tokens) + sum(self._sent.values())

    @property
    def num_unanswered(self) -> int:
        """Jobs on their way to it: its last report is older than they are."""
        return len(self._sent)

    @property
    def report(self) -> Load:
        """Its last report."""
        return self._load

    @property
    def leaves(self) -> ErrorInfo:
        """What a request is told that it does not take any more, if no other one comes: the service goes on."""
        message = f"{self.name} is removed or started anew, and no other engine takes work; try again in a moment"
        return ErrorInfo(kind=ErrorKind.DRAINING, message=message, retry_after_s=2.0)

    def sent(self, job: Job) -> None:
        """A job is being handed to it."""
        with self._lock:
            self._sent[job.job_id] = load_of(job.num_rows, sum(row.num_prompt_tokens for row in job.rows))

    def refused(self, job_id: str) -> None:
        """It does not take the job."""
        with self._lock:
            self._sent.pop(job_id, None)

    def fails(self, connection: int) -> None:
        """It has refused work on that connection: it gets none before the next one."""
        with self._lock:
            self.has_refused = self.has_refused or connection == self.connection

    def poll(self, is_last: bool = False) -> None:
        """Called every `POLL_INTERVAL_S`: an engine that says nothing is given up, later if no other one takes work."""
        num_received, self._num_received = self._num_received, self.client.num_received
        self._silent_polls = (
            0 if num_received != self._num_received or not self.client.is_connected else self._silent_polls + 1
        )
        if self._silent_polls >= (MAX_SILENT_POLLS_LAST_ENGINE if is_last else MAX_SILENT_POLLS):
            self._silent_polls = 0
            self.client.drop()

    def _reported(self, load: Load, job_id: str | None) -> None:
        with self._lock:
            self._load = load
            if job_id is not None:
                self._sent.pop(job_id, None)

    def _changed(self, is_connected: bool) -> None:
        with self._lock:
            self._sent.clear()
            self.connection += 1
            self.has_refused = False
        self._on_change(self, is_connected)
