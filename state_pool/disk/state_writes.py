"""Writes a state: chunks to the database or an object to the checkpoint store, then the row that points to them.

Objects are uploaded while turns and other states are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from state_pool.crash_points import reach
from state_pool.disk import directory, statements
from state_pool.disk.checkpoint_objects import ORPHAN_AGE_S, CheckpointObjects
from state_pool.disk.membership import Membership
from state_pool.disk.operations import Checkpoint, StagedState, StagingQueue, StoredObject
from state_pool.disk.state_store import Connection
from state_pool.errors import SessionNotFound, TurnNotStored
from state_pool.layout import Layout, layout_text, part_sizes, split_chunks


class Uploads:
    """Uploads states. Started by the writer thread; callbacks run on the object threads."""

    def __init__(
        self,
        objects: CheckpointObjects,
        layout: Layout,
        staged: StagingQueue,
        changed: threading.Condition,
        failed: Callable[[StagedState, Exception], None],
    ) -> None:
        """`changed`: the writer's lock, which guards `staged`. `failed`: called for a failed upload."""
        self._objects = objects
        self._part_names = list(layout)
        self._num_bytes = sum(part_sizes(layout).values())
        self._staged = staged
        self._changed = changed
        self._failed = failed

    def begin(self, staging: StagedState, state_number: int) -> None:
        """Start the upload of a state. The state's number is part of the object's key."""
        reach("before_checkpoint")
        staging.state_number, staging.num_bytes, staging.upload_started_at = state_number, self._num_bytes, time.time()
        with self._changed:
            if self._staged.start_upload(staging):
                job = staging.job
                self._objects.put(
                    state_number,
                    job.session.row_id,
                    job.host,
                    self._part_names,
                    lambda outcome: self._uploaded(staging, outcome),
                )

    def _uploaded(self, staging: StagedState, outcome: StoredObject | Exception) -> None:
        reach("within_checkpoint")
        if isinstance(outcome, Exception):
            self._failed(staging, outcome)
            return
        with self._changed:
            staging.stored = outcome
            if not self._staged.finish_upload(staging):  # its session was deleted meanwhile
                self._objects.delete(outcome.key)
            self._changed.notify()


def check_age(staging: StagedState) -> None:
    """Check that no sweep may treat the object as an orphan yet. Raises TurnNotStored."""
    if time.time() > staging.upload_started_at + ORPHAN_AGE_S / 2:
        raise TurnNotStored("the upload of its state took too long, a sweep may delete the object; it is stored again")


class StateWrites:
    """The statements that store a state. The writer begins and commits the transactions."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        fingerprint: str,
        retain: int,
        member: Membership | None,
        last_state: int,
    ) -> None:
        """fingerprint: digest of the model's weights, stored with each turn and state
        retain: `PoolConfig.retain_tokens`: recent tokens of a session whose turns stay in the log
        member: this engine among those that share the database; None: it is not shared
        last_state: the last state number, if the database is not shared
        """
        self._connection = connection
        self._layout = layout
        self._fingerprint = fingerprint
        self._retain = retain
        self._member = member
        self._last_state = last_state

    def new_number(self) -> int:
        """Return a new state number. If engines share the database, it is from this engine's range."""
        if self._member is not None:
            return self._member.new_state()
        self._last_state += 1
        return self._last_state

    def split(self, staging: StagedState) -> None:
        """Split a new state into chunks, before its first transaction."""
        if staging.chunks_written == 0 and staging.stored is None:
            reach("before_checkpoint")
            staging.chunks.extend(split_chunks(staging.job.host.parts(), list(self._layout)))
            staging.num_bytes = sum(len(chunk) for chunk in staging.chunks)

    def put_chunks(self, staging: StagedState, may_continue: Callable[[], bool]) -> int:
        """Write one chunk, and more while `may_continue`. Returns the bytes written.

        Raises TurnNotStored if the written part may be garbage by now.
        """
        if staging.stored is not None:  # its state number needs no check: `publish` checks the session's fence
            check_age(staging)
        elif staging.chunks_written == 0:
            staging.state_number = self.new_number()
        elif self._member is not None and not self._member.owns(staging.state_number):
            raise TurnNotStored("other engines declared this engine lost during a write; the state is stored again")
        written = 0
        while staging.chunks and (written == 0 or may_continue()):
            statements.put_chunk(self._connection, staging.state_number, staging.chunks_written, staging.chunks[0])
            written += len(staging.chunks.popleft())
            staging.chunks_written += 1
            reach("within_checkpoint")
        return written

    def publish(self, staging: StagedState) -> list[statements.GarbageState]:
        """Make the written chunks, or the object, the session's state. Returns the replaced states, to be deleted.

        Raises StaleEpoch or SessionNotFound if the session was taken over or deleted.
        """
        connection, job, session = self._connection, staging.job, staging.job.session
        self._check_session(job)
        if job.commits is not None and self._retain:  # a turn that only this state commits, not the log
            statements.append_turn(connection, job.commits, self._fingerprint)
        statements.stored_turn(connection, session)  # raises if the row has another session
        statements.put_session(connection, session, self._fingerprint)
        row = statements.StateRow(
            state=staging.state_number,
            session=session.row_id,
            turn=session.turn,
            num_tokens=session.num_tokens,
            fingerprint=self._fingerprint,
            layout=layout_text(self._layout),
            num_bytes=staging.num_bytes,
            stored=staging.stored,
        )
        replaced = statements.put_state(connection, row)
        statements.trim_turns(connection, session.row_id, session.turn, session.num_tokens, self._retain)
        reach("before_commit")
        return replaced

    def _check_session(self, job: Checkpoint) -> None:
        directory.check_fence(self._connection, job.fence, ends_turn=job.commits is not None)
        if self._member is not None and job.fence is None:
            # Nothing else guards a dialogue. This UPDATE finds no row if a delete hid it, and else locks the row.
            found = self._connection.execute(
                "UPDATE sessions SET hidden = 0 WHERE id = ? AND hidden = 0", (job.session.row_id,)
            )
            if found.rowcount != 1:
                raise SessionNotFound("the dialogue was deleted while its state was being stored")
