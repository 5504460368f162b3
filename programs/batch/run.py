"""The loop of a run: read a window, send its requests, write and sync the answers.

It runs on one event loop. Reads and writes run on threads. The window bounds the memory for inputs of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from programs.batch.files import RunFiles
from programs.batch.lines import Outcome
from programs.batch.outputs import FinishedRecord, ReorderBuffer
from programs.batch.progress import RunStats
from programs.record import Record, RunError

_WINDOW = (16, 4096)
"""Minimum and maximum number of records that are sorted by length.

In a larger window the first line could be the last to start. The answers that wait for it would be lost with the run.
"""
_WINDOW_BYTES = 32 << 20
_WINDOWS_AHEAD = 8
"""Windows that may wait for one slow line."""
_COMMIT_S = 0.2
_COMMIT_COMPRESSED_S = 2.0
"""Seconds between commits of compressed output, so that frames are not too small."""
_MAX_UNCOMMITTED = 32 << 20
"""Unsynced characters above which no new record starts."""


class Worker(Protocol):
    async def open(self) -> int:
        """Prepares the worker. Returns the number of records in flight. Raises RunError."""

    async def outcome(self, record: Record) -> Outcome:
        """Returns a record's outcome. Raises RunError if the backend is gone."""

    def on_committed(self, keys: list[bytes]) -> None:
        """Reports that the answers of these keys are durable."""


class Run:
    def __init__(
        self,
        records: Iterator[Record],
        worker: Worker,
        files: RunFiles,
        reorder_buffer: ReorderBuffer,
        stats: RunStats,
        max_in_flight: int = 0,
    ) -> None:
        """`max_in_flight`: requests in flight. 0: the number that keeps the backend busy."""
        self._records = records
        self._worker = worker
        self._files = files
        self._reorder_buffer = reorder_buffer
        self._stats = stats
        self._max_in_flight = max_in_flight
        self._slots: asyncio.Semaphore | None = None
        """None until the first request."""
        self._window = _WINDOW[0]
        self._tasks: set[asyncio.Task[None]] = set()
        self._progressed = asyncio.Event()
        self._closing = asyncio.Event()
        self._failure: BaseException | None = None
        self._can_commit = True

    async def run(self) -> None:
        """Answers every record. Raises RunError. Finished answers are kept if the disk allows it."""
        committing = asyncio.create_task(self._commit_loop())
        try:
            await self._start_records()
        finally:
            for task in self._tasks:
                task.cancel()
            self._closing.set()
            await committing
        self._raise_failure()
        await self._commit(is_last=True)

    async def _start_records(self) -> None:
        while True:
            window, end = await asyncio.to_thread(self._read)
            self._reorder_buffer.begin([record.index for record in window], end)
            if not window:
                break
            slots = self._slots or await self._open()
            window = [record for record in window if not self._is_finished(record.index)]
            for record in sorted(window, key=lambda record: record.size, reverse=True):
                await slots.acquire()
                self._raise_failure()
                task = asyncio.create_task(self._process_record(record))
                self._tasks.add(task)
                task.add_done_callback(self._on_record_done)
            await self._wait_until(self._can_read_more)
        await self._wait_until(lambda: not self._tasks)

    def _is_finished(self, index: int) -> bool:
        """Whether an earlier run finished a record that waited for others. It gets its place in the output."""
        if (texts := self._files.waiting.pop(index, None)) is None:
            return False
        self._reorder_buffer.end(index, FinishedRecord(*texts))
        self._stats.skipped += 1
        return True

    def _can_read_more(self) -> bool:
        """Whether the amount of unsynced records allows reading on."""
        return (
            self._reorder_buffer.unfinished <= _WINDOWS_AHEAD * self._window
            and self._reorder_buffer.uncommitted <= _MAX_UNCOMMITTED
        )

    async def _open(self) -> asyncio.Semaphore:
        """Opens the backend before the first request."""
        in_flight = await self._worker.open()
        in_flight = self._max_in_flight or in_flight
        self._window = min(max(_WINDOW[0], in_flight), _WINDOW[1])
        self._slots = asyncio.Semaphore(in_flight)
        self._stats.restart()
        return self._slots

    def _read(self) -> tuple[list[Record], int]:
        """Returns the next records not done, and the index after them."""
        window: list[Record] = []
        weight = end = 0
        for record in self._records:
            end = record.index + 1
            if self._reorder_buffer.is_done(record.index):
                self._stats.skipped += 1
                continue
            window.append(record)
            weight += record.size
            if len(window) >= self._window or weight >= _WINDOW_BYTES:
                break
        return window, end

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition. Raises the error of a failed line or commit."""
        while True:
            self._raise_failure()
            if condition():
                return
            self._progressed.clear()
            await self._progressed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _process_record(self, record: Record) -> None:
        outcome = Outcome() if record.verbatim is not None else await self._worker.outcome(record)
        self._reorder_buffer.end(record.index, self._files.finished_record(record, outcome))
        self._stats.count(outcome)

    def _on_record_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._slots is not None:
            self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._progressed.set()

    async def _commit_loop(self) -> None:
        """Commits finished records until the run closes, then once more."""
        pause_s = _COMMIT_COMPRESSED_S if self._files.is_compressed else _COMMIT_S
        while not self._closing.is_set():
            if self._reorder_buffer.has_output:
                await self._try_commit()
            try:
                await asyncio.wait_for(self._closing.wait(), pause_s)
            except TimeoutError:
                continue
        await self._try_commit()

    async def _try_commit(self) -> None:
        """Commits. A failure ends the run and all later commits."""
        if not self._can_commit:
            return
        try:
            await self._commit(is_last=False)
        except RunError as error:
            self._can_commit = False
            self._failure = error
        self._progressed.set()

    async def _commit(self, is_last: bool) -> None:
        batch = self._reorder_buffer.take()
        await asyncio.to_thread(self._files.commit, batch, is_last)
        self._worker.on_committed(list(batch.answers))
