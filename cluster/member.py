"""One engine as a fleet sees it: its link, what it has to do, whether it takes work."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cluster.choose import load_of
from cluster.dial import dial
from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.ipc.wire import NO_LOAD
from rwkv_batch.request import Job, Load

LOOK_S = 0.25
SILENT_LOOKS = 8
"""An engine of which nothing was heard in so many looks is lost: after two seconds, unless this process stood still
too, which counts looks and not time."""
LAST_SILENT_LOOKS = 40
"""The same where no other engine takes work: its loss helps nobody, and a busy machine may hold up its process."""


class Member:
    """See above. Any thread."""

    def __init__(self, told: ServedModel, on_change: Callable[[Member, bool], None]) -> None:
        self.told = told
        self.client = EngineClient(dial(told.address), self._changed, self._reported)
        self.is_failing = False
        """It has refused work because it dies or drains; over when it is connected anew."""
        self.connection = 0
        """Which one it is: every time that it comes or is lost begins another."""
        self.given_rows = 0
        """of jobs under way that this process has handed to it; the fleet counts them"""
        self._on_change = on_change
        self._lock = threading.Lock()
        self._load = NO_LOAD
        self._sent: dict[str, float] = {}
        """what jobs weigh that are on their way to it: its reports do not count them"""
        self._heard = 0
        self._silent_looks = 0

    @property
    def name(self) -> str:
        """The engine's."""
        return self.told.engine

    @property
    def takes_work(self) -> bool:
        """Whether jobs may be handed to it."""
        return self.client.is_connected and not self.is_failing and not self.told.is_draining

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
            self.is_failing = self.is_failing or connection == self.connection

    def look(self, is_last: bool = False) -> None:
        """Called every `LOOK_S`: an engine that says nothing is given up, later if no other one takes work."""
        heard, self._heard = self._heard, self.client.num_heard
        self._silent_looks = 0 if heard != self._heard or not self.client.is_connected else self._silent_looks + 1
        if self._silent_looks >= (LAST_SILENT_LOOKS if is_last else SILENT_LOOKS):
            self._silent_looks = 0
            self.client.drop()

    def _reported(self, load: Load, job_id: str | None) -> None:
        with self._lock:
            self._load = load
            if job_id is not None:
                self._sent.pop(job_id, None)

    def _changed(self, is_there: bool) -> None:
        with self._lock:
            self._sent.clear()
            self.connection += 1
            self.is_failing = False
        self._on_change(self, is_there)
