"""Copy intact sessions out of a damaged database: `python -m state_pool.salvage DAMAGED NEW`.

Does not change the damaged file. A session is copied if the checksums of its state and log match, and those of its
parent dialogues. All others are skipped and listed. States in a checkpoint store stay there unchecked.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from state_pool.disk.copies import open_with_running_service
from state_pool.disk.database import open_writer
from state_pool.disk.statements import delete_chunks, delete_sessions
from state_pool.disk.verify import Loader
from state_pool.errors import DatabaseUnusable, SessionUnusable
from state_pool.layout import CHUNKS_PER_STATE
from state_pool.session_key import SessionKey

logger = logging.getLogger(__name__)

_NUMBERS_OF_SESSIONS = """
INSERT INTO dialogue_numbers SELECT session_id, max(dialogue) FROM sessions WHERE dialogue > 0 GROUP BY session_id
ON CONFLICT(session_id) DO UPDATE SET largest = max(largest, excluded.largest)
"""
_LARGEST_GAP = 10_000
"""Row numbers tried after an unreadable page before the table counts as ended."""


def salvage(damaged: Path, new: Path) -> tuple[list[str], list[str]]:
    """Copy all intact sessions. Returns (names of the copied sessions, names or numbers of the lost ones).

    Raises DatabaseUnusable if `new` exists or `damaged` cannot be opened.
    """
    if new.exists():
        raise DatabaseUnusable(f"{new} exists already; name a file that does not")
    if not damaged.is_file():
        raise DatabaseUnusable(f"there is no file {damaged}")
    source = sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    source.execute("PRAGMA writable_schema = ON")  # otherwise SQLite refuses a truncated file
    target = open_writer(str(new), "NORMAL")
    with contextlib.closing(source), contextlib.closing(target):
        target.execute("BEGIN IMMEDIATE")
        lost = list(_copy_sessions(source, target))
        for table in ("dialogue_numbers", "checkpoint_home", "models"):
            with contextlib.suppress(sqlite3.DatabaseError):  # if readable; an old file has none
                _copy(source, target, table, "TRUE", ())
        target.execute("INSERT INTO pool_settings VALUES ('session_ttl', '0')")  # the original's may be unreadable
        target.execute(_NUMBERS_OF_SESSIONS)
        saved: list[str] = []
        for row, name, dialogue in target.execute(
            "SELECT id, session_id, dialogue FROM sessions ORDER BY id"
        ).fetchall():
            display_name = SessionKey(name, dialogue).display_name
            (saved if _is_whole(target, row) else lost).append(display_name)
        for (row,) in target.execute("SELECT id FROM sessions WHERE quarantined = 'lost'").fetchall():
            for old in delete_sessions(target, (row,)):
                while not delete_chunks(target, old.state, 1000):
                    pass
        target.execute("COMMIT")
    return saved, lost


def _copy_sessions(source: sqlite3.Connection, target: sqlite3.Connection) -> Iterator[str]:
    """Copy every readable session with its rows. Yields the numbers of unreadable ones, as `salvage` lists them."""
    last, misses = 0, 0
    while misses < _LARGEST_GAP:
        try:
            row = source.execute("SELECT min(id) FROM sessions WHERE id > ?", (last,)).fetchone()[0]
        except sqlite3.DatabaseError:
            last, misses = last + 1, misses + 1
            continue
        if misses:
            yield f"numbers {last - misses + 1} to {last}, on unreadable pages"
        if row is None:
            return
        last, misses = int(row), 0
        try:
            _copy(source, target, "sessions", "id = ?", (row,))
            _copy(source, target, "turns", "session = ?", (row,))
            _copy(source, target, "states", "session = ?", (row,))
            found = target.execute("SELECT id FROM states WHERE session = ?", (row,)).fetchone()
            if found is not None:
                low = int(found[0]) * CHUNKS_PER_STATE
                _copy(source, target, "state_chunks", "id >= ? AND id < ?", (low, low + CHUNKS_PER_STATE))
        except sqlite3.DatabaseError:
            yield f"number {row}"
    yield f"all numbers from {last - misses + 1}, on unreadable pages"


def _copy(
    source: sqlite3.Connection, target: sqlite3.Connection, table: str, where: str, values: tuple[Any, ...]
) -> None:
    found = source.execute(f"SELECT * FROM {table} WHERE {where}", values)
    names = ", ".join(column[0] for column in found.description)  # an older file has fewer columns
    for row in found:
        marks = ", ".join("?" * len(row))
        target.execute(f"INSERT INTO {table}({names}) VALUES ({marks})", row)


def _is_whole(target: sqlite3.Connection, row: int) -> bool:
    """Whether the session's rows verify. If not, mark it for removal."""
    try:
        Loader(target, {}, fingerprint=None).read(row)
    except (SessionUnusable, ValueError, KeyError):
        target.execute("UPDATE sessions SET quarantined = 'lost' WHERE id = ?", (row,))
        return False
    return True


def verify_sessions(database: Path) -> tuple[list[str], list[str]]:
    """Return the names of whole sessions and of damaged ones.

    Damaged ones have the reason. Both lists are of one snapshot.

    States in a checkpoint store are not read. Raises DatabaseUnusable.
    """
    whole, damaged = [], []
    with open_with_running_service(database) as connection:
        connection.execute("BEGIN")
        fault = " ".join(str(connection.execute("PRAGMA quick_check(1)").fetchone()[0]).split())
        if fault != "ok":
            damaged.append(f"the file: {fault}")
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sessions'").fetchone() is None:
            raise DatabaseUnusable("the file is no session database; name one with --state-db")
        query = "SELECT id, session_id, dialogue FROM sessions WHERE hidden = 0 ORDER BY id"
        for row, session_id, dialogue in tqdm(
            connection.execute(query).fetchall(), "checking", disable=None, leave=False
        ):
            name = SessionKey(session_id, dialogue).display_name
            try:
                Loader(connection, {}, fingerprint=None).read(row)
                whole.append(name)
            except (SessionUnusable, ValueError, KeyError) as error:
                damaged.append(f"{name}: {error}")
    return whole, damaged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("damaged", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        saved, lost = salvage(arguments.damaged, arguments.new)
    except (DatabaseUnusable, sqlite3.Error) as error:
        logger.error("%s", error)
        return 1
    for name in lost:
        logger.info("lost: %s", name)
    logger.info("%d sessions saved to %s, %d lost", len(saved), arguments.new, len(lost))
    return 0
