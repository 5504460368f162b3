"""The thread that owns the one write connection. Turns go first, in groups; states follow piece by piece."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from state_pool.codec import Layout, chunks_of, part_sizes
from state_pool.crash_points import reach
from state_pool.disk import statements
from state_pool.disk.applier import Applier, Small
from state_pool.disk.checkpoint_objects import ORPHAN_AGE_S, CheckpointObjects
from state_pool.disk.faults import in_words, is_outside
from state_pool.disk.membership import BEAT_S, DeclaredLost, Membership, first_state_of
from state_pool.disk.operations import Append, Checkpoint, Delete, Done, StoredObject
from state_pool.disk.staging import StagedStates, Staging
from state_pool.disk.state_store import CommitInDoubt, Connection, ServerAway, StateStore
from state_pool.disk.statements import OldState
from state_pool.disk.thread import PoolThread
from state_pool.disk.wal import WalMover, move
from state_pool.errors import DirectoryUnreachable, PoolError, SessionNotFound, TurnInDoubt, TurnNotStored

logger = logging.getLogger(__name__)

GROUP_LIMIT = 256
"""Most small jobs in one transaction."""
WAL_BYTES = 16 << 20
"""Written bytes after which the write-ahead log is moved into the file, between jobs."""
SERVER_PATIENCE_S = 10.0
"""How long turns wait for a server that is away, from when it was first; then they are told at once."""
_LOOK_AGAIN_S = 0.2
_GARBAGE_CHUNKS = 4
_GARBAGE_ROUNDS = 8
"""Under constant load, garbage is collected in one of so many rounds."""
_IDLE_S = 0.5
_TRANSACTION_BYTES = 3 * 8192
_COUNT_AGAIN_S = 60.0
"""Bytes of objects are counted from change to change; what other engines change, so often."""

Deliver = Callable[[Callable[[], None]], None]
"""Hands a callback to the engine thread."""


@dataclass(slots=True)
class WriterStats:
    """Counters of the writer thread; others only read them."""

    commits: int = 0
    turns: int = 0
    states: int = 0
    state_bytes: int = 0
    failures: int = 0
    used_bytes: int = 0
    """Bytes of the database in use, free pages not counted."""
    object_bytes: int = 0
    """Bytes of states that are objects of a checkpoint store."""
    degraded: str | None = None
    """Why the last write failed; None since one succeeded."""


class Writer:
    """Takes jobs from the engine thread; `deliver` brings their outcome back there."""

    def __init__(
        self,
        database: StateStore,
        connection: Connection,
        *,
        layout: Layout,
        fingerprint: str,
        retain: int,
        queue: int,
        deliver: Deliver,
        on_death: Callable[[], None],
        member: Membership | None = None,
        sweep: bool = True,
        objects: CheckpointObjects | None = None,
        puts_objects: bool = False,
    ) -> None:
        """`member`: this engine among those that share the database; `sweep`: no other has it open yet;
        `objects`: where states are beside the database; `puts_objects`: new ones too."""
        self.stats = WriterStats()
        self.member = member
        self._database = database
        self._connection = connection
        self._layout = layout
        self._state_bytes = sum(part_sizes(layout).values())
        self._applier = Applier(connection, layout, fingerprint, retain, member)
        self._queue = queue
        self._deliver = deliver
        self._changed = threading.Condition()
        self._small: deque[tuple[Small, Done]] = deque()
        self._staged = StagedStates()
        self._objects = objects
        self._puts_objects = puts_objects
        self._next_count = 0.0
        self._replaced: list[str] = []
        """Objects that no row names since commits that SQLite may not have synced yet."""
        self._synced: list[str] = []
        """Those that the move which is under way makes certain."""
        self._stopping = False
        self._wal_bytes = 0
        self.next_row, self._next_state = statements.first_numbers(connection)
        if member is not None:
            self.next_row = member.first_row
        self._garbage = deque(statements.orphaned_states(connection) if sweep else ())
        self._measure()
        self._rest_to_move = False
        self._rounds = 0
        mover = database.open_mover()
        self._mover = None if mover is None else WalMover(mover, self._moved, on_death)
        self._discard(self._sweep_at_start() if sweep else ())
        self._away_since: float | None = None
        self._thread = PoolThread("state-pool-writer", self._run, on_death)

    # -- engine thread ---------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why one of the threads that write is gone."""
        return self._thread.failure or (None if self._mover is None else self._mover.failure)

    @property
    def queued(self) -> tuple[int, int]:
        """(small jobs, states) that wait or are being written."""
        return len(self._small), len(self._staged)

    @property
    def takes_state(self) -> bool:
        """Whether another state may be handed over; each keeps its host buffer until it is written."""
        return self.queued[1] < self._queue

    @property
    def collecting(self) -> bool:
        """Whether chunks that nothing points to still have to be removed."""
        return bool(self._garbage)

    def submit(self, job: Small, done: Done) -> None:
        """Queue a turn, a delete or a mark. Bounded by the callers: a session has one turn under way."""
        with self._changed:
            if isinstance(job, Delete):
                self._forget_states(set(job.rows))
            self._small.append((job, done))
            self._changed.notify()

    def submit_state(self, job: Checkpoint, done: Done) -> None:
        """Queue a state; ask `takes_state` first."""
        with self._changed:
            self._staged.waiting.append(Staging(job, done))
            self._changed.notify()

    def close(self) -> None:
        """Write everything that was queued, then end the thread and close the connection. Blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _forget_states(self, rows: set[int]) -> None:
        """A delete overtakes states of the same sessions: they must not come back afterwards."""
        being_written = self._staged.current
        for staged in self._staged.forget(rows):
            if staged.stored is None or staged is not being_written:  # its row may be there before it is deleted
                self._give_up(staged)
            self._report(staged.done, SessionNotFound("the session was deleted while its state was being stored"))

    def _give_up(self, staged: Staging) -> None:
        """Nothing points to what was written of the state; what is being put goes when it has been."""
        if staged.stored is not None and self._objects is not None:
            self._objects.delete(staged.stored.key)
        elif staged.number:
            self._garbage.append(staged.state)

    # -- writer thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._round():
            self._rounds += 1
        if self.member is not None:
            self._leave(self.member)
        if self._mover is not None:
            self._mover.close()
            if move(self._connection).whole:  # else they are left to a sweep
                self._delete_objects([*self._synced, *self._replaced])
        self._connection.close()

    @property
    def _has_work(self) -> bool:
        staged = self._staged.waiting or self._staged.current
        return bool(self._small or staged or self._garbage or self._rest_to_move)

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for work; None: until there is some."""
        if self.member is not None:
            return BEAT_S
        return None if self._wal_bytes == 0 else _IDLE_S

    def _round(self) -> bool:
        """The turns that wait, then one piece of the rest; False when told to stop and nothing is left."""
        with self._changed:
            if not (self._has_work or (self._stopping and not self._staged.uploading)):
                self._changed.wait(self._patience)
            idle = not (self._has_work or self._staged.uploading)
            group = [self._small.popleft() for _ in range(min(len(self._small), GROUP_LIMIT))]
            staging = self._staged.next()
        if self.member is not None and self.member.beat_due:
            self._beat(self.member)
        if group:
            self._commit_group(group)
        if staging is not None:
            self._write_state(staging)
        elif self._garbage and (not group or self._rounds % _GARBAGE_ROUNDS == 0):
            self._collect()
        self._keep_wal_short(idle)
        return not (idle and self._stopping)

    def _commit_group(self, group: list[tuple[Small, Done]]) -> None:
        error = self._transaction([job for job, _ in group])
        in_doubt = isinstance(error, CommitInDoubt)
        while isinstance(error, ServerAway) and self._may_wait():
            error = self._transaction([job for job, _ in group])
            in_doubt = in_doubt or isinstance(error, CommitInDoubt)
        if error is not None and len(group) > 1 and not is_outside(error):
            # One job of the group is at fault: each for itself, so that the others are kept.
            for job, done in group:
                error = self._transaction([job])
                self._report(done, self._failure(error, job, in_doubt or isinstance(error, CommitInDoubt)))
            return
        for job, done in group:
            self._report(done, self._failure(error, job, in_doubt))

    def _may_wait(self) -> bool:
        """Whether the server is looked for once more; whether a commit was kept is seen when it is tried again."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now > self._away_since + SERVER_PATIENCE_S or self._stopping:
            return False
        time.sleep(_LOOK_AGAIN_S)
        return True

    def _transaction(self, jobs: list[Small]) -> Exception | None:
        garbage: list[OldState] = []
        try:
            self._begin()
            for job in jobs:
                garbage += self._applier.apply(job)
            reach("before_commit")
            self._commit()
            reach("after_commit")
        except Exception as error:  # noqa: BLE001 - a number that SQLite cannot hold, say: the jobs' failure
            self._roll_back(error)
            return error
        self._discard(garbage)
        self._succeeded(_TRANSACTION_BYTES + 1024 * len(jobs))
        self.stats.turns += sum(isinstance(job, Append) for job in jobs)
        return None

    def _commit(self) -> None:
        """Of what changes sessions. Raises CommitInDoubt when nothing says whether it was kept."""
        try:
            self._connection.execute("COMMIT")
        except ServerAway as error:
            raise CommitInDoubt(str(error)) from error

    def _begin(self) -> None:
        """An engine that was struck off comes back under a new number: fences say what is still its own."""
        try:
            self._applier.begin()
        except DeclaredLost:
            assert self.member is not None
            self._connection.execute("ROLLBACK")
            self.member.join()
            self._applier.begin()

    def _beat(self, member: Membership) -> None:
        """Say that this engine lives; what engines that do not have left half written is garbage."""
        try:
            self._begin()
            lost = member.beat()
            self._connection.execute("COMMIT")
            for engine in lost:
                logger.warning("engine %d has not been heard of for too long: its sessions may go on elsewhere", engine)
                first, last = first_state_of(engine), first_state_of(engine + 1)
                self._garbage.extend(statements.orphaned_states(self._connection, first, last))
        except Exception as error:  # noqa: BLE001 - tried again; meanwhile others may take this engine for lost
            self._roll_back(error)

    def _leave(self, member: Membership) -> None:
        try:
            member.leave()
        except Exception as error:  # noqa: BLE001 - others will notice by themselves
            self._roll_back(error)

    def _begin_pieces(self, staging: Staging) -> None:
        self._begin()
        if staging.stored is not None:  # under whichever number; its fence says whether it counts
            if time.time() > staging.put_at + ORPHAN_AGE_S / 2:
                raise TurnNotStored("so long after its state was put it may be taken for an orphan; it is stored again")
        elif staging.number == 0:
            staging.state = self._new_state()
        elif self.member is not None and not self.member.owns(staging.state):
            raise TurnNotStored("this engine was taken for lost while it stored a state; the state is stored again")

    def _new_state(self) -> int:
        if self.member is not None:
            return self.member.new_state()
        self._next_state += 1
        return self._next_state - 1

    def _upload(self, staging: Staging, objects: CheckpointObjects) -> None:
        """Have the state's object put while turns and other states go on; then its row is written."""
        reach("before_checkpoint")
        staging.state = self._new_state()
        staging.num_bytes, staging.put_at = self._state_bytes, time.time()

        def put(outcome: StoredObject | Exception) -> None:
            reach("within_checkpoint")
            if isinstance(outcome, Exception):
                self._state_failed(staging, outcome)
                return
            with self._changed:
                staging.stored = outcome
                if not self._staged.uploaded(staging):
                    self._give_up(staging)
                self._changed.notify()

        with self._changed:
            if self._staged.is_uploading(staging):
                objects.put(staging.state, staging.job.session.row, staging.job.host, list(self._layout), put)

    def _write_state(self, staging: Staging) -> None:
        """Write pieces until done or until somebody's turn waits; the last transaction makes them the state."""
        if self._puts_objects and self._objects is not None and staging.stored is None:
            self._upload(staging, self._objects)
            return
        written = 0
        try:
            if staging.number == 0 and staging.stored is None:
                reach("before_checkpoint")
                staging.chunks.extend(chunks_of(staging.job.host.parts(), list(self._layout)))
                staging.num_bytes = sum(len(chunk) for chunk in staging.chunks)
            self._begin_pieces(staging)
            while staging.chunks and (written == 0 or not self._small):
                statements.put_chunk(self._connection, staging.state, staging.number, staging.chunks[0])
                written += len(staging.chunks.popleft())
                staging.number += 1
                reach("within_checkpoint")
            done = not staging.chunks
            old = self._applier.point_to(staging.job, staging.state, staging.num_bytes, staging.stored) if done else []
            self._commit()
        except Exception as error:  # noqa: BLE001 - of copies and of SQLite; the state's failure, not the thread's
            self._roll_back(error)
            self._state_failed(staging, error)
            return
        self._succeeded(written + _TRANSACTION_BYTES)
        if not staging.chunks:
            self._state_written(staging, old)

    def _state_written(self, staging: Staging, old: list[OldState]) -> None:
        reach("after_checkpoint")
        self.stats.states += 1
        self.stats.state_bytes += staging.num_bytes
        if staging.stored is not None:
            self.stats.object_bytes += staging.num_bytes
        self._discard(old)
        with self._changed:
            if not self._staged.finish(staging):
                return  # a delete overtook it; its Delete job removes the row
        self._report(staging.done, None)

    def _state_failed(self, staging: Staging, error: Exception) -> None:
        in_doubt = isinstance(error, CommitInDoubt) and not staging.chunks  # else nothing pointed to the pieces
        with self._changed:
            is_current = self._staged.finish(staging)
            # An object that a row may name is left to a sweep; of pieces a delete has taken care.
            is_garbage = is_current if staging.stored is None else not in_doubt
            if is_garbage:
                self._give_up(staging)
            self._changed.notify()
        if not is_current:
            return  # a delete overtook it, and has told
        self._report(staging.done, self._failure(error, staging.job, in_doubt))

    def _collect(self) -> None:
        """Remove chunks nothing points to, a few at a time, so that turns are not kept waiting."""
        state = self._garbage[0]
        try:
            self._begin()
            empty = statements.delete_chunks(self._connection, state, _GARBAGE_CHUNKS)
            hidden = statements.sweep_hidden(self._connection) if empty and len(self._garbage) == 1 else []
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - what is left is found again
            self._roll_back(error)
            self._garbage.popleft()  # the next start finds it again
            return
        self._discard(hidden)
        if empty:
            self._garbage.popleft()
        self._wal_bytes += _TRANSACTION_BYTES

    def _discard(self, garbage: Iterable[OldState]) -> None:
        """No row points to these any more, and that is committed."""
        for old in garbage:
            if old.object_key is None:
                self._garbage.append(old.state)
                continue
            self.stats.object_bytes -= old.num_bytes
            self._replaced.append(old.object_key)
        if self._mover is None:
            self._delete_objects(self._replaced)

    def _delete_objects(self, keys: list[str]) -> None:
        """Of what no row names, even after a loss of power; without a store they are left to a sweep."""
        if self._objects is not None:
            for key in keys:
                self._objects.delete(key)
        keys.clear()

    def _sweep_at_start(self) -> list[OldState]:
        self._connection.execute("BEGIN IMMEDIATE")
        garbage = statements.sweep_hidden(self._connection)
        self._connection.execute("COMMIT")
        return garbage

    def _keep_wal_short(self, idle: bool) -> None:
        """Have the log moved when it is long or nothing else is to do; the little that came meanwhile, at once."""
        if self._mover is None:
            return
        if self._rest_to_move:
            self._rest_to_move = False
            mover = self._mover.last
            rest = mover if mover.error else move(self._connection)
            self.stats.degraded = rest.error or self.stats.degraded
            if mover.whole or rest.whole:
                self._delete_objects(self._synced)
            elif self._synced:
                self._wal_bytes = max(1, self._wal_bytes)  # it is tried again when nothing else is to do
        elif not self._mover.busy and self._wal_bytes > (0 if idle else WAL_BYTES):
            self._wal_bytes = 0
            self._synced += self._replaced
            self._replaced = []
            self._mover.start()

    def _moved(self) -> None:
        """On the mover's thread."""
        with self._changed:
            self._rest_to_move = True
            self._changed.notify()

    def _succeeded(self, num_bytes: int) -> None:
        self.stats.commits += 1
        self._away_since = None
        self.stats.degraded = None
        self._wal_bytes += num_bytes
        try:
            self._measure()
        except sqlite3.Error as error:  # what was written stays so
            self.stats.degraded = in_words(error)

    def _measure(self) -> None:
        self.stats.used_bytes = self._database.used_bytes(self._connection)
        now = time.monotonic()
        if self._objects is not None and now >= self._next_count:
            self.stats.object_bytes = statements.object_bytes(self._connection)
            self._next_count = now + _COUNT_AGAIN_S

    def _roll_back(self, error: Exception) -> None:
        self.stats.failures += 1
        if isinstance(error, sqlite3.Error):
            self.stats.degraded = in_words(error)
        elif not isinstance(error, PoolError):
            logger.error("a write of the state pool failed", exc_info=error)
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as second:
                self.stats.degraded = in_words(second)

    def _failure(self, error: Exception | None, job: Small | Checkpoint, in_doubt: bool) -> Exception | None:
        """What to tell. `in_doubt`: a commit of the job was sent and its outcome not heard."""
        if error is not None and in_doubt and _ends_turn(job):
            return TurnInDoubt("the server of the session database was lost while it committed the turn")
        if error is None or isinstance(error, PoolError):
            return error
        if isinstance(error, ServerAway):
            return DirectoryUnreachable(f"{in_words(error)}; try again in a moment")
        what = "the turn was not stored" if isinstance(job, Append | Checkpoint) else "the change was not stored"
        return TurnNotStored(f"{what}: {in_words(error)}")

    def _report(self, done: Done, error: Exception | None) -> None:
        reach("before_acknowledgement")
        self._deliver(lambda: done(error))


def _ends_turn(job: Small | Checkpoint) -> bool:
    return isinstance(job, Append) or (isinstance(job, Checkpoint) and job.commits is not None)
