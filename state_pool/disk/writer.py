"""The thread with the only write connection. Commits turns first, in groups; writes states chunk by chunk."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from state_pool.crash_points import reach
from state_pool.disk import operations, statements
from state_pool.disk.checkpoint_objects import CheckpointObjects
from state_pool.disk.membership import HEARTBEAT_INTERVAL_S, Membership, begin_write, first_state_number, last_numbers
from state_pool.disk.state_store import CommitInDoubt, Connection, ServerUnavailable, StateStore
from state_pool.disk.state_writes import StateWrites, Uploads
from state_pool.disk.statements import GarbageState
from state_pool.disk.wal import WriteAheadLog
from state_pool.disk.worker_threads import RECONNECT_INTERVAL_S, PoolThread, ReconnectTimeout
from state_pool.errors import PoolError, SessionNotFound
from state_pool.layout import Layout

logger = logging.getLogger(__name__)

MAX_JOBS_PER_COMMIT = 256
_GARBAGE_CHUNKS = 4
_GARBAGE_ROUNDS = 8
"""Under constant load, one round in this many collects garbage."""
_IDLE_S = 0.5
_TRANSACTION_BYTES = 3 * 8192
_RECOUNT_INTERVAL_S = 60.0
"""Interval for recounting object bytes, to include other engines' changes."""


class Writer:
    """Writes jobs of the engine thread. Results go back through `deliver`."""

    def __init__(
        self,
        database: StateStore,
        connection: Connection,
        *,
        layout: Layout,
        fingerprint: str,
        retain: int,
        queue: int,
        deliver: operations.Deliver,
        on_death: Callable[[], None],
        member: Membership | None = None,
        sweep: bool = True,
        objects: CheckpointObjects | None = None,
        stores_objects: bool = False,
    ) -> None:
        """- `member`: this engine among those that share the database
        - `sweep`: no other engine has the database open yet
        - `objects`: the checkpoint store, if there is one
        - `stores_objects`: new states go there
        """
        self.stats = operations.WriterStats()
        self.member = member
        self._database = database
        self._connection = connection
        self._fingerprint = fingerprint
        self._queue = queue
        self._deliver = deliver
        self._changed = threading.Condition()
        self._small_jobs: deque[tuple[operations.SmallJob, operations.Done]] = deque()
        self._staged = operations.StagingQueue()
        self._objects = objects
        self._uploads: Uploads | None = None
        if objects is not None and stores_objects:
            self._uploads = Uploads(objects, layout, self._staged, self._changed, self._state_failed)
        self._next_count = 0.0
        self._stopping = False
        last_row, last_state = last_numbers(connection)
        self.next_row = last_row + 1 if member is None else member.first_row
        self._states = StateWrites(connection, layout, fingerprint, retain, member, last_state)
        self._garbage = deque(statements.orphaned_states(connection) if sweep else ())
        self._measure()
        self._rounds = 0
        self._log = WriteAheadLog(connection, database.open_checkpointer(), self._changed, on_death)
        self._discard(self._sweep_at_start() if sweep else ())
        self._server = ReconnectTimeout()
        self._thread = PoolThread("state-pool-writer", self._run, on_death)

    # -- engine thread ---------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        return self._thread.failure or self._log.failure

    @property
    def queued(self) -> tuple[int, int]:
        """Return (small jobs, states) that wait or are being written."""
        return len(self._small_jobs), len(self._staged)

    @property
    def has_room_for_state(self) -> bool:
        """Whether another state may be queued. Each holds its host buffer until it is written."""
        return self.queued[1] < self._queue

    @property
    def is_collecting_garbage(self) -> bool:
        return bool(self._garbage)

    def submit(self, job: operations.SmallJob, done: operations.Done) -> None:
        """Queue a small job. The callers bound the number: a session has one running turn."""
        with self._changed:
            if isinstance(job, operations.Delete):
                self._forget_states(set(job.row_ids))
            self._small_jobs.append((job, done))
            self._changed.notify()

    def submit_state(self, job: operations.Checkpoint, done: operations.Done) -> None:
        """Queue a state. Check `has_room_for_state` first."""
        with self._changed:
            self._staged.waiting.append(operations.StagedState(job, done))
            self._changed.notify()

    def close(self) -> None:
        """Write all queued jobs and end the thread. Blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _forget_states(self, row_ids: set[int]) -> None:
        """Remove queued states of deleted sessions. They must not reappear after the delete."""
        being_written = self._staged.current
        for staged in self._staged.forget(row_ids):
            if (
                staged.stored is None or staged is not being_written
            ):  # otherwise its row may already be committed; the delete removes it
                self._abandon_state(staged)
            self._report(staged.done, SessionNotFound("the session was deleted while its state was being stored"))

    def _abandon_state(self, staged: operations.StagedState) -> None:
        """Make the written part of a state garbage. An object being uploaded is deleted after its upload."""
        if staged.stored is not None and self._objects is not None:
            self._objects.delete(staged.stored.key)
        elif staged.chunks_written:
            self._garbage.append(staged.state_number)

    # -- writer thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_once():
            self._rounds += 1
        if self.member is not None:
            self._try(self.member.leave)  # if it fails, others notice the timeout
        self._try(partial(self._database.before_close, self._connection))
        self._log.close()
        self._connection.close()

    @property
    def _has_work(self) -> bool:
        staged = self._staged.waiting or self._staged.current
        return bool(self._small_jobs or staged or self._garbage or self._log.has_uncheckpointed_rest)

    @property
    def _wait_timeout_s(self) -> float | None:
        """Return the seconds to wait for work; None: without a limit."""
        if self.member is not None:
            return HEARTBEAT_INTERVAL_S
        return None if self._log.is_checkpointed else _IDLE_S

    def _run_once(self) -> bool:
        """Commit waiting turns, then one piece of other work. Returns False when stopped and done."""
        with self._changed:
            if not (self._has_work or (self._stopping and not self._staged.uploading)):
                self._changed.wait(self._wait_timeout_s)
            idle = not (self._has_work or self._staged.uploading)
            group = [self._small_jobs.popleft() for _ in range(min(len(self._small_jobs), MAX_JOBS_PER_COMMIT))]
            staging = self._staged.next()
        if self.member is not None and self.member.heartbeat_due:
            # After a failure it is due again. Meanwhile others may regard this engine as lost.
            self._try(partial(self._heartbeat, self.member))
        if group:
            self._commit_group(group)
        if staging is not None:
            self._write_state(staging)
        elif self._garbage and (not group or self._rounds % _GARBAGE_ROUNDS == 0):
            self._collect()
        failure = self._log.checkpoint_if_needed(idle)
        self.stats.degraded = self.stats.degraded or failure  # the reason of a failed write says more
        return not (idle and self._stopping)

    def _commit_group(self, group: list[tuple[operations.SmallJob, operations.Done]]) -> None:
        started_at = time.monotonic()
        error = self._transaction([job for job, _ in group])
        in_doubt = isinstance(error, CommitInDoubt)
        while isinstance(error, ServerUnavailable) and self._wait_to_retry(started_at):
            error = self._transaction([job for job, _ in group])
            in_doubt = in_doubt or isinstance(error, CommitInDoubt)
        if error is not None and len(group) > 1 and not operations.is_environment_error(error):
            # One job is at fault: commit each on its own, to keep the others.
            for job, done in group:
                error = self._transaction([job])
                self._report(done, operations.reported_error(error, job, in_doubt or isinstance(error, CommitInDoubt)))
            return
        for job, done in group:
            self._report(done, operations.reported_error(error, job, in_doubt))

    def _wait_to_retry(self, started_at: float) -> bool:
        """Wait before another attempt. Returns False after the timeout or at shutdown.

        A retry finds out whether a commit in doubt succeeded. `started_at`: see `ReconnectTimeout`.
        """
        if not self._server.may_retry(started_at) or self._stopping:
            return False
        time.sleep(RECONNECT_INTERVAL_S)
        return True

    def _transaction(self, jobs: list[operations.SmallJob]) -> Exception | None:
        garbage: list[GarbageState] = []

        def write() -> None:
            begin_write(self._connection, self.member)
            for job in jobs:
                garbage.extend(statements.apply(self._connection, job, self._fingerprint, self.member))
            reach("before_commit")
            self._commit()
            reach("after_commit")

        error = self._try(write)
        if error is not None:
            return error
        self._discard(garbage)
        self._succeeded(_TRANSACTION_BYTES + 1024 * len(jobs))
        self.stats.turns += sum(isinstance(job, operations.Append) for job in jobs)
        return None

    def _try(self, work: Callable[[], None]) -> Exception | None:
        """Run `work`. On an error, roll back and return it; the thread continues."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - e.g. a number that SQLite cannot store: fails the jobs only
            self._roll_back(error)
            return error
        return None

    def _commit(self) -> None:
        """Commit the transaction. Raises CommitInDoubt if the outcome is unknown."""
        try:
            self._connection.execute("COMMIT")
        except ServerUnavailable as error:
            raise CommitInDoubt(str(error)) from error

    def _heartbeat(self, member: Membership) -> None:
        """Write a heartbeat. The partial states of lost engines become garbage."""
        begin_write(self._connection, self.member)
        lost = member.heartbeat()
        self._connection.execute("COMMIT")
        for engine in lost:
            logger.warning("engine %d sends no heartbeat: other engines may take over its sessions", engine)
            first, last = first_state_number(engine), first_state_number(engine + 1)
            self._garbage.extend(statements.orphaned_states(self._connection, first, last))

    def _write_state(self, staging: operations.StagedState) -> None:
        """Write chunks until done or until a turn waits. The last transaction writes the state's row."""
        if self._uploads is not None and staging.stored is None:
            self._uploads.begin(staging, self._states.new_number())
            return
        try:
            self._states.split(staging)
            begin_write(self._connection, self.member)
            written = self._states.put_chunks(staging, lambda: not self._small_jobs)
            replaced = [] if staging.chunks else self._states.publish(staging)
            self._commit()
        except Exception as error:  # noqa: BLE001 - copies and SQLite may fail: fails the state, not the thread
            self._roll_back(error)
            self._state_failed(staging, error)
            return
        self._succeeded(written + _TRANSACTION_BYTES)
        if not staging.chunks:
            self._state_written(staging, replaced)
            return
        with self._changed:
            if self._staged.current is not staging:  # a delete came first, maybe before the first chunk
                self._garbage.append(staging.state_number)

    def _state_written(self, staging: operations.StagedState, replaced: list[GarbageState]) -> None:
        reach("after_checkpoint")
        self.stats.states += 1
        self.stats.state_bytes += staging.num_bytes
        if staging.stored is not None:
            self.stats.object_bytes += staging.num_bytes
        self._discard(replaced)
        with self._changed:
            if not self._staged.finish(staging):
                return  # a delete came first; its job removes the row
        self._report(staging.done, None)

    def _state_failed(self, staging: operations.StagedState, error: Exception) -> None:
        in_doubt = isinstance(error, CommitInDoubt) and not staging.chunks  # otherwise no row could be committed
        with self._changed:
            is_current = self._staged.finish(staging)
            # A row may name the object after a commit in doubt: leave it to a sweep. The delete has queued the chunks.
            is_garbage = is_current if staging.stored is None else not in_doubt
            if is_garbage:
                self._abandon_state(staging)
            self._changed.notify()
        if not is_current:
            return  # the delete has reported the error
        self._report(staging.done, operations.reported_error(error, staging.job, in_doubt))

    def _collect(self) -> None:
        """Delete a few garbage chunks, so that turns do not wait."""
        state = self._garbage[0]
        try:
            begin_write(self._connection, self.member)
            empty = statements.delete_chunks(self._connection, state, _GARBAGE_CHUNKS)
            hidden = statements.sweep_hidden(self._connection) if empty and len(self._garbage) == 1 else []
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - the rest is found at the next start
            self._roll_back(error)
            self._garbage.popleft()
            return
        self._discard(hidden)
        self._try_to_measure()  # in a full database there may be no other commit to measure after
        if empty:
            self._garbage.popleft()
        self._log.written(_TRANSACTION_BYTES)

    def _discard(self, garbage: Iterable[GarbageState]) -> None:
        """Delete states whose rows are gone, after that commit. Without a store, their objects are left to a sweep."""
        for old in garbage:
            if old.object_key is None:
                self._garbage.append(old.state)
                continue
            self.stats.object_bytes -= old.num_bytes
            if self._objects is not None:
                self._log.call_when_synced(partial(self._objects.delete, old.object_key))

    def _sweep_at_start(self) -> list[GarbageState]:
        self._connection.execute("BEGIN IMMEDIATE")
        garbage = statements.sweep_hidden(self._connection)
        self._connection.execute("COMMIT")
        return garbage

    def _succeeded(self, num_bytes: int) -> None:
        self.stats.commits += 1
        self._server.reset()
        self.stats.degraded = None
        self._log.written(num_bytes)
        self._try_to_measure()

    def _try_to_measure(self) -> None:
        try:
            self._measure()
        except sqlite3.Error as error:  # the write itself has succeeded
            self.stats.degraded = operations.describe_error(error)

    def _measure(self) -> None:
        self.stats.used_bytes = self._database.used_bytes(self._connection)
        now = time.monotonic()
        if self._objects is not None and now >= self._next_count:
            self.stats.object_bytes = statements.object_bytes(self._connection)
            self._next_count = now + _RECOUNT_INTERVAL_S

    def _roll_back(self, error: Exception) -> None:
        self.stats.failures += 1
        if isinstance(error, sqlite3.Error):
            self.stats.degraded = operations.describe_error(error)
        elif not isinstance(error, PoolError):
            logger.error("a write of the state pool failed", exc_info=error)
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as second:
                self.stats.degraded = operations.describe_error(second)

    def _report(self, done: operations.Done, error: Exception | None) -> None:
        reach("before_acknowledgement")
        self._deliver(lambda: done(error))
