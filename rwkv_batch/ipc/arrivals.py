"""What an engine has to do, with the jobs that its thread has not seen: it takes them between two steps."""

from __future__ import annotations

import threading
from typing import Protocol

from rwkv_batch.request import Job, Load


class HasLoad(Protocol):
    """An engine."""

    @property
    def load(self) -> Load:
        """What it knows that it has to do. Any thread."""


class Arrivals:
    """Jobs on their way to an engine's thread. Any thread."""

    def __init__(self, engine: HasLoad) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._rows = self._prompt_tokens = 0

    def add(self, job: Job) -> None:
        """A job is handed to the engine."""
        self._count(job, 1)

    def remove(self, job: Job) -> None:
        """The engine has taken it, or refused it."""
        self._count(job, -1)

    def _count(self, job: Job, times: int) -> None:
        tokens = sum(row.num_prompt_tokens for row in job.rows)
        with self._lock:
            self._rows += times * job.num_rows
            self._prompt_tokens += times * tokens

    @property
    def load(self) -> Load:
        """The engine's and theirs. A job that the engine takes meanwhile is counted twice, and never not at all."""
        with self._lock:
            rows, prompt_tokens = self._rows, self._prompt_tokens
        known = self._engine.load
        return Load(known.rows + rows, known.prompt_tokens + prompt_tokens)
