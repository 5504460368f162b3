"""Which engines may open a database: those of one service, also during writes, or a single one later."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from state_pool.config import PoolConfig
from state_pool.disk import database, process_lock
from state_pool.errors import DatabaseUnusable
from test.pool_fakes import Driver, FakeArena, config_in, end, expected_state


def test_another_service_is_refused_while_an_engine_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Driver(FakeArena(), config_in(tmp_path, engine=name, service="here")) for name in ("one", "two"))
    monkeypatch.setattr(process_lock, "BUSY_TIMEOUT_S", 0.1)
    for config in (config_in(tmp_path), config_in(tmp_path, engine="x", service="elsewhere")):
        with pytest.raises(DatabaseUnusable, match=rf"in use by another process \(pid {os.getpid()}\)"):
            Driver(FakeArena(), config)
    for driver in (one, two):
        assert driver.pool.failure is None
        driver.pool.close()


def test_engine_joins_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Driver(FakeArena(), config_in(tmp_path, engine="one", service="here"))
    briefly = database.disable_busy_wait
    other = sqlite3.connect(tmp_path / "sessions.db", isolation_level=None, check_same_thread=False)

    def while_locked(connection: sqlite3.Connection) -> None:
        briefly(connection)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.2, lambda: other.execute("COMMIT")).start()

    monkeypatch.setattr(database, "disable_busy_wait", while_locked)
    two = Driver(FakeArena(), config_in(tmp_path, engine="two", service="here"))
    two.turn("s", [1])
    for driver in (one, two):
        end(driver)
    other.close()


def test_lazy_durability_needs_a_single_engine(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusable, match="lazy"):
        Driver(FakeArena(), config_in(tmp_path, durability="lazy", engine="one", service="here"))


def test_single_engine_finds_all_sessions(tmp_path: Path) -> None:
    one, two = (Driver(FakeArena(), config_in(tmp_path, engine=name, service="here")) for name in ("one", "two"))
    one.turn("a", [1])
    two.turn("b", [2])
    one.pool.close()
    two.pool.close()
    alone = Driver(FakeArena(), config_in(tmp_path))
    assert np.array_equal(alone.state("a"), expected_state([1]))
    assert np.array_equal(alone.state("b"), expected_state([2]))
    alone.pool.close()


def test_engine_and_service_are_not_flags() -> None:
    assert (PoolConfig().engine, PoolConfig().service) == ("", "")
