"""Which engines may use a database: those of one service, also one that comes while others write, or is alone again."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from state_pool.config import PoolConfig
from state_pool.disk import database
from state_pool.errors import DatabaseUnusable
from test.pool_fakes import Driver, FakeArena, config_in, expected_state


def test_another_service_is_refused_while_an_engine_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Driver(FakeArena(), config_in(tmp_path, engine=name, service="here")) for name in ("one", "two"))
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    for config in (config_in(tmp_path), config_in(tmp_path, engine="x", service="elsewhere")):
        with pytest.raises(DatabaseUnusable, match=rf"in use by another process \(pid {os.getpid()}\)"):
            Driver(FakeArena(), config)
    for driver in (one, two):
        assert driver.pool.failure is None
        driver.pool.close()


def test_an_engine_comes_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        driver.settle()
        driver.pool.close()
    other.close()


def test_lazy_turns_are_for_one_engine(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusable, match="lazy"):
        Driver(FakeArena(), config_in(tmp_path, durability="lazy", engine="one", service="here"))


def test_alone_again_it_has_everything(tmp_path: Path) -> None:
    one, two = (Driver(FakeArena(), config_in(tmp_path, engine=name, service="here")) for name in ("one", "two"))
    one.turn("a", [1])
    two.turn("b", [2])
    one.pool.close()
    two.pool.close()
    alone = Driver(FakeArena(), config_in(tmp_path))
    assert np.array_equal(alone.state("a"), expected_state([1]))
    assert np.array_equal(alone.state("b"), expected_state([2]))
    alone.pool.close()


def test_config_names_are_no_flags() -> None:
    assert (PoolConfig().engine, PoolConfig().service) == ("", "")
