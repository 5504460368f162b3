"""Files and batches: their records, and their store in a folder and a SQLite database. Safe for threads and processes.

The database also has what translations keep (`routes/translation/stored.py`).

A file is synced before its row is inserted, and deleted after its row. `sweep` removes files without a row. Each call
opens its own connection: calls are rare, and forked processes cannot share one. Times are Unix times in seconds.
"""

from __future__ import annotations

import enum
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from native.files import make_private_folder, sync, write_synced
from routes.config import HttpConfig

_Record = TypeVar("_Record")


class Purpose(enum.StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"
    FINE_TUNE = "fine-tune"
    FINE_TUNE_RESULTS = "fine-tune-results"
    DOCUMENT = "document"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    """Name of the API key. "": no owner."""
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None
    num_tokens: int | None = None
    """of examples"""


class Result(enum.StrEnum):
    """Kind of a batch's result file."""

    OUTPUT = "output"
    ERROR = "error"


class Status(enum.StrEnum):
    """Status of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ACTIVE_STATUSES = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)
"""The runner has work to do for batches in these statuses."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: a file of requests that are answered in the background."""

    id: str
    owner: str
    client: str
    """The client in whose name the rows run."""
    key: str = ""
    """Name of the API key that created it, also if that has admin rights and so no own files."""
    limits: dict[str, int | None] | None = None
    """Limits of the client's key, from when the batch was created."""
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    created_at: int
    expires_at: int
    times: dict[str, int] = {}
    """Time of each status, by name: in_progress, finalizing, ..."""
    counts: Counts = Counts()
    ends_as: Status = Status.COMPLETED
    """Status after finalizing."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = []
    """Why the whole batch failed."""

    def result_id(self, result: Result) -> str:
        """Return the id of a result file, which may not exist yet."""
        return f"file-{self.id.removeprefix('batch_')}{result[0]}"

    def with_status(self, status: Status, now: int, **changes: Any) -> Batch:
        times = {**self.times, status.value: now}
        return msgspec.structs.replace(self, status=status, times=times, **changes)


_BUSY_TIMEOUT_S = 10.0
_ORPHAN_AGE_S = 24 * 3600.0
"""Age after which a file without a row is deleted."""
_UPLOAD_S = 600.0
"""Time to write an uploaded file. An older reservation is of a process that was killed."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS tunings (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tuning_events (
    job TEXT NOT NULL, number INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (job, number)
);
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, bytes INTEGER NOT NULL, started REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS glossaries (
    id TEXT NOT NULL, version INTEGER NOT NULL, owner TEXT NOT NULL, bytes INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (id, version)
);
CREATE INDEX IF NOT EXISTS glossaries_by_owner ON glossaries (owner);
CREATE TABLE IF NOT EXISTS memory (
    owner TEXT NOT NULL, source_lang TEXT NOT NULL, target_lang TEXT NOT NULL, source TEXT NOT NULL,
    target TEXT NOT NULL, PRIMARY KEY (owner, source_lang, target_lang, source)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS documents (
    owner TEXT NOT NULL, id TEXT NOT NULL, used REAL NOT NULL, bytes INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (owner, id)
);
"""


class StoreFullError(Exception):
    """A limit is reached. The message names it."""


class Records(Generic[_Record]):
    """Records of one kind: the rows of a table with the columns id, owner, created and record."""

    def __init__(self, store: Store, table: str, kind: type[_Record]) -> None:
        self._store, self._table, self._kind = store, table, kind

    def select(self, condition: str, *values: Any) -> list[_Record]:
        """Return the records of rows. `condition`: SQL after WHERE."""
        with self._store.open() as database:
            rows = database.execute(f"SELECT record FROM {self._table} WHERE {condition}", values).fetchall()
        return [msgspec.json.decode(row[0], type=self._kind) for row in rows]

    def get(self, owner: str, record_id: str) -> _Record | None:
        """Return a record if the owner may see it. Owner "" sees all."""
        found = self.select("id = ? AND (? = '' OR owner = ?)", record_id, owner, owner)
        return found[0] if found else None

    def page(
        self, owner: str, after: str, limit: int, newest_first: bool = True, condition: str = "TRUE", *values: Any
    ) -> list[_Record]:
        """Return a page of the records that the owner may see. `after`: the last id of the previous page."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        return self.select(
            f"{condition} AND (? = '' OR owner = ?) AND (? = '' OR (created, id) {beyond} "
            f"(SELECT created, id FROM {self._table} WHERE id = ?)) ORDER BY created {order}, id {order} LIMIT ?",
            *(*values, owner, owner, after, after, limit),
        )

    def update(
        self, database: sqlite3.Connection, record_id: str, change: Callable[[_Record], _Record]
    ) -> tuple[_Record, _Record]:
        """Change a record that has a status. Return it before and after. Raises KeyError if it does not exist."""
        row = database.execute(f"SELECT record FROM {self._table} WHERE id = ?", (record_id,)).fetchone()
        if row is None:
            raise KeyError(record_id)
        before = msgspec.json.decode(row[0], type=self._kind)
        after = change(before)
        change_row = f"UPDATE {self._table} SET record = ?1, status = json_extract(?1, '$.status') WHERE id = ?2"
        database.execute(change_row, (msgspec.json.encode(after).decode(), record_id))
        return before, after


class Store:
    """Files and batches in one folder."""

    def __init__(self, folder: Path, max_bytes: int, max_entries: int) -> None:
        """`max_bytes`: of all files together; `max_entries`: files, and running batches, per owner."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._is_created = False
        self._files, self._batches = Records(self, "files", StoredFile), Records(self, "batches", Batch)
        self.file, self.batch = self._files.get, self._batches.get

    @property
    def runs(self) -> Path:
        """Folder of the runner's unfinished results."""
        return self._folder / "runs"

    def adapter_path(self, name: str) -> Path:
        """Return the path of an adapter that a fine-tuning job made."""
        return self._folder / "adapters" / f"{name}.pth"

    def content(self, file_id: str) -> Path:
        """Return the path of a stored file's content."""
        return self._folder / "content" / file_id

    # Files ---------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile, content: bytes) -> None:
        """Store a file. Its bytes are reserved first. Raises StoreFullError, OSError."""
        self._reserve(file)
        try:
            write_synced(self.content(file.id), content)
            self.add_existing_file(file)
        except BaseException:
            self._discard(file.id)
            raise

    def add_existing_file(self, file: StoredFile) -> None:
        """Add the row of a file whose content is already in place."""
        sync(self.content(file.id).parent)
        row = (file.id, file.owner, file.created_at, file.expires_at, file.purpose, file.bytes, _to_json(file))
        with self.open() as database:
            database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            database.execute("DELETE FROM uploads WHERE id = ?", (file.id,))

    def _reserve(self, file: StoredFile) -> None:
        """Reserve an upload's bytes and entry.

        Uploads at the same time then stay within the limits together. Raises StoreFullError.
        """
        now = time.time()
        entries = "SELECT owner, bytes FROM files UNION ALL SELECT owner, bytes FROM uploads"
        with self.open() as database:
            # Also one of a crashed process from before the clock was set back.
            interval = (now - _UPLOAD_S, now + _UPLOAD_S)
            database.execute("DELETE FROM uploads WHERE started NOT BETWEEN ? AND ?", interval)
            query = f"SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(owner = ?), 0) FROM ({entries})"
            used, count = database.execute(query, (file.owner,)).fetchone()
            if used + file.bytes > self._max_bytes:
                raise StoreFullError(
                    f"the files have {used} bytes and this one {file.bytes}, the limit is {self._max_bytes} "
                    "(--files-max-gb); delete files that are no longer needed"
                )
            if count >= self._max_entries:
                raise StoreFullError(f"there are {count} files, the limit is {self._max_entries}; delete some")
            database.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", (file.id, file.owner, file.bytes, now))

    def _discard(self, file_id: str) -> None:
        """Delete the file and the reservation of a failed upload."""
        with suppress(OSError):  # `sweep` deletes it later
            self.content(file_id).unlink(missing_ok=True)
            with self.open() as database:
                database.execute("DELETE FROM uploads WHERE id = ?", (file_id,))

    def files(self, owner: str, purpose: str, after: str, limit: int, newest_first: bool) -> list[StoredFile]:
        """Return a page of the files that the owner may see."""
        return self._files.page(owner, after, limit, newest_first, "(? = '' OR purpose = ?)", purpose, purpose)

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file. Return whether it existed."""
        if self.file(owner, file_id) is None:
            return False
        with self.open() as database:
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.content(file_id).unlink(missing_ok=True)
        return True

    def sweep(self, now: float) -> int:
        """Delete expired files and old files without a row. Return how many.

        A running batch's results have no row yet and are kept, however old.
        """
        if not self._folder.exists():
            return 0
        expected_ids = {batch.result_id(result) for batch in self.active_batches() for result in Result}
        with self.open() as database:
            expired = database.execute("SELECT id FROM files WHERE expires <= ?", (int(now),)).fetchall()
            known = expected_ids | {row[0] for row in database.execute("SELECT id FROM files")}
        for (file_id,) in expired:
            self.delete_file("", file_id)
        num_orphans = 0
        for path in self.content("x").parent.iterdir():
            with suppress(FileNotFoundError):  # an upload was renamed just now
                if path.name not in known and now - path.stat().st_mtime > _ORPHAN_AGE_S:
                    path.unlink()
                    num_orphans += 1
        return len(expired) + num_orphans

    # Batches -------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        """Add a batch to be processed. Raises StoreFullError."""
        with self.open() as database:
            query = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({_PLACEHOLDERS})"
            (count,) = database.execute(query, (batch.owner, *ACTIVE_STATUSES)).fetchone()
            if count >= self._max_entries:
                raise StoreFullError(f"{count} batches are running, the limit is {self._max_entries}; cancel some")
            row = (batch.id, batch.owner, batch.created_at, batch.status, _to_json(batch))
            database.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", row)

    def batches(self, owner: str, after: str, limit: int) -> list[Batch]:
        """Return a page of the batches that the owner may see. The newest come first. Documents are left out."""
        return self._batches.page(owner, after, limit, True, "id LIKE 'batch%'")

    def active_batches(self) -> list[Batch]:
        """Return the batches that the runner has to process, oldest first."""
        if not self._folder.exists():
            return []
        return self._batches.select(f"status IN ({_PLACEHOLDERS}) ORDER BY created, id", *ACTIVE_STATUSES)

    def update(self, batch_id: str, update: Callable[[Batch], Batch]) -> Batch:
        """Change a batch in one transaction. Raises KeyError if it does not exist."""
        with self.open() as database:
            return self._batches.update(database, batch_id, update)[1]

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction and create the database if needed. Raises OSError."""
        try:
            with self._transaction() as database:
                yield database
        except sqlite3.Error as error:
            raise OSError(f"the database of files and batches cannot be used: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if not self._is_created:
            make_private_folder(self._folder)
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


NONE = "none"
_MAX_ENTRIES = 10_000
"""Files per key, and running batches."""


def has_store(config: HttpConfig) -> bool:
    return config.files_dir not in ("", NONE, "auto")


def open_store(config: HttpConfig) -> Store | None:
    """Return the store, or None if the settings have none. Its folder is created at first use."""
    if not has_store(config):
        return None
    return Store(Path(config.files_dir), int(config.files_max_gb * 2**30), _MAX_ENTRIES)
