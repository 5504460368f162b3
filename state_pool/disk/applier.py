"""The effect of each job on the database, within the writer's transactions."""

from __future__ import annotations

from state_pool.crash_points import reach
from state_pool.disk import directory, statements
from state_pool.disk.membership import Membership, begin_with_retry
from state_pool.disk.operations import (
    Acquire,
    Append,
    Checkpoint,
    Delete,
    DeleteNamed,
    DeleteOldest,
    Quarantined,
    Release,
    SmallJob,
    StoredObject,
)
from state_pool.disk.state_store import Connection
from state_pool.errors import SessionNotFound
from state_pool.layout import Layout, layout_text


class Applier:
    """Begins transactions and applies jobs in them. Writer thread only."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        fingerprint: str,
        retain: int,
        member: Membership | None,
    ) -> None:
        """`member`: this engine among those that share the database; None: the database is not shared."""
        self._connection = connection
        self._layout = layout_text(layout)
        self._fingerprint = fingerprint
        self._retain = retain
        self._member = member

    def begin(self) -> None:
        """Begin a write transaction.

        An engine that others removed rejoins under a new number. Fences protect its work.
        """
        if self._member is None:
            self._connection.execute("BEGIN IMMEDIATE")
            return
        begin_with_retry(self._connection)
        if not self._member.is_registered:
            self._connection.execute("ROLLBACK")
            self._member.join()
            begin_with_retry(self._connection)

    def apply(self, job: SmallJob) -> list[statements.GarbageState]:
        """Apply a small job. Returns the states that it makes garbage."""
        connection = self._connection
        match job:
            case Append():
                reach("before_append")
                statements.append_turn(connection, job, self._fingerprint)
                reach("after_append")
            case Delete():
                reach("before_delete")
                return statements.delete_sessions(connection, job.rows)
            case Quarantined():
                connection.execute("UPDATE sessions SET quarantined = ? WHERE id = ?", (job.reason, job.row))
            case Acquire():
                assert self._member is not None
                directory.acquire(connection, job, self._member.number, self._member.new_epoch())
            case Release():
                directory.release(connection, job)
            case DeleteNamed():
                reach("before_delete")
                return statements.delete_sessions(connection, directory.remove_named(connection, job))
            case DeleteOldest():
                return statements.delete_sessions(connection, directory.remove_oldest(connection, job))
        return []

    def publish_state(
        self, job: Checkpoint, state: int, num_bytes: int, stored: StoredObject | None
    ) -> list[statements.GarbageState]:
        """Make the written chunks, or the object, the session's state. Returns the states that it makes garbage."""
        connection, session = self._connection, job.session
        self._check(job)
        if job.commits is not None and self._retain:
            statements.append_turn(connection, job.commits, self._fingerprint)
        statements.put_session(connection, session, self._fingerprint)
        row = statements.StateRow(
            state=state,
            session=session.row,
            turn=session.turn,
            num_tokens=session.num_tokens,
            fingerprint=self._fingerprint,
            layout=self._layout,
            num_bytes=num_bytes,
            stored=stored,
        )
        old = statements.put_state(connection, row)
        statements.trim_turns(connection, session.row, session.turn, session.num_tokens, self._retain)
        reach("before_commit")
        return old

    def _check(self, job: Checkpoint) -> None:
        """Raises StaleEpoch or SessionNotFound if the session was taken over or deleted."""
        directory.check_fence(self._connection, job.fence, ends_turn=job.commits is not None)
        if job.shared and job.fence is None:  # a dialogue may be stored by any engine
            row = job.session.row
            found = self._connection.execute("UPDATE sessions SET hidden = 0 WHERE id = ? AND hidden = 0", (row,))
            if found.rowcount != 1:
                raise SessionNotFound("the dialogue was deleted while its state was being stored")
