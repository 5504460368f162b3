"""Failing disks and databases at their limit: refused turns, and turns that still work."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from state_pool.cache import checkpoints
from state_pool.disk import wal
from state_pool.disk.operations import Checkpoint
from state_pool.disk.state_store import Connection
from state_pool.disk.wal import WalCheckpointResult
from state_pool.errors import PoolFull, SessionUnusable, TurnNotStored
from test.conftest import rest_slow
from test.pool_fakes import Driver, Outcome, end, expected_state, get_session, get_store
from test.serving import wait_for
from test.state_pool.stored_sessions import WORDS, holds, reopen

MODES = pytest.mark.parametrize("durability", ["log", "turn"])
MOVED = {"moved": "", "log moved": "-wal", "index moved": "-shm"}


def files_of(connection: Connection) -> dict[str, Path]:
    """A database file that can be made to fail."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return {how: Path(f"{path}{end}") for how, end in MOVED.items()}


def break_disk(driver: Driver, how: str) -> None:
    """Make every write fail without special rights: page limit, read-only connection, moved file."""
    connection = get_store(driver).writer._connection
    if how in MOVED:
        path = files_of(connection)[how]
        path.rename(path.with_name(f"{path.name}.away"))
    elif how == "full":
        connection.execute("PRAGMA max_page_count = 1")
    else:
        connection.execute("PRAGMA query_only = ON")


def mend_disk(driver: Driver) -> None:
    connection = get_store(driver).writer._connection
    connection.execute("PRAGMA max_page_count = 1000000")
    connection.execute("PRAGMA query_only = OFF")
    for path in files_of(connection).values():
        away = path.with_name(f"{path.name}.away")
        if away.exists():
            away.rename(path)


@MODES
@pytest.mark.parametrize(
    ("how", "words"),
    rest_slow(
        [("full", "no space is left"), ("read-only", "is read-only"), *((how, "moved or removed") for how in MOVED)]
    ),
)
def test_a_turn_that_cannot_be_stored_is_not_acknowledged(
    tmp_path: Path, durability: str, how: str, words: str
) -> None:
    driver = reopen(tmp_path, durability=durability)
    for name in "ab":
        driver.turn(name, [ord(name), 1])
    driver.settle()
    break_disk(driver, how)
    big = list(range(20_000))  # larger than the free part of a page
    for _ in range(3):
        with pytest.raises(TurnNotStored, match=words):
            driver.turn("a", big)
    with pytest.raises(TurnNotStored, match=words):
        driver.turn("unborn", big)
    assert words in driver.pool.stats()["degraded"]
    assert np.array_equal(driver.state("a"), expected_state([ord("a"), 1], WORDS)), "the session is what it was"
    if how not in MOVED:  # the file cannot be read either
        assert driver.list_sessions().total == 2
    mend_disk(driver)
    driver.turn("a", [2, 3])
    assert driver.pool.stats()["degraded"] is None
    assert holds(driver, "a")
    driver.turn("b", [2, 3])
    driver.turn("c", [ord("c"), 1])
    driver.turn("c", [2, 3])
    end(driver)
    driver = reopen(tmp_path)
    assert all(holds(driver, name) for name in "abc")
    driver.pool.close()


def test_a_failed_checkpoint_does_not_hide_why_turns_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may begin before a file is moved and fail after the turns."""
    driver = reopen(tmp_path)
    driver.settle()
    break_disk(driver, "full")
    with pytest.raises(TurnNotStored, match="no space is left"):
        driver.turn("a", list(range(20_000)))
    tried = threading.Event()

    def fail(_: Connection) -> WalCheckpointResult:
        tried.set()
        return WalCheckpointResult(False, "disk I/O error")

    monkeypatch.setattr(wal, "wal_checkpoint", fail)
    writer = get_store(driver).writer
    with writer._changed:
        writer._log.written(1)
        writer._changed.notify()
    assert tried.wait(10)
    wait_for(lambda: not (writer._log.has_uncheckpointed_rest or writer._log._is_checkpointing), 10, "it is recorded")
    assert "no space is left" in driver.pool.stats()["degraded"]
    monkeypatch.undo()
    mend_disk(driver)
    driver.pool.close()


@MODES
def test_full_tiers_over_a_full_disk_keep_serving(tmp_path: Path, durability: str) -> None:
    """States cannot be stored. With a log they are replayed, and no slot is blocked."""
    driver = reopen(tmp_path, durability=durability, l1_sessions=2, l2_sessions=2, transfer_states=1)
    names = [f"s{i}" for i in range(20)]
    for name in names:
        driver.turn(name, [1, 2, 3])
    break_disk(driver, "full")
    for name in names * 2:
        assert np.array_equal(driver.state(name), expected_state([1, 2, 3], WORDS))
    mend_disk(driver)
    driver.pool.close()


def test_failed_checkpoints_are_retried_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial write would take the space that turns need. At shutdown, no retry is delayed."""
    driver = reopen(tmp_path, checkpoint_tokens=2, transfer_states=1)
    store, now, tried = get_store(driver), [100.0], list[float]()
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))

    def full(job: Checkpoint, done: Callable[[Exception | None], None]) -> None:
        tried.append(now[0])
        store.writer.stats.degraded = "no space is left"
        done(TurnNotStored("no space is left"))
        store.writer.stats.degraded = None  # a turn still fits

    submit = store.submit_state
    monkeypatch.setattr(store, "submit_state", full)
    for name in "abc":
        driver.turn(name, [1, 2, 3])
    for _ in range(3):
        for _ in range(50):
            driver.pool._checkpoint_due_sessions()
            driver.pool.poll()
        now[0] += checkpoints.RETRY_DELAY_S
    assert tried == [100.0, 101.0, 102.0]
    now[0] -= checkpoints.RETRY_DELAY_S  # within the retry delay
    written: list[float] = []

    def ticks() -> float:
        now[0] += 0.001
        return now[0]

    def submitted(job: Checkpoint, done: Callable[[Exception | None], None]) -> None:
        written.append(now[0])
        submit(job, done)

    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=ticks, time=time.time))
    monkeypatch.setattr(store, "submit_state", submitted)
    driver.pool.close()
    assert len(written) == 3
    assert written[-1] < 102.5
    driver = reopen(tmp_path)
    assert all(np.array_equal(driver.state(name), expected_state([1, 2, 3], WORDS)) for name in "abc")
    driver.pool.close()


def test_a_full_real_disk(tmp_path: Path) -> None:
    """The same on a file system of 2 MB. Skipped if this machine cannot mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount; the page limit test covers the rest")
    try:
        driver = reopen(mount)
        driver.turn("a", [1, 2])
        filler = mount / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
        with pytest.raises(TurnNotStored):
            for _ in range(100):
                driver.turn("b", list(range(2000)))
        assert driver.pool.stats()["degraded"]
        assert np.array_equal(driver.state("a"), expected_state([1, 2], WORDS))
        filler.unlink()
        driver.turn("a", [3])
        driver.pool.close()
        driver = reopen(mount)
        assert np.array_equal(driver.state("a"), expected_state([1, 2, 3], WORDS))
        driver.pool.close()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_failed_delete_is_reported_and_retried(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    driver.turn("a", [1])
    driver.settle()
    break_disk(driver, "read-only")
    outcome = Outcome()
    assert driver.pool.turns.delete("a", on_deleted=outcome) == 1
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], TurnNotStored)
    assert driver.list_sessions().total == 0
    mend_disk(driver)
    driver.until(lambda: driver.pool.stats()["degraded"] is None)
    driver.pool.close()
    driver = reopen(tmp_path)
    assert driver.list_sessions().total == 0
    driver.pool.close()


def test_lost_lazy_turns_are_reported(tmp_path: Path) -> None:
    driver = reopen(tmp_path, durability="lazy", l1_sessions=1, l2_sessions=1, transfer_states=1)
    driver.turn("a", [1])
    driver.settle()
    break_disk(driver, "read-only")
    driver.turn("a", [2])
    lost = get_session(driver, "a")
    driver.until(lambda: lost.log_broken)
    for i in range(20):
        driver.turn(f"s{i}", [i])
    driver.until(lambda: lost.slot is None and lost.host is None)
    with pytest.raises(SessionUnusable, match="last turns were lost"):
        driver.state("a")
    mend_disk(driver)
    driver.pool.close()


def test_size_limit_evicts_the_oldest(tmp_path: Path) -> None:
    driver = reopen(tmp_path, state_db_max_gb=0.0005, l1_sessions=1, l2_sessions=1)
    for i in range(60):
        driver.turn(f"s{i}", [i])
    driver.until(lambda: not get_store(driver).over_limit and driver.list_sessions().total < 60)
    names = [entry.session_id for entry in driver.list_sessions().sessions]
    assert names == [f"s{i}" for i in range(59, 59 - len(names), -1)], "the newest are left"
    driver.pool.close()


def test_size_limit_refuses_new_sessions(tmp_path: Path) -> None:
    driver = reopen(tmp_path, state_db_max_gb=0.00015, state_db_full="refuse", l1_sessions=1, l2_sessions=1)
    with pytest.raises(PoolFull, match=r"limit of 0\.00015 GB"):
        for i in range(60):
            driver.turn(f"s{i}", [i])
            driver.settle()
    driver.turn("s0", [0])
    driver.pool.close()


def test_a_full_database_takes_new_sessions_when_all_are_deleted(tmp_path: Path) -> None:
    """After the delete, the only commits collect its chunks."""
    driver = reopen(tmp_path, state_db_max_gb=0.00015, state_db_full="refuse", durability="turn")
    with pytest.raises(PoolFull):
        for i in range(60):
            driver.turn(f"s{i}", [i])
    driver.delete("s", prefix=True)
    driver.until(lambda: not get_store(driver).has_pending_deletes)
    driver.turn("new", [1])
    driver.pool.close()


def log_turn(driver: Driver, name: str, tokens: list[int]) -> Exception | None:
    """Run a turn whose state is dropped, as a mixture's is. Returns its error."""
    lease = driver.ready(driver.pool.turns.checkout(name))
    outcome = Outcome()
    driver.pool.turns.record(lease, tokens, outcome)
    driver.pool.turns.release(lease)
    driver.until(lambda: outcome.known)
    return outcome.calls[0]


@pytest.mark.parametrize("durability", ["log", "lazy"])
def test_turns_kept_by_tokens_are_stored_after_a_refused_write(tmp_path: Path, durability: str) -> None:
    """A turn without a state in memory needs only logged tokens.

    It is acknowledged once they are logged, also with "lazy".
    """
    driver = reopen(tmp_path, durability=durability)
    assert log_turn(driver, "mixed", [1]) is None
    driver.settle()
    break_disk(driver, "read-only")
    assert isinstance(log_turn(driver, "mixed", [2]), TurnNotStored)
    mend_disk(driver)
    assert log_turn(driver, "mixed", [3]) is None
    assert log_turn(driver, "mixed", [4]) is None
    assert np.array_equal(driver.state("mixed"), expected_state([1, 3, 4], WORDS))
    driver.pool.close()
    driver = reopen(tmp_path)
    assert np.array_equal(driver.state("mixed"), expected_state([1, 3, 4], WORDS))
    driver.pool.close()


def test_a_turn_kept_by_tokens_behind_a_lost_lazy_turn_is_refused(tmp_path: Path) -> None:
    """The state in memory has the lost turn. It is stored first."""
    driver = reopen(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    driver.turn("a", [1])
    driver.settle()
    break_disk(driver, "read-only")
    driver.turn("a", [2])
    driver.settle()
    error = log_turn(driver, "a", [3])
    assert isinstance(error, TurnNotStored) and "send it again" in str(error)
    mend_disk(driver)
    driver.until(lambda: not get_session(driver, "a").log_broken)
    assert log_turn(driver, "a", [4]) is None
    driver.pool.close()
    driver = reopen(tmp_path)
    assert np.array_equal(driver.state("a"), expected_state([1, 2, 4], WORDS))
    driver.pool.close()
