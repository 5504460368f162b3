"""Shared fixtures of the state pool's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.postgres import Server, unavailable_reason
from test.s3_server import ObjectServer, run_s3_server
from test.s3_server import unavailable_reason as s3_unavailable_reason


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    if (why := unavailable_reason()) is not None:
        pytest.skip(why)
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    if (why := s3_unavailable_reason()) is not None:
        pytest.skip(why)
    with run_s3_server() as server:
        yield server
