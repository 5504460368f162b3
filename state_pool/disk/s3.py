"""Checkpoints on an S3-compatible server. Optional: needs obstore (requirements-cluster.txt).

Keys, session tokens and roles come from the environment alone, as for every program of AWS's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from state_pool.checkpoint_address import BucketAddress
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
"""How long one request may take, its body included."""
RETRIES = 3
RETRY_TIMEOUT_S = 20
"""After so long from its beginning a request that failed is not tried again."""
_MAX_MESSAGE = 300


class S3Store:
    """A bucket, or what lies under a prefix of it, as `CheckpointStore` has it."""

    def __init__(self, location: BucketAddress) -> None:
        """Raises DatabaseUnusable; asks nobody yet."""
        self.name = f"s3://{location.bucket}/{location.prefix}"
        if obstore is None:
            raise DatabaseUnusable(
                f"checkpoint store {self.name}: S3 needs obstore; pip install -r requirements-cluster.txt"
            )
        given: dict[str, Any] = {"endpoint": location.endpoint} if location.endpoint else {}
        given |= {"region": location.region} if location.region else {}
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
                **given,
            )

    def prepare(self, key_prefix: str) -> None:
        """See `CheckpointStore`: a bucket has no folders."""

    def put(self, key: str, data: bytes) -> None:
        """See `CheckpointStore`. One request: parts of one that was given up would stay, unseen and paid for."""
        with self._translate_errors():
            obstore.put(self._bucket, key, data, use_multipart=False)

    def get(self, key: str) -> bytes:
        """See `CheckpointStore`."""
        with self._translate_errors():
            try:
                return bytes(obstore.get(self._bucket, key).bytes())
            except FileNotFoundError:
                raise ObjectNotFound(key) from None

    def delete(self, key: str) -> None:
        """See `CheckpointStore`."""
        with self._translate_errors(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._bucket, key)

    def list(self, key_prefix: str) -> Iterator[list[ListedObject]]:
        """See `CheckpointStore`."""
        with self._translate_errors():
            for batch in obstore.list(self._bucket, key_prefix, chunk_size=LIST_BATCH_SIZE):
                now = datetime.now(UTC)
                yield [ListedObject(meta["path"], (now - meta["last_modified"]).total_seconds()) for meta in batch]

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:  # obstore's, among which some are Python's own
            text = " ".join(str(error).split("\n\n")[0].split())[:_MAX_MESSAGE]
            raise CheckpointStoreUnavailable(
                f"{text}; see to the server, its address and the keys in the environment"
            ) from None
