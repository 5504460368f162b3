"""What several files of these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.object_server import ObjectServer, served
from test.object_server import missing as object_server_missing
from test.postgres import Server, missing


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server."""
    if (why := missing()) is not None:
        pytest.skip(why)
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    """An S3-compatible server."""
    if (why := object_server_missing()) is not None:
        pytest.skip(why)
    with served() as server:
        yield server
