"""The database's files as a disk keeps them: a power loss may lose or tear what was written after the last fsync."""

from __future__ import annotations

import random
from pathlib import Path

WAL_HEADER_BYTES = 32
"""SQLite syncs the log's header before the frames behind it."""
SECTOR_BYTES = 512


class Disk:
    """Knows what SQLite has synced: with FULL each commit, with NORMAL only what a checkpoint has moved."""

    def __init__(self, database: Path, rng: random.Random, *, may_lose_power: bool) -> None:
        """may_lose_power: False: what is synced is never restored, so the files are not read at each commit"""
        self._database, self._log = database, Path(f"{database}-wal")
        self._rng = rng
        self._may_lose_power = may_lose_power
        self.syncs_commits = False
        """whether SQLite syncs the log with each commit"""
        self._synced_database = self._synced_log = b""
        self._files = b"", b""

    def sync(self) -> None:
        """Everything written so far is safe."""
        self._synced_database = _read(self._database)
        if self._may_lose_power:
            self._synced_log = _read(self._log)

    def after(self, sql: str, is_whole: bool) -> bool:
        """A statement has run. Returns whether everything written so far is safe now.

        is_whole: of a checkpoint, whether it has moved the whole log
        """
        is_commit = sql == "COMMIT"  # a checkpoint syncs the log before it writes the database
        is_synced = self.syncs_commits if is_commit else is_whole or _read(self._database) != self._synced_database
        if is_synced and (self._may_lose_power or not is_commit):
            self.sync()
        return is_synced

    def stop(self) -> None:
        """The process or the machine ends: remember the files as they are, since closing SQLite changes them."""
        self._files = _read(self._database), _read(self._log)

    def during(self, sql: str) -> None:
        """The power fails while a statement runs that would sync. Call after it has run, instead of `after`."""
        if sql != "COMMIT":
            self._synced_log = _read(self._log)

    def restore(self, has_lost_power: bool) -> None:
        """Restore the files of `stop`. After a power loss, parts are lost or torn. No connection may be open."""
        database, log = self._files
        if has_lost_power:
            log = log[:WAL_HEADER_BYTES] + self._torn(self._synced_log, log)[WAL_HEADER_BYTES:]
            database = self._torn(self._synced_database, database)
        self._database.write_bytes(database)
        self._log.write_bytes(log)

    def _torn(self, old: bytes, new: bytes) -> bytes:
        """Return a file with some of the changes from `old` to `new`. The disk does not have the others."""
        rng = self._rng
        if old == new or rng.random() < 0.2:
            return new
        if rng.random() < 0.25:
            return old
        if rng.random() < 0.5:  # in order up to any byte
            at = rng.randrange(len(new) + 1)
            return new[:at] + old[at:]
        length = max(len(old), len(new))
        sectors = []
        for start in range(0, length, SECTOR_BYTES):
            kept = rng.choice((old, new))[start : start + SECTOR_BYTES]
            sectors.append(kept.ljust(min(SECTOR_BYTES, length - start), b"\0"))
        return b"".join(sectors)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
