"""Runs one batch, from its input file to its result files. A stopped batch continues where it was."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from programs.backends.backend import UNREACHABLE, Reply
from programs.backends.handlers import call_handler
from programs.batch.files import RunFiles
from programs.batch.inputs import DamagedInputError, Input
from programs.batch.lines import LineWorker, Outcome
from programs.batch.outputs import OutputFile, ReorderBuffer
from programs.batch.progress import RunStats
from programs.batch.run import Run
from programs.batch.sidecar import Sidecar
from programs.record import Record, RunError
from programs.serve.batches.batch_format import MAX_LINES, BatchFormat, BatchTask, error_entry, validate_lines
from routes.context import Context
from routes.file_store import ACTIVE_STATUSES, Batch, Counts, Purpose, Result, Status, Store, StoredFile
from routes.translation import stored
from rwkv_batch.request import ClientLimits

IN_FLIGHT = 512
"""Lines of a batch that are in flight at the same time; the engine shares its running slots among clients."""
_MAX_RETRIES = 3
"""Tries of a line that failed for a reason that may pass."""
_MAX_BUSY_RETRIES = 10**6
"""Tries while the engine is busy or restarting. Practically unlimited: the completion window ends a batch."""
_MAX_REFUSED_S = 3600.0
"""A line fails if it is refused for this long and no line of its batch is answered: it is too large."""
_POLL_S = 0.5
_RESULT_TTL_S = 30 * 86400
_REJECTED_AT_ONCE = 256
_MAX_LINES_READ = 2 * MAX_LINES
"""Lines of a file with its blank ones."""
_MAX_EXPANSION = 250
"""Maximum size of a compressed file's lines, as a multiple of the file's size."""
_MIN_LIMIT_BYTES, _MAX_LIMIT_BYTES = 64 << 20, 1 << 30
"""The limit by size is at least and at most this, in bytes."""
_MESSAGES = {
    Status.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    Status.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


@dataclass(slots=True)
class _HandlerBackend:
    """Answers a batch's lines by the HTTP handlers, within this process. See Backend."""

    context: Context
    batch: Batch

    async def model(self) -> str:
        return ""  # each line names its own

    async def open(self) -> int:
        """Return the number of lines in flight: at most the API key's limit of rows."""
        rows = (self.batch.limits or {}).get("rows")
        return min(IN_FLIGHT, rows or IN_FLIGHT)

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        limits = None if self.batch.limits is None else ClientLimits(**self.batch.limits)
        return await call_handler(
            self.context, path, body, client=self.batch.client, owner=self.batch.owner, limits=limits
        )

    async def close(self) -> None: ...


@dataclass(slots=True)
class _RejectingWorker:
    """Rejects the remaining lines of a cancelled or expired batch."""

    status: Status

    async def open(self) -> int:
        """Return the number of lines in flight."""
        return _REJECTED_AT_ONCE

    async def outcome(self, record: Record) -> Outcome:
        code, message = _MESSAGES[self.status]
        return Outcome(problem=message, code=code, status=UNREACHABLE)  # no HTTP answer

    def on_committed(self, keys: list[bytes]) -> None:
        """Do nothing: LineWorker forgets answers that are on disk here."""


class _InputError(Exception):
    """The batch's input file cannot be read; trying again does not help. The message says why."""


class _StoppedError(Exception):
    """The run was stopped, so the lines are not needed."""


class _KeyRemovedError(Exception):
    """The batch's API key was removed from the keys file."""


class BatchJob:
    def __init__(
        self, store: Store, context: Context, batch: Batch, unix_time: Callable[[], float] = time.time
    ) -> None:
        """`unix_time`: returns the time that is compared with the batch's end, Unix time."""
        self._unix_time = unix_time
        self._store = store
        self._context = context
        self.batch = batch
        self.is_cancelled = batch.status is Status.CANCELLING
        """Set when its owner cancels it."""
        self.is_key_removed = False
        """Set when its owner's API key was removed."""
        self._is_stopped = False
        """Set when the process ends."""
        self._format = BatchFormat(batch.id, context.config.max_request_tokens)

    async def run(self) -> None:
        """Run the batch until it ends. Raises RunError for a failure that a later try may mend."""
        try:
            await self._run_steps()
            if stored.DELETED_KEY in (self.batch.metadata or {}) and self.batch.status not in ACTIVE_STATUSES:
                await asyncio.to_thread(stored.delete_document, self._store, self.batch)
        except _InputError as error:
            await self.fail(str(error), "invalid_file")
        except _KeyRemovedError:
            key = self.batch.key or self.batch.owner
            await self.fail(f"the API key {key} was removed from --keys-file", "api_key_removed")

    async def _run_steps(self) -> None:
        if self.batch.status is not Status.FINALIZING:
            self._check_key()
        if self.batch.status is Status.VALIDATING:
            await self._validate()
        if self.batch.status in (Status.IN_PROGRESS, Status.CANCELLING):
            ends_as = await self._run_lines()
            await self._set_status(Status.FINALIZING, ends_as=ends_as)
        if self.batch.status is Status.FINALIZING:
            await self._finalise()

    def _check_key(self) -> None:
        if self.is_key_removed:
            raise _KeyRemovedError

    async def fail(self, message: str, code: str = "internal") -> None:
        """Fail the batch for good. Lines that were answered are its results. Raises OSError."""
        await self._set_status(Status.FINALIZING, ends_as=Status.FAILED, errors=[error_entry(code, message)])
        await self._finalise()

    async def give_up(self, message: str) -> None:
        """Fail the batch because of its disk. Without results if they cannot be published. Raises OSError."""
        try:
            await self.fail(message, "storage_failed")
        except (RunError, OSError):
            await self._set_status(Status.FAILED, errors=[error_entry("storage_failed", message)])

    async def _set_status(self, status: Status, **changes: Any) -> None:
        def changed(batch: Batch) -> Batch:
            return batch.with_status(status, int(time.time()), **changes)

        self.batch = await asyncio.to_thread(self._store.update, self.batch.id, changed)

    async def _validate(self) -> None:
        try:
            count, errors = await asyncio.to_thread(self._check_lines)
        except _StoppedError:
            self._check_key()
            self.batch = await asyncio.to_thread(self._store.update, self.batch.id, lambda batch: batch)
            return
        except asyncio.CancelledError:
            self._is_stopped = True
            raise
        if errors:
            await self._set_status(Status.FAILED, errors=errors)
            return

        def begun(batch: Batch) -> Batch:
            batch = msgspec.structs.replace(batch, counts=Counts(total=count))
            if batch.status is Status.CANCELLING:
                return batch
            return batch.with_status(Status.IN_PROGRESS, int(time.time()))

        self.batch = await asyncio.to_thread(self._store.update, self.batch.id, begun)
        self.is_cancelled = self.batch.status is Status.CANCELLING

    def _check_lines(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of lines and their errors."""
        source = self._input(lambda: self.is_cancelled or self.is_key_removed or self._is_stopped)
        try:
            return validate_lines(self._format.read(source.lines()), self.batch.endpoint)
        except DamagedInputError:  # its own message names a path of the server
            raise _InputError(f"the file {self.batch.input_file_id} ends within its compressed data") from None
        finally:
            source.close()

    def _input(self, is_stopped: Callable[[], bool]) -> Input:
        """Open the file of lines. Raises _InputError if it is gone, RunError or OSError if it cannot be opened now.

        Reading raises _InputError above a limit, and _StoppedError.
        """
        path, name = self._store.content(self.batch.input_file_id), self.batch.input_file_id

        def check(num_lines: int, num_bytes: int) -> None:
            if is_stopped():
                raise _StoppedError
            if num_lines > _MAX_LINES_READ:
                raise _InputError(f"the file {name} has more than {_MAX_LINES_READ} lines, blank ones too; split it")
            if num_bytes > max_bytes:
                raise _InputError(
                    f"the file {name} has more than {max_bytes} bytes when decompressed; the limit is "
                    f"{_MAX_EXPANSION} times its size, at least {_MIN_LIMIT_BYTES} and at most {_MAX_LIMIT_BYTES}; "
                    "split it"
                )

        try:
            source = Input(str(path), check)
        except RunError:
            if path.exists():  # a failing disk, or no free descriptor
                raise
            raise _InputError(f"the file {name} was deleted") from None
        max_bytes = min(_MAX_LIMIT_BYTES, max(_MIN_LIMIT_BYTES, _MAX_EXPANSION * (source.size or 0)))
        return source

    def _path(self, suffix: str) -> Path:
        return self._store.runs / f"{self.batch.id}{suffix}"

    async def _run_lines(self) -> Status:
        """Answer lines until the batch ends, and reject the rest. Returns the status to end with. Raises RunError."""
        if Status.IN_PROGRESS.value not in self.batch.times:  # cancelled before its lines were checked: no results
            return Status.CANCELLED
        ends_as = self._status_now()
        if ends_as is Status.COMPLETED:
            backend = _HandlerBackend(self._context, self.batch)
            worker = LineWorker(
                backend, BatchTask(), _MAX_RETRIES, max_busy_retries=_MAX_BUSY_RETRIES, max_refused_s=_MAX_REFUSED_S
            )
            ends_as = await self._run(worker)
        self._check_key()
        if ends_as is not Status.COMPLETED:
            with contextlib.suppress(_InputError):  # the lines of a deleted file are not listed
                await self._run(_RejectingWorker(ends_as))
        return ends_as

    def _status_now(self) -> Status:
        """Return the status with which the batch must end now; COMPLETED if it may continue."""
        if self.is_key_removed:
            return Status.FAILED
        if self.is_cancelled:
            return Status.CANCELLED
        return Status.EXPIRED if self._unix_time() >= self.batch.expires_at else Status.COMPLETED

    async def _run(self, worker: LineWorker | _RejectingWorker) -> Status:
        stopped = threading.Event()
        source = self._input(stopped.is_set)
        try:
            files = await asyncio.to_thread(self._open_outputs)
        except BaseException:
            source.close()
            raise
        try:
            reorder_buffer = ReorderBuffer(keeps_order=False, previous=files.progress)
            run = Run(self._format.read(source.lines()), worker, files, reorder_buffer, RunStats(source.fraction))
            return await self._watch(asyncio.create_task(run.run()), files, can_stop=isinstance(worker, LineWorker))
        finally:
            stopped.set()
            files.close()
            source.close()

    def _open_outputs(self) -> RunFiles:
        """Open the result files.

        Cuts them to the lines that the sidecar lists as durable. Raises RunError or OSError, with all files closed: an
        open one would stay locked for the next try.
        """
        with contextlib.ExitStack() as opened:
            output, errors = (
                opened.enter_context(contextlib.closing(OutputFile(self._path(suffix), compression="")))
                for suffix in (".jsonl", ".errors.jsonl")
            )
            sidecar = opened.enter_context(contextlib.closing(Sidecar(self._path(".progress"))))
            progress = sidecar.begin(settings={}, input_digest="")  # the batch's id stands for both
            output.cut(progress.output_bytes)
            errors.cut(progress.errors_bytes)
            opened.pop_all()
        return RunFiles(output, errors, sidecar, self._format, progress, error_line=self._format.error)

    async def _watch(self, running: asyncio.Task[None], files: RunFiles, can_stop: bool) -> Status:
        """Wait for a run; stop it if the batch is cancelled or expires. Stores the progress. Returns the end status."""
        ends_as = Status.COMPLETED
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_POLL_S)
                await self._update_counts(files)
                if can_stop and not running.done() and (early := self._status_now()) is not Status.COMPLETED:
                    ends_as = early
                    break
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if ends_as is Status.COMPLETED:
            running.result()
        await self._update_counts(files)
        return ends_as

    async def _update_counts(self, files: RunFiles) -> None:
        done = files.progress
        counts = Counts(total=self.batch.counts.total, completed=done.answered, failed=done.failed)
        if counts != self.batch.counts:

            def counted(batch: Batch) -> Batch:
                return msgspec.structs.replace(batch, counts=counts)

            self.batch = await asyncio.to_thread(self._store.update, self.batch.id, counted)
        self.is_cancelled = self.is_cancelled or self.batch.status is Status.CANCELLING

    async def _finalise(self) -> None:
        """Publish the results as files. If the process ends meanwhile, the next one repeats it from the start."""
        output = await asyncio.to_thread(self._publish_result, ".jsonl", Result.OUTPUT)
        errors = await asyncio.to_thread(self._publish_result, ".errors.jsonl", Result.ERROR)
        for suffix in (".jsonl", ".errors.jsonl", ".progress"):  # last chance: a finished batch is not looked at again
            await asyncio.to_thread(self._path(suffix).unlink, missing_ok=True)
        await self._set_status(self.batch.ends_as, output_file_id=output, error_file_id=errors)

    def _publish_result(self, suffix: str, result: Result) -> str | None:
        """Return the id of a result's file; None if it is empty."""
        written = self._path(suffix)
        file_id = self.batch.result_id(result)
        content = self._store.content(file_id)
        if written.exists() and written.stat().st_size:
            written.rename(content)
        if not content.exists():
            return None
        now = int(time.time())
        file = StoredFile(
            id=file_id,
            owner=self.batch.owner,
            bytes=content.stat().st_size,
            created_at=now,
            filename=f"{self.batch.id}_{result}.jsonl",
            purpose=Purpose.BATCH_OUTPUT,
            expires_at=now + _RESULT_TTL_S,
        )
        self._store.add_existing_file(file)
        return file_id
