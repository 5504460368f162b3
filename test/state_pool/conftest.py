"""What several files of these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.postgres import Server, missing


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server."""
    if (why := missing()) is not None:
        pytest.skip(why)
    server = Server()
    yield server
    server.close()
