"""The store: a folder with contents, and a database of its own beside the sessions'. Any thread, any process.

A content is synced before its row is there, and its row is gone before its content is; what has no row is swept away.
Every call opens the database anew: calls are few, and processes that are forked share no connection.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from routes.file_records import ACTIVE_STATUSES, Batch, Result, StoredFile

_BUSY_TIMEOUT_S = 10.0
_ORPHAN_AGE_S = 24 * 3600.0
"""Age at which a content without a row is nobody's any more."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
"""


class StoreFullError(Exception):
    """There is no room for one more; the message names the limit."""


class Store:
    """Files and batches in one folder."""

    def __init__(self, folder: Path, max_bytes: int, max_entries: int) -> None:
        """`max_bytes`: of all contents; `max_entries`: files, and batches, of one owner."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._is_created = False

    @property
    def runs(self) -> Path:
        """Where the runner writes what is under way."""
        return self._folder / "runs"

    def content(self, file_id: str) -> Path:
        """Where a file's content lies. The id must be a stored one."""
        return self._folder / "content" / file_id

    # Files ---------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile, content: bytes) -> None:
        """Keep a file. Raises StoreFullError, OSError."""
        self._check_room(file)
        path = self.content(file.id)
        temporary_path = path.with_suffix(".half")
        with temporary_path.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        temporary_path.rename(path)
        self.add_existing_file(file)

    def add_existing_file(self, file: StoredFile) -> None:
        """Keep a file whose content is in its place already."""
        _sync(self.content(file.id).parent)
        row = (file.id, file.owner, file.created_at, file.expires_at, file.purpose, file.bytes, _to_json(file))
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def _check_room(self, file: StoredFile) -> None:
        with self._open() as database:
            (used,) = database.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()
            (count,) = database.execute("SELECT COUNT(*) FROM files WHERE owner = ?", (file.owner,)).fetchone()
        if used + file.bytes > self._max_bytes:
            raise StoreFullError(
                f"the files have {used} bytes and this one {file.bytes}, the limit is {self._max_bytes} "
                "(--files-max-gb); delete files that are done with"
            )
        if count >= self._max_entries:
            raise StoreFullError(f"there are {count} files, the limit is {self._max_entries}; delete some")

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """A file that the owner may see; of "" every one."""
        with self._open() as database:
            query = "SELECT record FROM files WHERE id = ? AND (? = '' OR owner = ?)"
            row = database.execute(query, (file_id, owner, owner)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=StoredFile)

    def files(self, owner: str, purpose: str, after: str, limit: int, newest_first: bool) -> list[StoredFile]:
        """A page of the files that the owner may see."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        query = (
            "SELECT record FROM files WHERE (? = '' OR owner = ?) AND (? = '' OR purpose = ?) AND (? = '' OR "
            f"(created, id) {beyond} (SELECT created, id FROM files WHERE id = ?)) "
            f"ORDER BY created {order}, id {order} LIMIT ?"
        )
        with self._open() as database:
            rows = database.execute(query, (owner, owner, purpose, purpose, after, after, limit)).fetchall()
        return [msgspec.json.decode(row[0], type=StoredFile) for row in rows]

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Forget a file; whether there was one."""
        if self.file(owner, file_id) is None:
            return False
        with self._open() as database:
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.content(file_id).unlink(missing_ok=True)
        return True

    def sweep(self, now: float) -> int:
        """Delete files that have expired, and contents without a row; how many.

        Results of a batch under way may be as old as its last line of that kind, and have no row yet.
        """
        if not self._folder.exists():
            return 0
        expected_ids = {batch.result_id(result) for batch in self.active_batches() for result in Result}
        with self._open() as database:
            expired = database.execute("SELECT id FROM files WHERE expires <= ?", (int(now),)).fetchall()
            known = expected_ids | {row[0] for row in database.execute("SELECT id FROM files")}
        for (file_id,) in expired:
            self.delete_file("", file_id)
        lost = 0
        for path in self.content("x").parent.iterdir():
            with suppress(FileNotFoundError):  # an upload has its name by now
                if path.name not in known and now - path.stat().st_mtime > _ORPHAN_AGE_S:
                    path.unlink()
                    lost += 1
        return len(expired) + lost

    # Batches -------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        """Keep a batch; it is under way from now on. Raises StoreFullError."""
        with self._open() as database:
            query = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({_PLACEHOLDERS})"
            (count,) = database.execute(query, (batch.owner, *ACTIVE_STATUSES)).fetchone()
            if count >= self._max_entries:
                raise StoreFullError(f"{count} batches are under way, the limit is {self._max_entries}; cancel some")
            row = (batch.id, batch.owner, batch.created_at, batch.status, _to_json(batch))
            database.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", row)

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """A batch that the owner may see; of "" every one."""
        with self._open() as database:
            query = "SELECT record FROM batches WHERE id = ? AND (? = '' OR owner = ?)"
            row = database.execute(query, (batch_id, owner, owner)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Batch)

    def batches(self, owner: str, after: str, limit: int) -> list[Batch]:
        """A page of the batches that the owner may see, the newest first."""
        query = (
            "SELECT record FROM batches WHERE (? = '' OR owner = ?) AND (? = '' OR "
            "(created, id) < (SELECT created, id FROM batches WHERE id = ?)) ORDER BY created DESC, id DESC LIMIT ?"
        )
        with self._open() as database:
            rows = database.execute(query, (owner, owner, after, after, limit)).fetchall()
        return [msgspec.json.decode(row[0], type=Batch) for row in rows]

    def active_batches(self) -> list[Batch]:
        """Batches that the runner has something to do for, the oldest first."""
        if not self._folder.exists():
            return []
        query = f"SELECT record FROM batches WHERE status IN ({_PLACEHOLDERS}) ORDER BY created, id"
        with self._open() as database:
            rows = database.execute(query, ACTIVE_STATUSES).fetchall()
        return [msgspec.json.decode(row[0], type=Batch) for row in rows]

    def update(self, batch_id: str, update: Callable[[Batch], Batch]) -> Batch:
        """Change a batch as it is now; nobody changes it meanwhile. Raises KeyError if there is none."""
        with self._open() as database:
            row = database.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None:
                raise KeyError(batch_id)
            batch = update(msgspec.json.decode(row[0], type=Batch))
            values = (batch.status, _to_json(batch), batch_id)
            database.execute("UPDATE batches SET status = ?, record = ? WHERE id = ?", values)
        return batch

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction on the database, which is made if need be. Raises OSError."""
        try:
            with self._transaction() as database:
                yield database
        except sqlite3.Error as error:
            raise OSError(f"the database of files and batches cannot be used: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if not self._is_created:
            for folder in (self.content("x").parent, self.runs):
                folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "batches.db"
        with closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous=FULL")
            if not self._is_created:
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(_SCHEMA)
                self._is_created = True
            with database:
                database.execute("BEGIN IMMEDIATE")
                yield database


_PLACEHOLDERS = ",".join("?" * len(ACTIVE_STATUSES))


def _to_json(record: StoredFile | Batch) -> str:
    return msgspec.json.encode(record).decode()


def _sync(folder: Path) -> None:
    """Wait until the names in the folder are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
