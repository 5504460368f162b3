"""The engines that share a database. Each has a unique number and sends a heartbeat every half second.

Numbers of sessions, states and epochs come from the engine's own range, so no engine has to request one.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from state_pool.disk.process_lock import BUSY_TIMEOUT_S
from state_pool.disk.state_store import Connection
from state_pool.layout import CHUNKS_PER_STATE

HEARTBEAT_INTERVAL_S = 0.5
HEARTBEAT_TIMEOUT_S = 2.0
"""Time without a heartbeat after which an engine is lost. The observer must have run all that time."""
ROW_BITS = 32
"""Low bits of a session's number and of an epoch, counted by the engine. Its own number is in the high bits."""
_BUSY_RETRY_S = 0.0003
"""SQLite's own wait for a lock grows to 100 ms. While two engines write, a third would rarely get the lock."""
STATE_BITS = 21


@dataclass(slots=True)
class _LastHeartbeat:
    heartbeat: int
    at: float
    """Monotonic time when this heartbeat was first seen."""


class Membership:
    """This engine's entry in the list of engines that share the database. Writer thread only.

    It has a number, sends heartbeats and removes engines whose heartbeats stop.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.names: list[str] = []
        """of the live engines"""
        self.is_first = False
        """Whether it cleans up for all engines."""
        self._connection = connection
        self._name = name
        self._seen: dict[int, _LastHeartbeat] = {}
        self._last_heartbeat = 0.0
        self._next_state = 0
        self._epochs = 0
        self.number = 0
        self.join()

    def join(self) -> None:
        """Take a new number in its own transaction. An engine of the same name is a predecessor and is removed."""
        connection = self._connection
        begin_with_retry(connection)
        try:
            connection.execute("UPDATE engine_numbers SET last = last + 1")  # serialises joining engines
            connection.execute("DELETE FROM engines WHERE name = ?", (self._name,))
            self.number = _new_engine_number(connection)
            connection.execute("UPDATE engine_numbers SET last = ?", (self.number,))
            connection.execute("INSERT INTO engines(id, name, beat) VALUES (?, ?, 0)", (self.number, self._name))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._next_state = self.number << STATE_BITS
        self._last_heartbeat = 0.0

    def leave(self) -> None:
        """Remove this engine's entry, so that other engines need no timeout."""
        begin_with_retry(self._connection)
        self._connection.execute("DELETE FROM engines WHERE id = ?", (self.number,))
        self._connection.execute("COMMIT")

    @property
    def is_registered(self) -> bool:
        """Whether the list still has this engine. Call within a transaction."""
        found = self._connection.execute("SELECT 1 FROM engines WHERE id = ?", (self.number,)).fetchone()
        return found is not None

    @property
    def first_row(self) -> int:
        return (self.number << ROW_BITS) + 1

    def new_state(self) -> int:
        self._next_state += 1
        return self._next_state

    def owns(self, state: int) -> bool:
        """Whether a state number is in this engine's current range."""
        return state >> STATE_BITS == self.number

    def new_epoch(self) -> int:
        self._epochs += 1
        return (self.number << ROW_BITS) + self._epochs

    @property
    def heartbeat_due(self) -> bool:
        return time.monotonic() >= self._last_heartbeat + HEARTBEAT_INTERVAL_S

    def heartbeat(self) -> list[int]:
        """Write a heartbeat and read the others'. Returns the lost engines, which it removes. Call within a
        transaction.
        """
        connection, now = self._connection, time.monotonic()
        connection.execute("UPDATE engines SET beat = beat + 1 WHERE id = ?", (self.number,))
        if (
            now > self._last_heartbeat + HEARTBEAT_TIMEOUT_S
        ):  # it did not check meanwhile, so it cannot judge the others
            self._seen.clear()
        self._last_heartbeat = now
        found = connection.execute("SELECT id, name, beat FROM engines ORDER BY id").fetchall()
        lost = [
            number
            for number, _, heartbeat in found
            if number != self.number and self._has_timed_out(number, heartbeat, now)
        ]
        for number in lost:
            connection.execute("DELETE FROM engines WHERE id = ?", (number,))
        self.names = [name for number, name, _ in found if number not in lost]
        self.is_first = min(number for number, _, _ in found if number not in lost) == self.number
        present = {number for number, _, _ in found}.difference(lost)  # others have left
        self._seen = {number: seen for number, seen in self._seen.items() if number in present}
        return lost

    def _has_timed_out(self, number: int, heartbeat: int, now: float) -> bool:
        seen = self._seen.get(number)
        if seen is None or seen.heartbeat != heartbeat:
            self._seen[number] = _LastHeartbeat(heartbeat, now)
            return False
        return now - seen.at > HEARTBEAT_TIMEOUT_S


def begin_with_retry(connection: Connection) -> None:
    """Begin a write transaction as soon as no other engine writes.

    Connections of shared databases do not wait for locks themselves (`database.disable_busy_wait`).
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(_BUSY_RETRY_S)


def first_state_number(engine: int) -> int:
    return engine << STATE_BITS


def remove_all_engines(connection: Connection) -> None:
    """Remove all engines and their sessions' entries. Only while no engine has the database open."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM engines")
    connection.execute("DELETE FROM directory")
    connection.execute("COMMIT")


def _new_engine_number(connection: Connection) -> int:
    """Return a number larger than any before. No session or state is in its range."""
    last = connection.execute("SELECT last FROM engine_numbers").fetchone()[0]
    row, state = last_numbers(connection)
    return max(int(last), 1 + (row >> ROW_BITS), 1 + (state >> STATE_BITS))


def last_numbers(connection: Connection) -> tuple[int, int]:
    """Return the largest session row and state number in use; 0: none."""
    tables = ("sessions", "states", "state_chunks")
    found = (connection.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()[0] for table in tables)
    row, state, chunk = map(int, found)
    return row, max(state, chunk // CHUNKS_PER_STATE)


def begin_write(connection: Connection, member: Membership | None) -> None:
    """Begin a write transaction. An engine that others removed rejoins under a new number. Fences protect its work."""
    if member is None:
        connection.execute("BEGIN IMMEDIATE")
        return
    begin_with_retry(connection)
    if not member.is_registered:
        connection.execute("ROLLBACK")
        member.join()
        begin_with_retry(connection)
