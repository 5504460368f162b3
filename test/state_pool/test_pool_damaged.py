"""Damaged rows and rows of another model: the errors, rebuilding, and `salvage`."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from state_pool.disk.recover import salvage
from state_pool.errors import DatabaseUnusable, SessionUnusable
from state_pool.layout import InvalidStateValues
from test.pool_fakes import Driver, FakeArena, FakeHost, config_in, end, expected_state
from test.pool_integrity import integrity_faults
from test.state_pool.stored_sessions import WORDS, holds, raw, reopen, write_three


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (
            "UPDATE state_chunks SET data = zeroblob(length(data)) WHERE id = (SELECT min(id) FROM state_chunks)",
            "chunk",
        ),
        ("DELETE FROM state_chunks WHERE id = (SELECT min(id) + 1 FROM state_chunks)", "incomplete|damaged"),
        ("UPDATE states SET num_tokens = 99 WHERE session = 1", "description"),
    ],
)
def test_a_damaged_row_is_quarantined_and_the_rest_works(tmp_path: Path, damage: str, what: str) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        connection.execute(damage)
    driver = reopen(tmp_path)
    with pytest.raises(SessionUnusable, match=what):
        driver.state("a")
    with pytest.raises(SessionUnusable, match=r"delete it|delete the session"):
        driver.turn("a", [5])
    assert holds(driver, "b")
    assert holds(driver, "c")
    driver.settle()
    assert [entry["session_id"] for entry in driver.pool.stats()["quarantined"]] == ["a"]
    assert integrity_faults(driver.pool) == []
    driver.pool.close()
    driver = reopen(tmp_path)
    assert driver.pool.stats()["quarantined_count"] == 1, "the quarantine outlives the process"
    assert driver.delete("a") == 1
    driver.turn("a", [7])
    assert np.array_equal(driver.state("a"), expected_state([7], WORDS))
    driver.pool.close()


@pytest.mark.parametrize("damage", ["UPDATE turns SET tokens = zeroblob(8)", "DELETE FROM turns WHERE turn = 1"])
def test_a_damaged_log_is_quarantined(tmp_path: Path, damage: str) -> None:
    driver = reopen(tmp_path)
    driver.turn("a", [1, 2])
    driver.turn("a", [3, 4])
    driver.close_unsaved()
    with raw(tmp_path) as connection:
        connection.execute(damage)
    driver = reopen(tmp_path)
    with pytest.raises(SessionUnusable, match="turn 1"):
        driver.state("a")
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_a_whole_history_rebuilds_a_damaged_state(tmp_path: Path, durability: str) -> None:
    write_three(tmp_path, retain_tokens=-1, durability=durability)
    with raw(tmp_path) as connection:
        connection.execute("UPDATE state_chunks SET data = zeroblob(length(data))")
    driver = reopen(tmp_path, retain_tokens=-1)
    for name in "abc":
        assert holds(driver, name)
    driver.pool.close()


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("whole_log", [False, True])
def test_stored_state_with_invalid_values_is_quarantined(tmp_path: Path, *, objects: bool, whole_log: bool) -> None:
    """The stored bytes are intact; only the arena can interpret them."""
    store = {"checkpoint_store": (tmp_path / "objects").as_uri(), "checkpoint_store_min_mb": 0.0} if objects else {}
    (tmp_path / "objects").mkdir()
    kept = {"retain_tokens": -1 if whole_log else 0, "durability": "turn", **store}
    driver = Driver(FakeArena(words=WORDS), config_in(tmp_path, **kept))
    for name, tokens in (("a", [1, 2]), ("b", [3])):
        driver.turn(name, tokens)
    end(driver)
    driver = Driver(FakeArena(words=WORDS), config_in(tmp_path, **kept))
    host_state, noise = driver.arena.host_state, expected_state([1, 2], WORDS).tobytes()

    def heard(parts: Mapping[str, bytes | memoryview]) -> FakeHost:
        if noise.startswith(bytes(parts["a.wkv"])):
            raise InvalidStateValues("part 'a.wkv' of the state has NaN")
        return host_state(parts)

    driver.arena.host_state = heard  # type: ignore[method-assign]
    if whole_log:
        assert np.array_equal(driver.state("a"), expected_state([1, 2], WORDS))
    else:
        with pytest.raises(SessionUnusable, match=r"'a\.wkv' of the state has NaN; delete the session"):
            driver.state("a")
    assert np.array_equal(driver.state("b"), expected_state([3], WORDS))
    driver.settle()
    assert driver.pool.stats()["quarantined_count"] == (0 if whole_log else 1)
    driver.pool.close()


def test_session_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
    write_three(tmp_path)
    other = Driver(FakeArena(words=WORDS, fingerprint="model-b"), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match=r"another model \(of an unknown file, fingerprint model-a; .* model-b\)"):
        other.state("a")
    other.turn("new", [1])
    assert other.pool.stats()["quarantined_count"] == 0
    other.pool.close()
    driver = reopen(tmp_path)
    assert holds(driver, "a")
    driver.pool.close()


def test_whole_log_rebuilds_a_session_for_another_model(tmp_path: Path) -> None:
    write_three(tmp_path, retain_tokens=-1)
    other = Driver(FakeArena(words=WORDS, fingerprint="model-b"), config_in(tmp_path))
    lease = other.ready(other.pool.turns.checkout("a"))
    assert lease.replay == [ord("a"), 1, 2, 3]
    assert lease.num_tokens == 4
    assert lease.exists
    other.pool.turns.release(lease)
    other.pool.close()


def test_another_state_layout_is_refused(tmp_path: Path) -> None:
    write_three(tmp_path)
    layout = {"a.wkv": ("float16", (2 * (WORDS - 4),)), "a.shift": ("float32", (4,))}
    other = Driver(FakeArena(words=WORDS, layout=layout), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match="layout"):
        other.state("a")
    other.pool.close()


def test_salvage_copies_intact_sessions(tmp_path: Path) -> None:
    """A truncated file with many sessions: intact ones are copied exactly, the others are listed."""
    driver = reopen(tmp_path)
    for i in range(20):
        driver.turn(f"s{i}", [i, 1])
        driver.turn(f"s{i}", [2])
    driver.turn("fork", [1], branch_from=0)
    driver.turn("fork", [2], branch_from=1)
    driver.pool.close()
    file = tmp_path / "sessions.db"
    os.truncate(file, int(file.stat().st_size * 0.6))
    (tmp_path / "new").mkdir()
    saved, lost = salvage(file, tmp_path / "new" / "sessions.db")
    assert len(saved) >= 5
    assert lost
    assert not set(saved) & set(lost)
    driver = reopen(tmp_path / "new")
    assert driver.list_sessions().total == len(saved)
    for name in saved:
        if name.startswith("s"):
            assert np.array_equal(driver.state(name), expected_state([int(name[1:]), 1, 2], WORDS))
    driver.pool.close()
    with raw(tmp_path / "new") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_salvage_copies_sessions_with_only_a_log(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    driver.turn("s", [1, 2])
    driver.turn("fork", [1], branch_from=0)
    driver.turn("fork", [2], branch_from=1)
    driver.close_unsaved()
    (tmp_path / "new").mkdir()
    saved, lost = salvage(tmp_path / "sessions.db", tmp_path / "new" / "sessions.db")
    assert (sorted(saved), lost) == (["fork:1", "fork:2", "s"], [])
    driver = reopen(tmp_path / "new")
    assert np.array_equal(driver.state("fork", 2), expected_state([1, 2], WORDS))
    driver.pool.close()
    with pytest.raises(DatabaseUnusable, match="exists already"):
        salvage(tmp_path / "sessions.db", tmp_path / "new" / "sessions.db")


def test_the_salvage_command_passes_over_an_unreadable_page(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    for i in range(200):
        driver.turn(f"s{i}", [i])
    driver.pool.close()
    with raw(tmp_path) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()[0]
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
    with (tmp_path / "sessions.db").open("r+b") as file:
        file.seek((root - 1) * page_bytes)
        page = file.read(page_bytes)
        assert page[0] == 5, "the table has several pages"
        (first_cell,) = struct.unpack_from(">H", page, 12)
        (first_page,) = struct.unpack_from(">I", page, first_cell)
        file.seek((first_page - 1) * page_bytes)
        file.write(bytes(page_bytes))
    new = tmp_path / "new"
    new.mkdir()
    command = [sys.executable, "-m", "state_pool.salvage", tmp_path / "sessions.db", new / "sessions.db"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    driver = reopen(new)
    saved = driver.list_sessions().total
    lost = f"lost: numbers 1 to {200 - saved}, on unreadable pages\n"
    assert 0 < saved < 200 and done.stdout == f"{lost}{saved} sessions saved to {new / 'sessions.db'}, 1 lost\n"
    assert np.array_equal(driver.state("s199"), expected_state([199], WORDS))
    driver.pool.close()
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "exists already" in again.stdout
