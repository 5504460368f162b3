"""The sidecar: a small SQLite file next to the output, from which a killed run resumes.

It is written after the output is synced. On resume the output is truncated to the sidecar's state.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from programs.record import RunError

SUFFIX = ".progress"
_VERSION = 1
_WAITING = "CREATE TABLE IF NOT EXISTS waiting (number INTEGER PRIMARY KEY, output TEXT NOT NULL, error TEXT NOT NULL)"
_SCHEMA = (
    "CREATE TABLE run (version INTEGER NOT NULL, settings TEXT NOT NULL, input TEXT NOT NULL, progress TEXT NOT NULL)",
    "CREATE TABLE answers (key BLOB PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID",
)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The durable progress of a run."""

    next_index: int = 0
    """All records before this index are done."""
    beyond: list[int] = []
    """Done records after `next_index`."""
    has_begun: bool = False
    """Whether the output's header is written."""
    output_bytes: int = 0
    errors_bytes: int = 0
    answered: int = 0
    failed: int = 0


class Sidecar:
    """The sidecar of one run. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: keep the progress in memory. Raises RunError if the file is unusable."""
        self._lock = threading.Lock()
        self._path = path
        try:
            self._database = sqlite3.connect(
                "" if path is None else path, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA synchronous=FULL")
            self.is_new = not self._database.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            raise RunError(f"{path} cannot be used now ({error}); try again") from None
        except sqlite3.Error as error:
            raise RunError(f"{path} cannot be used ({error}); delete it and the output, or give --fresh") from None

    def begin(self, settings: Mapping[str, str], input_digest: str) -> Progress:
        """Starts or resumes a run. Raises RunError if the file belongs to other settings or another input."""
        with self._lock:
            try:
                if self.is_new:
                    self._create(settings, input_digest)
                    return Progress()
                row = self._database.execute("SELECT version, settings, input, progress FROM run").fetchone()
                progress = msgspec.json.decode(row[3], type=Progress)
                stored = msgspec.json.decode(row[1], type=dict[str, str])
            except sqlite3.OperationalError as error:  # locked, full or unreachable: --fresh would not help
                raise RunError(f"{self._path} cannot be used now ({error}); try again") from None
            except (sqlite3.Error, TypeError, msgspec.DecodeError) as error:
                raise RunError(f"{self._path} cannot be read ({error}); give --fresh") from None
        if row[0] != _VERSION:
            raise RunError(
                f"{self._path} was written by another version of this program; use that version, or give --fresh"
            )
        _check_settings(stored, settings)
        if row[2] != input_digest:
            raise RunError(
                "the input has changed since this output was started (its SHA-256 differs); "
                "give the same file, another --output, or --fresh to start over"
            )
        return progress

    def _create(self, settings: Mapping[str, str], input_digest: str) -> None:
        row = (_VERSION, json.dumps(dict(settings)), input_digest, msgspec.json.encode(Progress()).decode())
        with self._database:
            self._database.execute("BEGIN")
            for statement in _SCHEMA:
                self._database.execute(statement)
            self._database.execute("INSERT INTO run VALUES (?, ?, ?, ?)", row)

    def waiting(self) -> dict[int, tuple[str, str]]:
        """Returns the finished records that wait for earlier ones: output and error, by index. Raises RunError."""
        try:
            with self._lock:
                self._database.execute(_WAITING)
                return {row[0]: (row[1], row[2]) for row in self._database.execute("SELECT * FROM waiting")}
        except sqlite3.Error as error:
            raise RunError(f"{self._path} cannot be used now ({error}); try again") from None

    def commit(
        self, progress: Progress, answers: Mapping[bytes, str], waiting: Mapping[int, tuple[str, str]] | None = None
    ) -> None:
        """Stores the progress. Raises OSError, for example on a full disk.

        waiting: records that have finished since the last commit, and wait for earlier ones
        """
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN")
                self._database.execute("UPDATE run SET progress = ?", (msgspec.json.encode(progress).decode(),))
                if answers:
                    self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", answers.items())
                if waiting is not None:
                    rows = ((number, *texts) for number, texts in waiting.items())
                    self._database.executemany("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)", rows)
                    self._database.execute("DELETE FROM waiting WHERE number < ?", (progress.next_index,))
        except sqlite3.Error as error:
            raise OSError(str(error)) from error

    def answer(self, key: bytes) -> str | None:
        """Returns the stored answer to an equal line. Raises RunError."""
        try:
            with self._lock:
                row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise RunError(f"{self._path} cannot be read ({error}); give the same command again to resume") from None
        return None if row is None else str(row[0])

    def close(self) -> None:
        self._database.close()


def _check_settings(stored: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Checks that a run has the earlier settings. Raises RunError naming the first difference."""
    for name in sorted({*stored, *given}):
        before, after = stored.get(name, ""), given.get(name, "")
        if before != after:
            raise RunError(
                f"{name} was {before or 'not given'} when this output was started and is {after or 'not given'} now; "
                "give the same value, another --output, or --fresh to start over"
            )
