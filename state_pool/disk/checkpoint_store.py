"""Stores for whole states outside the database: their protocol, and one in a folder, mostly of a shared mount.

An object is written once under a new key, read whole, and deleted. Only the database knows which objects are in use.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from native.files import write_synced
from state_pool.errors import DatabaseUnusable

LIST_BATCH_SIZE = 1000


class CheckpointStoreUnavailable(Exception):  # noqa: N818 - names what happened
    """The store does not answer, or refuses. Its content is unknown."""


class ObjectNotFound(Exception):  # noqa: N818 - names what happened
    """The store answers that there is no such object."""


class ListedObject(NamedTuple):
    key: str
    age_s: float
    """Time since it was written, by this machine's clock."""


class CheckpointStore(Protocol):
    """A store of objects. Any thread.

    Methods block and raise CheckpointStoreUnavailable. A hanging mount may block a thread forever; `WorkerThreads` then
    fails the job.
    """

    name: str
    """in messages and in /status, without secrets"""

    def prepare(self, key_prefix: str) -> None:
        """Prepare the store. `key_prefix`: of all keys, followed by a slash."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object atomically and durably."""

    def get(self, key: str) -> bytes:
        """Return an object's data. Raises ObjectNotFound."""

    def delete(self, key: str) -> None:
        """Delete an object. A missing object is no error."""

    def list(self, key_prefix: str) -> Iterator[list[ListedObject]]:
        """Yield the objects with this key prefix in batches, also half-written ones."""


class FolderStore:
    def __init__(self, folder: Path) -> None:
        """Raises DatabaseUnusable if there is no such folder: its mount may be missing."""
        self.name = folder.as_uri()
        self._folder = folder
        if not folder.is_dir():
            raise DatabaseUnusable(
                f"checkpoint store {self.name}: there is no such folder; mount or make it, or name another with "
                "--checkpoint-store"
            )

    def prepare(self, key_prefix: str) -> None:
        with self._translate_errors():
            (self._folder / key_prefix).mkdir(exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        """See `CheckpointStore`. A crash may leave a file that ends in .half."""
        with self._translate_errors():
            write_synced(self._folder / key, data)

    def get(self, key: str) -> bytes:
        """See `CheckpointStore`. Raises ObjectNotFound."""
        with self._translate_errors():
            try:
                return (self._folder / key).read_bytes()
            except FileNotFoundError:
                raise ObjectNotFound(key) from None

    def delete(self, key: str) -> None:
        with self._translate_errors():
            (self._folder / key).unlink(missing_ok=True)

    def list(self, key_prefix: str) -> Iterator[list[ListedObject]]:
        with self._translate_errors(), os.scandir(self._folder / key_prefix) as entries:
            while batch := list(islice(entries, LIST_BATCH_SIZE)):
                yield [found for entry in batch if (found := _listed(key_prefix, entry)) is not None]

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointStoreUnavailable(
                f"{error.strerror or error}; free space in the folder, or check its mount"
            ) from None


def _listed(key_prefix: str, entry: os.DirEntry[str]) -> ListedObject | None:
    try:
        return ListedObject(f"{key_prefix}/{entry.name}", time.time() - entry.stat().st_mtime)
    except FileNotFoundError:  # deleted meanwhile
        return None
