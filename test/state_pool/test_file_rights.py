"""Rights of the files: other users of the machine cannot read sessions, states or uploads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from routes.file_store import Store
from state_pool.disk.recover import salvage
from test.state_pool.stored_sessions import holds, reopen, write_three


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
