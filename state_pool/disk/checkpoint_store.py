"""Protocol of stores for whole states outside the database: a shared folder or an S3-compatible server.

An object is written once under a new key, read whole, and deleted. Only the database knows which objects are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

LIST_BATCH_SIZE = 1000
"""Objects per batch of a listing."""


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
    """Name in messages and in /status, without secrets."""

    def prepare(self, key_prefix: str) -> None:
        """Prepare for objects whose keys begin with `key_prefix` and a slash."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store an object atomically and durably."""
        ...

    def get(self, key: str) -> bytes:
        """Raises ObjectNotFound."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. A missing object is no error."""
        ...

    def list(self, key_prefix: str) -> Iterator[list[ListedObject]]:
        """Yield all objects with the key prefix in batches, also half-written ones."""
        ...
