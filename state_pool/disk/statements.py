"""The SQL statements on sessions, turns and states. Run within the caller's transaction."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from state_pool.crash_points import reach
from state_pool.disk import directory, operations
from state_pool.disk.membership import Membership
from state_pool.disk.state_store import Connection
from state_pool.layout import CHUNKS_PER_STATE, LAYOUT_VERSION, checksum, chunk_checksum, pack_tokens
from state_pool.origins import FINGERPRINT_SEPARATOR, format_origin, is_same_model
from state_pool.session_key import ROOT, SessionEntry, SessionKey, Tier, visible_to


def stored_turn(connection: Connection, session: operations.SessionRow) -> int:
    """Return the number of the session's last stored turn; 0: there is none.

    Raises sqlite3.IntegrityError if its row has another session.
    """
    columns = "SELECT turn, session_id, dialogue FROM sessions WHERE id = ?"
    found = connection.execute(columns, (session.row_id,)).fetchone()
    if found is None:
        return 0
    turn, session_id, dialogue = found
    if (session_id, dialogue) != session.key:
        raise sqlite3.IntegrityError(f"row {session.row_id} has another session")
    return int(turn)


_HAS_OTHER_MODEL = (
    "excluded.fingerprint <> sessions.fingerprint AND substr(excluded.fingerprint, 1, "
    f"length(sessions.fingerprint) + 1) <> sessions.fingerprint || '{FINGERPRINT_SEPARATOR}'"
)
"""`not is_same_model`, in SQL."""


def put_session(connection: Connection, session: operations.SessionRow, fingerprint: str) -> None:
    """Insert a session, or update it to a later turn. An earlier turn changes nothing. Call `stored_turn` first."""
    connection.execute(
        "INSERT INTO sessions(id, session_id, dialogue, parent, fingerprint, turn, num_tokens, created, updated, "
        "origin_name, origin_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(id) DO UPDATE SET "
        "turn = excluded.turn, num_tokens = excluded.num_tokens, updated = excluded.updated, "
        f"keeps_log = CASE WHEN {_HAS_OTHER_MODEL} THEN 1 ELSE sessions.keeps_log END, "
        "fingerprint = excluded.fingerprint WHERE excluded.turn > sessions.turn",
        (
            session.row_id,
            session.key.session_id,
            session.key.dialogue,
            session.parent,
            fingerprint,
            session.turn,
            session.num_tokens,
            session.created,
            session.updated,
            *format_origin(session.origin, session.adapter),
        ),
    )
    if session.key.dialogue > ROOT:
        connection.execute(
            "INSERT INTO dialogue_numbers(session_id, largest) VALUES (?, ?) "
            "ON CONFLICT(session_id) DO UPDATE SET largest = excluded.largest "
            "WHERE excluded.largest > dialogue_numbers.largest",
            session.key,
        )


def append_turn(connection: Connection, job: operations.Append, fingerprint: str) -> int:
    """Log one turn and update its session. Returns the bytes of the log row.

    Turn numbers must have no gap: otherwise raises sqlite3.IntegrityError. So no turn is applied twice or lost.
    """
    directory.check_fence(connection, job.fence)
    data = pack_tokens(job.tokens)
    row, turn = job.session.row_id, job.session.turn
    stored = stored_turn(connection, job.session)
    if job.fence is not None and stored == turn and _is_logged(connection, job, data):
        return len(data)  # an earlier commit in doubt succeeded
    if turn != stored + 1:
        raise sqlite3.IntegrityError(f"turn {turn} does not follow turn {stored}")
    put_session(connection, job.session, fingerprint)
    connection.execute(
        "INSERT INTO turns(session, turn, num_tokens, tokens, checksum, created) VALUES (?, ?, ?, ?, ?, ?)",
        (row, turn, job.session.num_tokens, data, checksum(data, row, turn), job.session.updated),
    )
    return len(data)


def _is_logged(connection: Connection, job: operations.Append, data: bytes) -> bool:
    """Whether this turn is already stored. Only this engine can have stored it, since the epoch is unique."""
    row, turn = job.session.row_id, job.session.turn
    found = connection.execute(
        "SELECT checksum FROM turns WHERE session = ? AND turn = ? AND created = ?", (row, turn, job.session.updated)
    ).fetchone()
    return found is not None and bytes(found[0]) == checksum(data, row, turn)


def put_chunk(connection: Connection, state: int, number: int, data: memoryview) -> None:
    """Write one chunk of a state that no row points to yet."""
    chunk_id = state * CHUNKS_PER_STATE + number
    values = (chunk_id, chunk_checksum(data, chunk_id), data)
    connection.execute("INSERT INTO state_chunks(id, checksum, data) VALUES (?, ?, ?)", values)


@dataclass(frozen=True, slots=True)
class StateRow:
    """A stored state's row, without the bytes."""

    state: int
    session: int
    turn: int
    num_tokens: int
    fingerprint: str
    layout: str
    num_bytes: int
    stored: operations.StoredObject | None = None
    """The object with the bytes; None: chunks in the database."""

    def checksum(self) -> bytes:
        """Hash all columns that decide whether and where a state is usable."""
        numbers = (self.state, self.session, self.turn, self.num_tokens, self.num_bytes, LAYOUT_VERSION)
        text = f"{self.fingerprint}\n{self.layout}"
        if self.stored is not None:
            text += f"\n{self.stored.key}\n{self.stored.checksum.hex()}"
        return checksum(text.encode(), *numbers)


class GarbageState(NamedTuple):
    """A state without a row: its chunks or its object must be deleted."""

    state: int
    object_key: str | None
    num_bytes: int


_STATES_OF_SESSION = "SELECT id, object_key, bytes FROM states WHERE session = ?"


def put_state(connection: Connection, row: StateRow) -> list[GarbageState]:
    """Store the row of a written state. Returns the states that it replaces.

    A state older than the stored one replaces nothing and is itself returned.
    """
    key, checksum_ = (None, None) if row.stored is None else (row.stored.key, row.stored.checksum)
    new = GarbageState(row.state, key, row.num_bytes)
    found = connection.execute("SELECT turn FROM states WHERE session = ?", (row.session,)).fetchone()
    if found is not None and int(found[0]) > row.turn:
        return [new]
    old = [GarbageState(*columns) for columns in connection.execute(_STATES_OF_SESSION, (row.session,)).fetchall()]
    connection.execute("DELETE FROM states WHERE session = ?", (row.session,))
    connection.execute(
        "INSERT INTO states(id, session, turn, num_tokens, fingerprint, "
        "layout_version, layout, bytes, checksum, created, object_key, object_checksum) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row.state,
            row.session,
            row.turn,
            row.num_tokens,
            row.fingerprint,
            LAYOUT_VERSION,
            row.layout,
            row.num_bytes,
            row.checksum(),
            time.time(),
            key,
            checksum_,
        ),
    )
    return old


def trim_turns(connection: Connection, session: int, turn: int, num_tokens: int, retain: int) -> None:
    """Delete the log that a state covers, except the last `retain` tokens; -1 keeps everything.

    A session that was rebuilt for another model keeps its log, so that it can return to the first.
    """
    if retain < 0:
        return
    connection.execute(
        "DELETE FROM turns WHERE session = ? AND turn <= ? AND num_tokens <= ? "
        "AND NOT EXISTS (SELECT 1 FROM sessions WHERE id = ? AND keeps_log = 1)",
        (session, turn, num_tokens - retain, session),
    )


def put_model(connection: Connection, fingerprint: str, name: str) -> None:
    connection.execute(
        "INSERT INTO models(fingerprint, name) VALUES (?, ?) "
        "ON CONFLICT(fingerprint) DO UPDATE SET name = excluded.name",
        (fingerprint, name),
    )


def model_name(connection: Connection, fingerprint: str) -> str:
    found = connection.execute("SELECT name FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()
    return "of an unknown file" if found is None else str(found[0])


def sessions_of_other_models(connection: Connection, fingerprint: str) -> list[tuple[str, int]]:
    """Return (fingerprint, number of sessions) for each other model."""
    found = connection.execute(
        "SELECT fingerprint, count(*) FROM sessions WHERE hidden = 0 AND fingerprint <> ? "
        "GROUP BY fingerprint ORDER BY fingerprint",
        (fingerprint,),
    )
    return [(str(other), int(count)) for other, count in found.fetchall() if not is_same_model(other, fingerprint)]


def list_sessions(connection: Connection, query: operations.ListQuery) -> list[SessionEntry]:
    """Return a page of sessions, newest first, with newer entries from memory."""
    newer = list(query.newer.values())
    first = max(0, query.offset - len(newer))  # at least this many rows precede the page
    condition, values = visible_to(query.owner)
    rows = connection.execute(
        "SELECT id, session_id, dialogue, updated FROM sessions INDEXED BY sessions_by_updated "
        f"WHERE hidden = 0 AND id NOT IN (SELECT value FROM json_each(?)) AND {condition} "
        "ORDER BY updated DESC, id DESC LIMIT ? OFFSET ?",
        (json.dumps([*query.newer, *query.deleted]), *values, query.offset + query.limit - first, first),
    )
    stored = [
        SessionKey(session_id, dialogue).entry(query.tiers.get(row, Tier.DISK), updated)
        for row, session_id, dialogue, updated in rows
    ]
    merged = sorted([*newer, *stored], key=lambda entry: entry.updated, reverse=True) if newer else stored
    return merged[query.offset - first :][: query.limit]


def delete_sessions(connection: Connection, rows: Sequence[int]) -> list[GarbageState]:
    """Delete sessions. Returns the states that become garbage."""
    for row in rows:
        connection.execute("UPDATE sessions SET hidden = 1 WHERE id = ?", (row,))
    return sweep_hidden(connection, rows)


def sweep_hidden(connection: Connection, candidates: Iterable[int] | None = None) -> list[GarbageState]:
    """Delete hidden sessions that no child needs. A child with a stored state needs no parent."""
    garbage: list[GarbageState] = []
    if candidates is None:
        candidates = [int(row[0]) for row in connection.execute("SELECT id FROM sessions WHERE hidden = 1")]
    remaining = sorted(candidates, reverse=True)  # children usually have larger numbers than their parents
    while True:
        needed = [row for row in remaining if not _remove_if_unneeded(connection, row, garbage)]
        if not needed or len(needed) == len(remaining):
            return garbage
        remaining = needed


def _remove_if_unneeded(connection: Connection, row: int, garbage: list[GarbageState]) -> bool:
    """Delete a hidden session that no child needs. Returns whether it did. Adds its state to the garbage."""
    needed = connection.execute(
        "SELECT 1 FROM sessions c WHERE c.parent = ? AND NOT EXISTS (SELECT 1 FROM states WHERE session = c.id)", (row,)
    ).fetchone()
    if needed is not None:
        return False
    garbage += [GarbageState(*found) for found in connection.execute(_STATES_OF_SESSION, (row,))]
    for statement in (
        "DELETE FROM states WHERE session = ?",
        "DELETE FROM turns WHERE session = ?",
        "DELETE FROM sessions WHERE id = ?",
    ):
        connection.execute(statement, (row,))
    return True


def delete_chunks(connection: Connection, state: int, limit: int) -> bool:
    """Delete up to `limit` chunks of a state. Returns True when none is left.

    Chunks of a state with a row stay: a commit in doubt may have succeeded after the state was given up.
    """
    low = state * CHUNKS_PER_STATE
    num_deleted: int = connection.execute(
        "DELETE FROM state_chunks WHERE id IN (SELECT id FROM state_chunks WHERE id >= ? AND id < ? LIMIT ?) "
        "AND NOT EXISTS (SELECT 1 FROM states WHERE id = ?)",
        (low, low + CHUNKS_PER_STATE, limit, state),
    ).rowcount
    return num_deleted < limit


def keys_used(connection: Connection, states: Sequence[int]) -> set[str]:
    found = connection.execute(
        "SELECT object_key FROM states WHERE object_key IS NOT NULL AND id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(states)),),
    )
    return {str(key) for (key,) in found.fetchall()}


def object_bytes(connection: Connection) -> int:
    """Return the bytes of all states stored as objects. Reads only an index."""
    found = connection.execute("SELECT coalesce(sum(bytes), 0) FROM states WHERE object_key IS NOT NULL").fetchone()
    return int(found[0])


def orphaned_states(connection: Connection, first: int = 0, last: int | None = None) -> list[int]:
    """Return the states that a crash left partly written or deleted. Looks at states from `first` to before `last`."""
    orphans: list[int] = []
    next_id = first * CHUNKS_PER_STATE
    while True:
        found = connection.execute("SELECT min(id) FROM state_chunks WHERE id >= ?", (next_id,)).fetchone()[0]
        if found is None or (last is not None and found >= last * CHUNKS_PER_STATE):
            return orphans
        state = int(found) // CHUNKS_PER_STATE
        if connection.execute("SELECT 1 FROM states WHERE id = ?", (state,)).fetchone() is None:
            orphans.append(state)
        next_id = (state + 1) * CHUNKS_PER_STATE


def read_setting(connection: Connection, name: str) -> str | None:
    found = connection.execute("SELECT value FROM pool_settings WHERE name = ?", (name,)).fetchone()
    return None if found is None else str(found[0])


def count_sessions(connection: Connection, query: operations.ListQuery) -> int:
    condition, values = visible_to(query.owner)
    stored = connection.execute(
        "SELECT count(*) FROM sessions "
        f"WHERE hidden = 0 AND id NOT IN (SELECT value FROM json_each(?)) AND {condition}",
        (json.dumps([*query.newer, *query.deleted]), *values),
    )
    return len(query.newer) + int(stored.fetchone()[0])


def first_stored(connection: Connection, session_ids: Sequence[str]) -> str | None:
    statement = "SELECT 1 FROM sessions WHERE session_id = ? AND hidden = 0 LIMIT 1"
    return next((name for name in session_ids if connection.execute(statement, (name,)).fetchone()), None)


def apply(
    connection: Connection, job: operations.SmallJob, fingerprint: str, member: Membership | None
) -> list[GarbageState]:
    """Run a job's statements. Returns the states that become garbage."""
    match job:
        case operations.Append():
            reach("before_append")
            append_turn(connection, job, fingerprint)
            reach("after_append")
        case operations.Delete():
            reach("before_delete")
            return delete_sessions(connection, job.row_ids)
        case operations.Quarantined():
            connection.execute("UPDATE sessions SET quarantined = ? WHERE id = ?", (job.reason, job.row_id))
        case operations.Acquire():
            assert member is not None
            directory.acquire(connection, job, member.number, member.new_epoch())
        case operations.Release():
            directory.release(connection, job)
        case operations.DeleteNamed():
            reach("before_delete")
            return delete_sessions(connection, directory.remove_named(connection, job))
        case operations.DeleteOldest():
            return delete_sessions(connection, directory.remove_oldest(connection, job))
        case operations.ClockSetBack():
            directory.put_set_back(connection, job.times)
    return []
