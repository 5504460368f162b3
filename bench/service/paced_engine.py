"""An engine without a model: every row draws a token each step, a step takes as long as is said. For `service.streams`.

The environment's RWKV_BENCH_STEP_MS is the length of a step, RWKV_BENCH_LAUNCH_MS the part of it in which the engine's
thread computes and holds Python's lock, as launches do. Rows begin with the first step behind their arrival.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from app import Supervisor, log_style
from rwkv_batch.calls import CountJobs, EngineCall, GetStatus, Reply
from rwkv_batch.config import EngineConfig
from rwkv_batch.ipc.process import set_up_logging
from rwkv_batch.protocol import Admitted, Sink
from rwkv_batch.request import Delta, Finish, FinishReason, Job, JobEvents, Load
from settings import parse_settings

TEXT = b" the river ran past"


class _Row:
    def __init__(self, job: Job, sink: Sink) -> None:
        self.job, self.sink = job, sink
        self.arrived = time.monotonic()
        self.drawn = 0

    def step(self) -> JobEvents | None:
        """What a step brings: a delta each `chunk_size` tokens."""
        request = self.job.rows[0]
        self.drawn += 1
        over = self.drawn >= request.max_tokens
        if not over and (not request.chunk_size or self.drawn % request.chunk_size):
            return None
        finish = Finish(reason=FinishReason.LENGTH, prompt_tokens=len(request.prompt), completion_tokens=self.drawn)
        deltas = [Delta(0, TEXT, request.chunk_size, finish if over else None)]
        return JobEvents(job_id=self.job.job_id, deltas=deltas, done=over)


class PacedEngine:
    """A ManagedEngine. Takes jobs of one row."""

    def __init__(self, config: EngineConfig) -> None:
        self._step_s = float(os.environ.get("RWKV_BENCH_STEP_MS", "30")) / 1e3
        self._launch_s = float(os.environ.get("RWKV_BENCH_LAUNCH_MS", "0")) / 1e3
        self._rows: dict[str, _Row] = {}
        self._arrived: list[_Row] = []
        self._first_s: list[float] = []
        self._delivered: Callable[[], None] = lambda: None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the steps go on."""
        return self._thread.is_alive()

    @property
    def rounds(self) -> int | None:
        """See server.ManagedEngine: not watched."""
        return None

    def start(self) -> None:
        """Begin with the steps."""
        self._thread.start()

    def drain(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def stop(self) -> None:
        """End the steps."""
        self._stopping = True

    @property
    def load(self) -> Load:
        """See ManagedEngine."""
        return Load(len(self._rows), 0)

    def when_delivered(self, act: Callable[[], None]) -> None:
        """See server.ManagedEngine."""
        self._delivered = act

    def submit(self, job: Job, sink: Sink, admitted: Admitted) -> None:
        """See EngineProtocol."""
        admitted(None)
        self._arrived.append(_Row(job, sink))

    def cancel(self, job_id: str) -> None:
        """See EngineProtocol."""
        self._rows.pop(job_id, None)

    def call(self, call: EngineCall[Any], reply: Reply[Any]) -> None:
        """Knows GetStatus: `first_s`, seconds from arrival to first token of the rows with chunks of one token."""
        figures = {"jobs": {}, "running_rows": len(self._rows), "first_s": self._first_s}
        reply(figures if isinstance(call, GetStatus) else 0 if isinstance(call, CountJobs) else None)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            arrived, self._arrived = self._arrived, []
            self._rows |= {row.job.job_id: row for row in arrived}
            self._launch()
            due = max(due + self._step_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            self._deliver()

    def _launch(self) -> None:
        until = time.monotonic() + self._launch_s
        while time.monotonic() < until:
            pass

    def _deliver(self) -> None:
        for row in list(self._rows.values()):
            events = row.step()
            if events is None:
                continue
            if row.drawn == row.job.rows[0].chunk_size == 1:
                self._first_s.append(time.monotonic() - row.arrived)
            if events.done:
                self._rows.pop(row.job.job_id, None)
            row.sink(events)
        self._delivered()


if __name__ == "__main__":
    settings = parse_settings(sys.argv[1:], os.environ)
    set_up_logging("supervisor", log_style(settings))
    sys.exit(Supervisor(settings, "bench.service.paced_engine:PacedEngine").run())
