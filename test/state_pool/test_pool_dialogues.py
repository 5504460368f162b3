"""Dialogue numbers are never reused: after a delete, a restart, a migration or a salvage."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_pool.disk.recover import salvage
from state_pool.errors import SessionNotFound
from state_pool.sessions import DialogueNumbers
from test.pool_fakes import Driver, end, opened
from test.state_pool.stored_sessions import raw


def number_of(driver: Driver, session_id: str, parent: int = 0) -> int | None:
    return driver.turn(session_id, [1], branch_from=parent).dialogue_idx


@pytest.mark.parametrize("durability", ["log", "turn", "lazy", "memory"])
def test_dialogue_number_is_not_reused_after_a_delete(tmp_path: Path, durability: str) -> None:
    driver = opened(tmp_path, **({"state_db": ""} if durability == "memory" else {"durability": durability}))
    assert [number_of(driver, "s") for _ in range(3)] == [1, 2, 3]
    assert driver.delete("s:3") == 1
    with pytest.raises(SessionNotFound):
        driver.pool.turns.checkout("s", 3)
    assert number_of(driver, "s") == 4
    assert driver.delete("s") == 3
    assert number_of(driver, "s") == 5
    assert number_of(driver, "other") == 1, "each session counts for itself"
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn", "lazy"])
def test_dialogue_number_is_not_reused_after_a_restart(tmp_path: Path, durability: str) -> None:
    driver = opened(tmp_path, durability=durability)
    for name in ("some are left", "none is left"):
        for _ in range(3):
            number_of(driver, name)
    driver.delete("some are left:3")
    driver.delete("none is left")
    end(driver)
    driver = opened(tmp_path, durability=durability)
    assert [number_of(driver, name) for name in ("some are left", "none is left")] == [4, 4]
    driver.pool.close()


def test_dialogue_number_is_not_reused_after_a_migration(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    for _ in range(2):
        number_of(driver, "s")
    driver.pool.close()
    with raw(tmp_path) as connection:
        connection.execute("DROP TABLE dialogue_numbers")
        connection.execute("DROP INDEX sessions_by_updated")
        connection.execute("DROP INDEX states_in_objects")
        for column in ("object_key", "object_checksum"):
            connection.execute(f"ALTER TABLE states DROP COLUMN {column}")
        for table in ("engines", "engine_numbers", "directory", "checkpoint_home", "pool_settings", "models"):
            connection.execute(f"DROP TABLE {table}")
        for column in ("origin_name", "origin_digest", "keeps_log"):
            connection.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        connection.execute("DELETE FROM schema_migrations WHERE version >= 2")
    driver = opened(tmp_path)
    driver.delete("s")
    end(driver)
    driver = opened(tmp_path)
    assert number_of(driver, "s") == 3
    driver.pool.close()


def test_dialogue_number_is_not_reused_after_a_salvage(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    for name in "st":
        for _ in range(2):
            number_of(driver, name)
    driver.delete("t:2")
    end(driver)
    (tmp_path / "new").mkdir()
    salvage(tmp_path / "sessions.db", tmp_path / "new" / "sessions.db")
    driver = opened(tmp_path / "new")
    assert [number_of(driver, name) for name in "st"] == [3, 3]
    driver.pool.close()


def test_retired_numbers_are_bounded() -> None:
    numbers = DialogueNumbers()
    numbers.MAX_SESSIONS = 10  # type: ignore[misc]
    for i in range(30):
        numbers.retire(f"s{i}", i)
    assert len(numbers._largest) == 10
    assert all(numbers.largest(f"s{i}") >= i for i in range(30))
