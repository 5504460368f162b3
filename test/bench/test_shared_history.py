"""The short form of `bench.faults.shared_history`: engines over one database, killed and stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults import shared_history
from test.postgres import Server, missing


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.cluster)])
def test_every_turn_is_accounted_for(tmp_path: Path, store: str) -> None:
    if store == "postgres" and (why := missing()) is not None:
        pytest.skip(why)
    server = Server() if store == "postgres" else None
    turns = 400 if server is None else 150
    arguments = ["--turns", str(turns), "--sessions", "20", "--engines", "2", "--every", "2"]
    try:
        address = str(tmp_path / "sessions.db") if server is None else server.database()
        figures = shared_history.run(tmp_path, address, server, shared_history.options(arguments))
    finally:
        if server is not None:
            server.close()
    assert figures["faults"] == []
    assert figures["turns"] >= turns
