"""Checkpoints as files of a folder, mostly one that several machines mount."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from state_pool.disk.checkpoint_store import BATCH, CheckpointStoreAway, Listed, ObjectMissing
from state_pool.errors import DatabaseUnusable


class FolderStore:
    """A folder, as `CheckpointStore` has it."""

    def __init__(self, folder: Path) -> None:
        """Raises DatabaseUnusable for a folder that is not there: it may be a mount that is missing."""
        self.name = folder.as_uri()
        self._folder = folder
        if not folder.is_dir():
            raise DatabaseUnusable(
                f"checkpoint store {self.name}: there is no such folder; mount or make it, or name another with "
                "--checkpoint-store"
            )

    def prepare(self, home: str) -> None:
        """See `CheckpointStore`."""
        with self._told():
            (self._folder / home).mkdir(exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        """See `CheckpointStore`; a crash may leave a file that ends with .part."""
        target = self._folder / key
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        with self._told():
            try:
                with part.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                part.rename(target)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def get(self, key: str) -> bytes:
        """See `CheckpointStore`."""
        with self._told():
            try:
                return (self._folder / key).read_bytes()
            except FileNotFoundError:
                raise ObjectMissing(key) from None

    def delete(self, key: str) -> None:
        """See `CheckpointStore`."""
        with self._told():
            (self._folder / key).unlink(missing_ok=True)

    def list(self, home: str) -> Iterator[list[Listed]]:
        """See `CheckpointStore`."""
        with self._told(), os.scandir(self._folder / home) as entries:
            while batch := list(islice(entries, BATCH)):
                yield [found for entry in batch if (found := _listed(home, entry)) is not None]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointStoreAway(
                f"{error.strerror or error}; make room in the folder, or see to its mount"
            ) from None


def _listed(home: str, entry: os.DirEntry[str]) -> Listed | None:
    try:
        return Listed(f"{home}/{entry.name}", time.time() - entry.stat().st_mtime)
    except FileNotFoundError:  # deleted meanwhile
        return None
