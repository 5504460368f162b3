"""Where whole states are kept as objects beside the database: a folder that engines share, or an S3-compatible server.

An object is written once, under a name that was never used, read whole, and deleted; which of them count only the
database knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

LIST_BATCH_SIZE = 1000
"""Objects told at once by a listing."""


class CheckpointStoreUnavailable(Exception):  # noqa: N818 - names what happened
    """The store does not answer, or refuses; what is in it is not known."""


class ObjectNotFound(Exception):  # noqa: N818 - names what happened
    """The store answers that there is no such object."""


class ListedObject(NamedTuple):
    """An object that is there."""

    key: str
    age_s: float
    """Since it was written, by the clock here."""


class CheckpointStore(Protocol):
    """Methods block and raise CheckpointStoreAway. Any thread. One that blocks without end, like a mount that hangs,
    keeps its thread; `transfers` tells whoever waits."""

    name: str
    """What it is called in messages and in /status; nothing secret."""

    def prepare(self, key_prefix: str) -> None:
        """Objects whose keys begin with `key_prefix` and a slash will be put."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Keep an object: whole or not at all, and when this returns, for good."""
        ...

    def get(self, key: str) -> bytes:
        """Raises ObjectMissing."""
        ...

    def delete(self, key: str) -> None:
        """An object that is not there is deleted."""
        ...

    def list(self, key_prefix: str) -> Iterator[list[ListedObject]]:
        """All objects whose keys begin so, some at a time, those among them that are half written."""
        ...
