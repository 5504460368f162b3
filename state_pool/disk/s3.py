"""Checkpoints on an S3-compatible server. Optional: needs obstore (requirements-cluster.txt).

Keys, session tokens and roles come from the environment alone, as for every program of AWS's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from state_pool.checkpoint_address import BucketAddress
from state_pool.disk.checkpoint_store import BATCH, CheckpointStoreAway, Listed, ObjectMissing
from state_pool.errors import DatabaseUnusable

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store as Bucket
except ImportError:  # an optional package
    obstore = None  # type: ignore[assignment]

CONNECT_S = 3
REQUEST_S = 30
"""How long one request may take, its body included."""
RETRIES = 3
RETRY_S = 20
"""After so long from its beginning a request that failed is not tried again."""
_LONGEST_MESSAGE = 300


class S3Store:
    """A bucket, or what lies under a prefix of it, as `CheckpointStore` has it."""

    def __init__(self, place: BucketAddress) -> None:
        """Raises DatabaseUnusable; asks nobody yet."""
        self.name = f"s3://{place.bucket}/{place.prefix}"
        if obstore is None:
            raise DatabaseUnusable(
                f"checkpoint store {self.name}: S3 needs obstore; pip install -r requirements-cluster.txt"
            )
        given: dict[str, Any] = {"endpoint": place.endpoint} if place.endpoint else {}
        given |= {"region": place.region} if place.region else {}
        with self._told():
            self._bucket = Bucket(
                place.bucket,
                prefix=place.prefix or None,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=REQUEST_S),
                    "allow_http": place.endpoint.startswith("http://"),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
                **given,
            )

    def prepare(self, home: str) -> None:
        """See `CheckpointStore`: a bucket has no folders."""

    def put(self, key: str, data: bytes) -> None:
        """See `CheckpointStore`. One request: parts of one that was given up would stay, unseen and paid for."""
        with self._told():
            obstore.put(self._bucket, key, data, use_multipart=False)

    def get(self, key: str) -> bytes:
        """See `CheckpointStore`."""
        with self._told():
            try:
                return bytes(obstore.get(self._bucket, key).bytes())
            except FileNotFoundError:
                raise ObjectMissing(key) from None

    def delete(self, key: str) -> None:
        """See `CheckpointStore`."""
        with self._told(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._bucket, key)

    def list(self, home: str) -> Iterator[list[Listed]]:
        """See `CheckpointStore`."""
        with self._told():
            for batch in obstore.list(self._bucket, home, chunk_size=BATCH):
                now = datetime.now(UTC)
                yield [Listed(meta["path"], (now - meta["last_modified"]).total_seconds()) for meta in batch]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:  # obstore's, among which some are Python's own
            text = " ".join(str(error).split("\n\n")[0].split())[:_LONGEST_MESSAGE]
            raise CheckpointStoreAway(
                f"{text}; see to the server, its address and the keys in the environment"
            ) from None
