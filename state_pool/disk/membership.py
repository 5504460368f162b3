"""Which engines share the database. Each has a number that no other ever had, and says every half second that it lives.

Numbers of sessions, states and epochs are drawn from an engine's own range, so that nobody has to ask for one.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from state_pool.codec import CHUNKS_PER_STATE
from state_pool.disk.database import BUSY_TIMEOUT_S
from state_pool.disk.state_store import Connection

HEARTBEAT_INTERVAL_S = 0.5
"""Time between two signs of life."""
HEARTBEAT_TIMEOUT_S = 2.0
"""An engine of which none was seen for so long, by one that could look all the while, is lost."""
ROW_BITS = 32
"""Of a session's number, and of an epoch: what an engine counts itself. Its own number stands above."""
_BUSY_RETRY_S = 0.0003
"""SQLite's own waiting for a lock grows to 100 ms: while two engines write, a third would never come to it."""
STATE_BITS = 21
"""Likewise of a state's number."""


@dataclass(slots=True)
class _LastHeartbeat:
    heartbeat: int
    at: float
    """Monotonic time when that beat was first seen."""


class Membership:
    """This engine among the others. Owned by the writer's thread."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.names: list[str] = []
        """Of the engines that live."""
        self.is_first = False
        """Whether it looks after what belongs to nobody."""
        self._connection = connection
        self._name = name
        self._seen: dict[int, _LastHeartbeat] = {}
        self._last_look = 0.0
        self._next_state = 0
        self._epochs = 0
        self.number = 0
        self.join()

    def join(self) -> None:
        """Take a new number, within a transaction of its own; an engine of the same name is a predecessor, and gone."""
        connection = self._connection
        begin_with_retry(connection)
        try:
            connection.execute("UPDATE engine_numbers SET last = last + 1")  # one engine after another
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
        self._last_look = 0.0

    def leave(self) -> None:
        """Others need not wait to see that this engine is gone."""
        begin_with_retry(self._connection)
        self._connection.execute("DELETE FROM engines WHERE id = ?", (self.number,))
        self._connection.execute("COMMIT")

    @property
    def is_registered(self) -> bool:
        """Within a transaction: whether nobody has struck this engine off, whose work may be somebody else's then."""
        found = self._connection.execute("SELECT 1 FROM engines WHERE id = ?", (self.number,)).fetchone()
        return found is not None

    @property
    def first_row(self) -> int:
        """The first number for a session of this engine's."""
        return (self.number << ROW_BITS) + 1

    def new_state(self) -> int:
        """A number for a state."""
        self._next_state += 1
        return self._next_state

    def owns(self, state: int) -> bool:
        """Whether the number is of this engine's present range."""
        return state >> STATE_BITS == self.number

    def new_epoch(self) -> int:
        """A number for a holder's time."""
        self._epochs += 1
        return (self.number << ROW_BITS) + self._epochs

    @property
    def heartbeat_due(self) -> bool:
        """Whether it is time for a sign of life."""
        return time.monotonic() >= self._last_look + HEARTBEAT_INTERVAL_S

    def heartbeat(self) -> list[int]:
        """Within a transaction: give a sign of life and look for others'; returns the engines lost, struck off."""
        connection, now = self._connection, time.monotonic()
        connection.execute("UPDATE engines SET beat = beat + 1 WHERE id = ?", (self.number,))
        if now > self._last_look + HEARTBEAT_TIMEOUT_S:  # it did not look meanwhile, and can say nothing of the others
            self._seen.clear()
        self._last_look = now
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
        self._seen = {number: seen for number, seen in self._seen.items() if number not in lost}
        return lost

    def _has_timed_out(self, number: int, heartbeat: int, now: float) -> bool:
        seen = self._seen.get(number)
        if seen is None or seen.heartbeat != heartbeat:
            self._seen[number] = _LastHeartbeat(heartbeat, now)
            return False
        return now - seen.at > HEARTBEAT_TIMEOUT_S


def begin_with_retry(connection: Connection) -> None:
    """Begin to write as soon as nobody else does; the connection itself does not wait (`database.disable_busy_wait`)."""
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
    """States of an engine are numbered from here to the first of the next."""
    return engine << STATE_BITS


def remove_all_engines(connection: Connection) -> None:
    """Nobody lives who has the database open: forget who was there and what they held."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM engines")
    connection.execute("DELETE FROM directory")
    connection.execute("COMMIT")


def _new_engine_number(connection: Connection) -> int:
    """Larger than any before, and of a range in which no session or state lies."""
    last = connection.execute("SELECT last FROM engine_numbers").fetchone()[0]
    row = connection.execute("SELECT coalesce(max(id), 0) FROM sessions").fetchone()[0]
    state = connection.execute("SELECT coalesce(max(id), 0) FROM states").fetchone()[0]
    chunk = connection.execute("SELECT coalesce(max(id), 0) FROM state_chunks").fetchone()[0]
    return max(
        int(last), 1 + (int(row) >> ROW_BITS), 1 + (max(int(state), int(chunk) // CHUNKS_PER_STATE) >> STATE_BITS)
    )
