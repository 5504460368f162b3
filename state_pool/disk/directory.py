"""Statements on the directory: which engine has which session of a shared database. Run within the caller's
transaction.
"""

from __future__ import annotations

import json
import time
from typing import Any

from state_pool.disk.operations import Acquire, DeleteNamed, DeleteOldest, Release, SessionRow, StoredSession
from state_pool.disk.state_store import Connection
from state_pool.errors import SessionNotFound, StaleEpoch
from state_pool.expiry import Gap, UsageTimes
from state_pool.origins import parse_origin
from state_pool.session_key import LINEAR, ROOT, Fence, SessionKey, dialogue_named, matching_prefix

NO_ENGINE = 0
"""Holder of entries that any engine may write."""
_SET_BACKS = "clock_set_back"
"""Name of the setting with the times that the clock showed twice."""
_MAX_SET_BACKS = 100

_COLUMNS = (
    "SELECT s.id, s.session_id, s.dialogue, s.parent, s.turn, s.num_tokens, s.created, s.updated, "
    "s.origin_name, s.origin_digest, coalesce(t.turn, -1), coalesce(t.num_tokens, 0), s.quarantined "
    "FROM sessions s LEFT JOIN states t ON t.session = s.id "
)


def stored_sessions(connection: Connection, where: str, values: tuple[int | str, ...] = ()) -> list[StoredSession]:
    """Return the sessions that match the condition `where` on `s`."""
    return [_stored_session(*row) for row in connection.execute(f"{_COLUMNS} WHERE {where} ORDER BY s.id", values)]


def _stored_session(*columns: Any) -> StoredSession:
    row, session_id, dialogue, parent, turn, num_tokens, created, updated, name, digest, *stored = columns
    key, origin_and_adapter = SessionKey(session_id, dialogue), parse_origin(name, digest)
    session = SessionRow(row, key, parent, turn, num_tokens, created, updated, *origin_and_adapter)
    return StoredSession(session, *stored)


def find_session(connection: Connection, key: SessionKey) -> list[StoredSession]:
    """Return the session, then the parents that it is rebuilt from."""
    found = stored_sessions(connection, "s.session_id = ? AND s.dialogue = ? AND s.hidden = 0", tuple(key))
    while found and found[-1].disk_turn < 0 and found[-1].session.parent is not None:
        parents = stored_sessions(connection, "s.id = ?", (found[-1].session.parent,))
        if not parents:  # reading the session reports the missing parent
            break
        found += parents
    return found


def read_usage_times(connection: Connection, ttl: float) -> UsageTimes:
    """Return the last use and the gaps longer than `ttl` seconds. A gap has no use at all."""
    ((last,),) = connection.execute("SELECT max(updated) FROM sessions WHERE hidden = 0").fetchall()
    gaps = connection.execute(
        "SELECT earlier, later FROM (SELECT lag(updated) OVER (ORDER BY updated) AS earlier, updated AS later "
        "FROM sessions WHERE hidden = 0) AS uses WHERE later - earlier > ? ORDER BY earlier",
        (ttl,),
    )
    return UsageTimes(last, tuple(Gap(*columns) for columns in gaps.fetchall()), tuple(_read_set_backs(connection)))


def _read_set_backs(connection: Connection) -> list[Gap]:
    found = connection.execute("SELECT value FROM pool_settings WHERE name = ?", (_SET_BACKS,)).fetchone()
    return [] if found is None else [Gap(*times) for times in json.loads(found[0])]


def put_set_back(connection: Connection, times: Gap) -> None:
    """Store times that the clock showed twice."""
    connection.execute(
        "INSERT INTO pool_settings(name, value) VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET value = excluded.value",
        (_SET_BACKS, json.dumps([*_read_set_backs(connection), times][-_MAX_SET_BACKS:])),
    )


def acquire(connection: Connection, job: Acquire, engine: int, epoch: int) -> None:
    """Fill in the job's result. `epoch` must be unused; a new holder gets it."""
    job.fence, job.stored = None, []
    if job.branch_from is not None:
        _acquire_branch(connection, job, epoch)
        return
    key = SessionKey(job.session_id)
    _lock(connection, key)
    holder, held_epoch, busy, live_engine = connection.execute(
        "SELECT d.holder, d.epoch, d.busy, e.id FROM directory d LEFT JOIN engines e ON e.id = d.holder "
        "WHERE d.session_id = ? AND d.dialogue = ?",
        key,
    ).fetchone()
    if busy and holder != engine and live_engine is not None:
        return
    if holder == engine:
        epoch = int(held_epoch)
    connection.execute(
        "UPDATE directory SET holder = ?, epoch = ?, busy = 1 WHERE session_id = ? AND dialogue = ?",
        (engine, epoch, *key),
    )
    job.fence = Fence(*key, epoch)
    job.stored = find_session(connection, key)


def _lock(connection: Connection, key: SessionKey, epoch: int = 0) -> None:
    """Create the session's directory entry and lock it until the transaction ends."""
    connection.execute(
        "INSERT INTO directory(session_id, dialogue, holder, epoch, busy) VALUES (?, ?, ?, ?, 0) "
        "ON CONFLICT(session_id, dialogue) DO UPDATE SET busy = directory.busy",
        (*key, NO_ENGINE, epoch),
    )


def _acquire_branch(connection: Connection, job: Acquire, epoch: int) -> None:
    """Acquire a session for a new dialogue. Any engine may, since dialogues never change.

    Only a delete changes the epoch.
    """
    key = SessionKey(job.session_id, ROOT)
    _lock(connection, key, epoch)
    found = connection.execute("SELECT epoch FROM directory WHERE session_id = ? AND dialogue = ?", key).fetchone()
    job.stored = find_session(connection, SessionKey(job.session_id, job.branch_from or ROOT))
    job.fence = Fence(*key, int(found[0]), job.stored[0].session.row_id if job.stored else None)
    if job.branch_from == ROOT or job.stored:
        job.dialogue = _next_dialogue(connection, job.session_id)


def _next_dialogue(connection: Connection, session_id: str) -> int:
    connection.execute(
        "INSERT INTO dialogue_numbers(session_id, largest) VALUES (?, 1) "
        "ON CONFLICT(session_id) DO UPDATE SET largest = dialogue_numbers.largest + 1",
        (session_id,),
    )
    found = connection.execute("SELECT largest FROM dialogue_numbers WHERE session_id = ?", (session_id,)).fetchone()
    return int(found[0])


def release(connection: Connection, job: Release) -> None:
    """End a turn that changed nothing. Does not touch another holder's turn."""
    connection.execute(
        "UPDATE directory SET busy = 0 WHERE session_id = ? AND dialogue = ? AND epoch = ?",
        (job.fence.session_id, job.fence.dialogue, job.fence.epoch),
    )


def remove_named(connection: Connection, job: DeleteNamed) -> list[int]:
    """Delete these sessions' directory entries and return their rows. Then no turn of them commits."""
    # The directory first: this waits for turns that are committing. Then their rows.
    if job.prefix:
        condition, values = matching_prefix(job.session_id)
        connection.execute(f"DELETE FROM directory WHERE {condition}", values)
        found = _rows_with_prefix(connection, job.session_id)
    else:
        connection.execute("DELETE FROM directory WHERE session_id = ?", (job.session_id,))
        found = _rows_of(connection, job.session_id)
    job.count = max(job.count, len(found))  # a commit in doubt may have deleted them already
    return found


def _rows_of(connection: Connection, session_id: str) -> list[int]:
    """Rows of the sessions and dialogues with this id.

    If there are none: of the dialogue with this display name.
    """
    whole = connection.execute("SELECT id FROM sessions WHERE session_id = ? AND hidden = 0", (session_id,)).fetchall()
    if whole:
        return [int(row) for (row,) in whole]
    key = dialogue_named(session_id)
    if key is None:
        return []
    rows = connection.execute("SELECT id FROM sessions WHERE session_id = ? AND dialogue = ? AND hidden = 0", key)
    return [int(row) for (row,) in rows.fetchall()]


def _rows_with_prefix(connection: Connection, prefix: str) -> list[int]:
    condition, values = matching_prefix(prefix)
    rows = connection.execute(f"SELECT id FROM sessions WHERE {condition} AND hidden = 0", values)
    found = [int(row) for (row,) in rows.fetchall()]
    if ":" in prefix:
        owner = prefix.rpartition(":")[0]
        dialogues = connection.execute(
            "SELECT id, dialogue FROM sessions WHERE session_id = ? AND dialogue <> ? AND hidden = 0", (owner, LINEAR)
        ).fetchall()
        found += [int(row) for row, number in dialogues if SessionKey(owner, number).display_name.startswith(prefix)]
    return found


def remove_oldest(connection: Connection, job: DeleteOldest) -> list[int]:
    """Delete the directory entries of the least recently used sessions. Returns their rows.

    Deletes none if the clock was set back since the cutoff was computed: sessions used since then would count as old.
    """
    if job.cutoff is not None and time.time() < job.planned:
        return []
    rows = connection.execute(
        "SELECT s.id, s.session_id, s.dialogue, s.updated FROM sessions s "
        "LEFT JOIN directory d ON d.session_id = s.session_id AND d.dialogue = s.dialogue AND d.busy = 1 "
        "LEFT JOIN engines e ON e.id = d.holder "
        "WHERE s.hidden = 0 AND e.id IS NULL AND s.updated < ? ORDER BY s.updated LIMIT ?",
        (1e18 if job.cutoff is None else job.cutoff, job.limit),
    ).fetchall()
    for _, session_id, dialogue, _ in rows:
        connection.execute("DELETE FROM directory WHERE session_id = ? AND dialogue = ?", (session_id, dialogue))
    job.count, job.last_use = len(rows), float(rows[-1][3]) if rows else None
    return [int(row) for row, *_ in rows]


def check_fence(connection: Connection, fence: Fence | None, *, ends_turn: bool = True) -> None:
    """Check that the writer still has the session and the parent dialogue.

    `ends_turn`: the transaction ends the session's turn, so another may start. Raises StaleEpoch or SessionNotFound.
    """
    if fence is None:
        return
    changed = connection.execute(
        "UPDATE directory SET busy = busy * ? WHERE session_id = ? AND dialogue = ? AND epoch = ?",
        (int(not ends_turn), fence.session_id, fence.dialogue, fence.epoch),
    )
    if changed.rowcount != 1:
        raise stale_epoch_error(fence)
    if fence.parent is not None:
        # An update, so that no delete removes the parent before this transaction ends.
        parent = connection.execute("UPDATE sessions SET hidden = 0 WHERE id = ? AND hidden = 0", (fence.parent,))
        if parent.rowcount != 1:
            raise SessionNotFound(f"a dialogue of {fence.session_id!r} was deleted while a turn read it")


def stale_epoch_error(fence: Fence) -> StaleEpoch:
    return StaleEpoch(
        f"session {fence.session_id!r} was taken over by another engine, or deleted, while its turn ran: "
        "the turn is not kept; send it again"
    )
