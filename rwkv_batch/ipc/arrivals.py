"""Adds jobs that the engine's thread has not admitted yet to the engine's load."""

from __future__ import annotations

import threading
from typing import Protocol

from rwkv_batch.request import Job, Load


class HasLoad(Protocol):
    @property
    def load(self) -> Load:
        """Any thread."""


class Arrivals:
    """Any thread."""

    def __init__(self, engine: HasLoad) -> None:
        self._engine = engine
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
        """A job may be counted twice for a moment, but is always counted."""
        with self._lock:
            rows, prompt_tokens = self._rows, self._prompt_tokens
        known = self._engine.load
        return Load(known.rows + rows, known.prompt_tokens + prompt_tokens)
