"""Stored sessions in a closed database. Helpers inspect and damage them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from test.pool_fakes import Driver, FakeArena, config_in, expected_state

WORDS = 4096


def write_three(folder: Path, **changes: object) -> None:
    """Store sessions a, b and c with two turns each, then close."""
    driver = Driver(FakeArena(words=WORDS), config_in(folder, **changes))
    for name in "abc":
        driver.turn(name, [ord(name), 1])
        driver.turn(name, [2, 3])
    driver.pool.close()


def holds(driver: Driver, name: str) -> bool:
    """Whether the session is as `write_three` made it."""
    return bool(np.array_equal(driver.state(name), expected_state([ord(name), 1, 2, 3], WORDS)))


def reopen(folder: Path, **changes: object) -> Driver:
    """Open a new pool over the same file."""
    return Driver(FakeArena(words=WORDS), config_in(folder, **changes))


@contextlib.contextmanager
def raw(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the file without the pool."""
    with contextlib.closing(sqlite3.connect(folder / "sessions.db", isolation_level=None)) as connection:
        yield connection
