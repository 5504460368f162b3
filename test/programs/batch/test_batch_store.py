"""Files and batches that the store deletes or keeps."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from routes import file_store
from routes.file_store import Purpose, Result, Status, Store, StoredFile, StoreFullError
from test.programs.batch.runs import batch_record

DAY_S = 86_400
NOW = int(time.time())
BATCH = batch_record("batch_1", Status.FINALIZING, NOW, expires_at=NOW + DAY_S)


def file(name: str, expires_at: int | None, size: int = 1) -> StoredFile:
    return StoredFile(
        id=name, owner="", bytes=size, created_at=NOW, filename="f", purpose=Purpose.BATCH, expires_at=expires_at
    )


def orphan(store: Store, name: str, age_s: float) -> Path:
    """Write a content file without a row."""
    path = store.content(name)
    path.write_bytes(b"x")
    os.utime(path, (NOW - age_s, NOW - age_s))
    return path


def test_expired_and_orphaned_files_are_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path / "files", 1 << 20, 10)
    assert store.sweep(NOW) == 0 and not (tmp_path / "files").exists()
    for name, expires_at in (("over", NOW), ("later", NOW + 1), ("never", None)):
        store.add_file(file(name, expires_at), b"x")
    old, fresh = orphan(store, "old.half", 2 * DAY_S), orphan(store, "fresh.half", 10)
    store.content("renamed.half").symlink_to("is-not-there")  # as one that went while the folder was read
    assert store.sweep(NOW) == 2
    assert not old.exists() and fresh.exists()
    assert [store.file("", name) is not None for name in ("over", "later", "never")] == [False, True, True]
    assert not store.content("over").exists() and store.content("later").exists()


def test_uploads_at_one_time_share_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process uploads the second file while the first is written."""
    first_store, second_store = (Store(tmp_path, 10, 2) for _ in range(2))
    begun: list[int] = []
    refusals: list[str] = []

    def upload_another(number: int) -> None:
        if not begun:
            begun.append(number)
            with pytest.raises(StoreFullError) as refusal:
                second_store.add_file(file("second", None, 6), b"x" * 6)
            refusals.append(str(refusal.value))

    monkeypatch.setattr(os, "fsync", upload_another)
    first_store.add_file(file("first", None, 6), b"x" * 6)
    assert "6 bytes" in refusals[0] and "--files-max-gb" in refusals[0]
    begun.clear()
    first_store.add_file(file("third", None, 4), b"x" * 4)
    assert "10 bytes" in refusals[1]
    second_store.delete_file("", "first")
    begun.clear()
    second_store = Store(tmp_path, 20, 2)
    first_store.add_file(file("fourth", None, 1), b"x")
    assert "there are 2 files" in refusals[2], "the one that is written counts"


def test_a_failed_upload_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 10, 10)

    def fail(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            store.add_file(file("failed", None, 10), b"x" * 10)
    assert not list((tmp_path / "content").iterdir())
    store.add_file(file("whole", None, 10), b"x" * 10)


@pytest.mark.parametrize("days", [-1, 1])
def test_a_crashed_upload_takes_no_room_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    store = Store(tmp_path, 10, 10)
    store._reserve(file("crashed", None, 10))
    with pytest.raises(StoreFullError):
        store.add_file(file("early", None, 10), b"x" * 10)
    monkeypatch.setattr(file_store, "time", SimpleNamespace(time=lambda: time.time() + days * DAY_S))
    store.add_file(file("whole", None, 10), b"x" * 10)


def test_results_without_a_row_are_kept_while_their_batch_runs(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20, 10)
    store.add_batch(BATCH)
    results = [orphan(store, BATCH.result_id(result), 2 * DAY_S) for result in Result]
    assert store.sweep(NOW) == 0 and all(path.exists() for path in results)
    store.update(BATCH.id, lambda batch: msgspec.structs.replace(batch, status=Status.FAILED))
    assert store.sweep(NOW) == 2 and not any(path.exists() for path in results)
