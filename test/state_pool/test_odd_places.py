"""A database on a network file system, a clock set back, sessions of 2^31 tokens, and the rights of files."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from native import files as private_files
from routes.file_store import Store
from state_pool.disk.recover import salvage
from state_pool.session_file import SessionFile, decode
from test.pool_fakes import Outcome, expected_state, names, opened
from test.state_pool.stored_sessions import holds, reopen, write_three
from test.state_pool.test_pool_expiry import TTL_S, Clock, clock, close, expiring  # noqa: F401 - a fixture

DAY_S = 86_400.0
MANY = 2**31


@pytest.mark.parametrize(
    ("number", "name"), [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x65735546, "FUSE"), (0xEF53, "")]
)
def test_a_network_file_system_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, name: str
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(private_files, "_type_number", lambda _: number)
    driver = opened(tmp_path)
    close(driver)
    assert ("is on a network file system" in caplog.text) == bool(name)
    assert not name or (f"({name}" in caplog.text and "--state-db" in caplog.text and "postgresql://" in caplog.text)


def test_the_type_of_a_file_system_is_read(tmp_path: Path) -> None:
    assert private_files._type_number("/proc") == 0x9FA0
    assert private_files._type_number(tmp_path / "missing") == 0 and private_files.network_file_system(tmp_path) == ""


@pytest.mark.parametrize("shared", [False, True])
def test_a_clock_that_was_set_back_by_a_day_expires_nothing_used(
    tmp_path: Path,
    clock: Clock,  # noqa: F811
    shared: bool,
) -> None:
    """Neither while it is back, nor when it is right again. Also not after a start then."""
    driver = expiring(tmp_path, TTL_S, shared)
    driver.turn("earlier", [1])
    clock.wall -= DAY_S
    clock.passes(5)
    driver.turn("meanwhile", [1])
    driver.settle()
    assert names(driver) == {"earlier", "meanwhile"}
    clock.wall += DAY_S
    clock.passes(5)
    driver.settle()
    assert names(driver) == {"earlier", "meanwhile"}
    close(driver)
    driver = expiring(tmp_path, TTL_S, shared)
    clock.passes(5)
    driver.settle()
    assert names(driver) == {"earlier", "meanwhile"}
    close(driver)


def test_a_session_passes_two_to_the_power_of_31_tokens(tmp_path: Path) -> None:
    """Its count is stored, exported and imported."""
    driver = opened(tmp_path)
    driver.turn("s", [1, 2, 3])
    driver.settle()
    file = driver.export("s")
    many = SessionFile(file.fingerprint, MANY - 1, file.replay, file.layout, file.parts).encode()
    for name in ("many", "again"):
        outcome = Outcome()
        driver.pool.import_export.import_session(name, driver.pool.import_export.fit(decode(many)), outcome)
        driver.until(lambda outcome=outcome: outcome.known)
        assert outcome.calls == [None]
        driver.turn(name, [4, 5])
        driver.settle()
        many = driver.export(name).encode()
    driver.pool.close()
    driver = opened(tmp_path)
    assert np.array_equal(driver.state("again"), expected_state([1, 2, 3, 4, 5, 4, 5]))
    assert driver.export("again").num_tokens == MANY + 3
    driver.pool.close()


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_database_files_are_private_from_their_creation(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    driver.turn("a", [1])
    found = modes(tmp_path)
    assert set(found) == {"sessions.db", "sessions.db-wal", "sessions.db-shm", "sessions.db.lock"}
    assert set(found.values()) == {0o600}, found
    driver.pool.close()


def test_an_open_database_is_made_private_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_three(tmp_path)
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    driver = reopen(tmp_path)
    assert set(modes(tmp_path).values()) == {0o600}
    assert "sessions.db was open to other users (mode 0644): its mode is 0600 now" in caplog.text
    assert holds(driver, "a")
    driver.pool.close()


def test_a_salvaged_database_is_private(tmp_path: Path) -> None:
    write_three(tmp_path)
    salvage(tmp_path / "sessions.db", tmp_path / "new.db")
    assert modes(tmp_path)["new.db"] == 0o600


@pytest.mark.parametrize("exists", [False, True])
def test_folder_of_uploads_is_private(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "files"
    if exists:
        folder.mkdir(0o755)
    assert Store(folder, 1 << 20, 10).file("", "file-none") is None
    assert modes(tmp_path)["files"] == 0o700
