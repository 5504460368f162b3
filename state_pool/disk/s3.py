"""Checkpoint store on an S3-compatible server. Optional: needs obstore (requirements-cluster.txt).

Credentials come only from the environment, with the names that AWS's tools use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from state_pool.addresses import BucketAddress
from state_pool.disk.checkpoint_store import LIST_BATCH_SIZE, CheckpointStoreUnavailable, ListedObject, ObjectNotFound
from state_pool.errors import DatabaseUnusable

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store as Bucket
except ImportError:  # an optional package
    obstore = None  # type: ignore[assignment]

CONNECT_TIMEOUT_S = 3
REQUEST_TIMEOUT_S = 30
"""Limit per request, with its body."""
RETRIES = 3
RETRY_TIMEOUT_S = 20
"""A failed request is not retried after this time from its start."""
_MAX_MESSAGE = 300


class S3Store:
    """A CheckpointStore: objects under a prefix of a bucket."""

    def __init__(self, location: BucketAddress) -> None:
        """Raises DatabaseUnusable. Does not contact the server yet."""
        self.name = f"s3://{location.bucket}/{location.prefix}"
        if obstore is None:
            raise DatabaseUnusable(
                f"checkpoint store {self.name}: S3 needs obstore; pip install -r requirements-cluster.txt"
            )
        options: dict[str, Any] = {"endpoint": location.endpoint} if location.endpoint else {}
        options |= {"region": location.region} if location.region else {}
        with self._translate_errors():
            self._bucket = Bucket(
                location.bucket,
                prefix=location.prefix or None,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                    "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
                    "allow_http": location.endpoint.startswith("http://"),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)},
                **options,
            )

    def prepare(self, key_prefix: str) -> None:
        """See `CheckpointStore`. A bucket has no folders."""

    def put(self, key: str, data: bytes) -> None:
        """See `CheckpointStore`. Uses one request: parts of an aborted multipart upload would stay and cost money."""
        with self._translate_errors():
            obstore.put(self._bucket, key, data, use_multipart=False)

    def get(self, key: str) -> bytes:
        """See `CheckpointStore`. Raises ObjectNotFound."""
        with self._translate_errors():
            try:
                return bytes(obstore.get(self._bucket, key).bytes())
            except FileNotFoundError:
                raise ObjectNotFound(key) from None

    def delete(self, key: str) -> None:
        with self._translate_errors(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._bucket, key)

    def list(self, key_prefix: str) -> Iterator[list[ListedObject]]:
        with self._translate_errors():
            for batch in obstore.list(self._bucket, key_prefix, chunk_size=LIST_BATCH_SIZE):
                now = datetime.now(UTC)
                yield [ListedObject(meta["path"], (now - meta["last_modified"]).total_seconds()) for meta in batch]

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:  # obstore raises some of Python's own errors
            text = " ".join(str(error).split("\n\n")[0].split())[:_MAX_MESSAGE]
            raise CheckpointStoreUnavailable(
                f"{text}; check the server, its address and the keys in the environment"
            ) from None
