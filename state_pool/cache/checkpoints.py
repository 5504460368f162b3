"""Starts to store sessions' states, within the writer's limit. Engine thread only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from state_pool.config import PoolConfig
from state_pool.disk.operations import Append, Checkpoint, Done, SessionRow
from state_pool.errors import SessionNotFound, StaleEpoch
from state_pool.layout import HostState
from state_pool.session_key import LINEAR
from state_pool.sessions import PendingTurn, Session

RETRY_DELAY_S = 1.0
"""Delay after a failed write of a state. A failed write may fill the space that turns need."""


class Save(Protocol):
    """Copies a slot to host memory and calls `finish` when done."""

    def __call__(self, slot: int, finish: Callable[[HostState], None], *, frees_slot: bool) -> None: ...


class StateQueue(Protocol):
    """The queue of states for the disk. Implemented by `Store`."""

    @property
    def num_queued_states(self) -> int: ...

    @property
    def degraded(self) -> str | None: ...

    def submit_state(self, job: Checkpoint, done: Done) -> None: ...


class Checkpoints:
    """Starts to store states. Knows which sessions can be rebuilt from the log instead."""

    def __init__(
        self, config: PoolConfig, store: StateQueue | None, save: Save, on_stale: Callable[[Session], None]
    ) -> None:
        """`on_stale`: called when another engine has the session, so this engine's state of it is outdated."""
        self._on_stale = on_stale
        self._config = config
        self._store = store
        self._save = save
        self._saving = 0
        """copies that will be passed to the writer"""
        self._retry_at = 0.0
        """Monotonic time of the next attempt after a failed write."""

    @property
    def busy(self) -> bool:
        """Whether a state is being stored. Others should wait, unless they must not."""
        return self._store is not None and self._store.num_queued_states + self._saving > 0

    @property
    def _has_room(self) -> bool:
        if self._store is None:
            return False
        return self._store.num_queued_states + self._saving < self._config.transfer_states

    def is_due(self, session: Session) -> bool:
        """Whether the session's log is too long or has a gap; a stored state fixes both."""
        return session.dirty and (session.log_broken or session.log_tokens >= self._config.checkpoint_tokens)

    def can_replay(self, session: Session) -> bool:
        """Whether the log can rebuild the in-memory state with a bounded replay."""
        has_log = self._store is not None and self._config.durability != "turn"
        return has_log and session.unlogged == 0 and not self.is_due(session)

    def begin(self, session: Session, *, ignore_retry_delay: bool = False) -> bool:
        """Start to store a session's state. Returns False if there is no need or no room yet.

        `ignore_retry_delay`: also try right after a disk failure, at shutdown.
        """
        if session.moving or session.reloadable or not self._has_room:
            return False
        if not ignore_retry_delay and time.monotonic() < self._retry_at:
            return False
        row = build_session_row(session)
        # The fence is read before the copy: a later turn may change it while the copy runs.
        fence = session.fence if session.key.dialogue == LINEAR else None
        if session.host is not None:
            self._store_state(session, Checkpoint(row, session.host, fence=fence))
            return True
        if session.slot is None:
            return False
        session.moving = True
        self._saving += 1

        def arrived(host: HostState) -> None:
            self._saving -= 1
            session.moving = False
            if not session.deleted:
                self._store_state(session, Checkpoint(row, host, fence=fence))

        self._save(session.slot, arrived, frees_slot=False)
        return True

    def store_turn(self, session: Session, slot: int, turn: Append, done: Done) -> bool:
        """Store the state after a turn together with the turn (durability "turn")."""
        if not self._has_room:
            return False
        self._saving += 1

        def arrived(host: HostState) -> None:
            self._saving -= 1
            if session.deleted or self._store is None:
                return  # the delete has reported the turn's error
            self._store.submit_state(Checkpoint(turn.session, host, commits=turn, fence=turn.fence), done)

        self._save(slot, arrived, frees_slot=False)
        return True

    def _store_state(self, session: Session, job: Checkpoint) -> None:
        assert self._store is not None
        session.moving = True

        def stored(error: Exception | None) -> None:
            session.moving = False
            if error is None:
                mark_stored(session, job.session)
            elif isinstance(error, StaleEpoch | SessionNotFound) and not session.deleted:
                self._on_stale(session)
            elif self._store is not None and self._store.degraded is not None:
                self._retry_at = time.monotonic() + RETRY_DELAY_S

        self._store.submit_state(job, stored)


def build_session_row(
    session: Session, *, turn: int | None = None, num_tokens: int | None = None, updated: float | None = None
) -> SessionRow:
    return SessionRow(
        session.row_id,
        session.key,
        None if session.parent is None else session.parent.row_id,
        session.turn if turn is None else turn,
        session.num_tokens if num_tokens is None else num_tokens,
        session.created,
        session.updated if updated is None else updated,
        session.origin,
        session.adapter,
    )


def mark_stored(session: Session, row: SessionRow) -> None:
    """Record a committed state. Later turns may be logged after it."""
    session.disk_turn, session.disk_tokens = row.turn, row.num_tokens
    session.parent = None  # needed only by a dialogue without a stored state
    if row.turn == session.turn:
        session.log_broken = False


def append_job(session: Session, turn: PendingTurn) -> Append:
    num_tokens = session.num_tokens + len(turn.tokens)
    row = build_session_row(session, turn=turn.turn, num_tokens=num_tokens, updated=time.time())
    return Append(row, turn.tokens, session.fence)
