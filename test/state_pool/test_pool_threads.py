"""An error in a job fails only the job. A dead thread is noticed, and no job waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from state_pool.disk import worker_threads
from state_pool.disk.operations import Append, SessionRow
from state_pool.disk.state_store import Connection, ServerUnavailable
from state_pool.errors import PoolLost, SessionReadFailed, SessionUnusable, TurnNotStored
from state_pool.session_key import SessionKey
from test.pool_fakes import Driver, FakeHost, Outcome, expected_state, fold, get_store, opened


def dies(*arguments: object) -> None:
    """Raise an error that no job expects."""
    raise SystemExit("a fault of the program")


def lost(driver: Driver, what: str) -> None:
    """Check that the pool reports the dead thread at each poll. Also check that it can still be closed."""
    with pytest.raises(PoolLost, match=f"{what} has died .*a fault of the program"):
        driver.until(lambda: False)
    assert what in (driver.pool.failure or "")
    driver.pool.close()


def test_number_too_large_for_sqlite_fails_only_its_job(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    outcomes = [Outcome() for _ in range(3)]
    with get_store(driver).writer._changed:  # all three in one group
        for number, (tokens, outcome) in enumerate(zip((1, 10**30, 2), outcomes, strict=True)):
            row = SessionRow(100 + number, SessionKey(f"s{number}"), None, 1, tokens, 0.0, 0.0)
            get_store(driver).submit(Append(row, [1]), outcome)
    driver.until(lambda: all(outcome.known for outcome in outcomes))
    assert [outcome.ok for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].calls[0], TurnNotStored)
    assert "OverflowError" in str(outcomes[1].calls[0])
    driver.turn("s", [1])
    assert (driver.pool.failure, driver.pool.stats()["degraded"]) == (None, None)
    driver.pool.close()


def test_unwritable_state_fails_only_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path, durability="turn")
    with monkeypatch.context() as patched:
        patched.setattr(FakeHost, "parts", lambda host: 1 // 0)
        with pytest.raises(TurnNotStored, match="ZeroDivisionError"):
            driver.turn("s", [1])
    driver.turn("s", [2])
    assert np.array_equal(driver.state("s"), expected_state([2]))
    driver.pool.close()


def test_unreadable_session_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    for name in "ab":
        driver.turn(name, [ord(name)])
    driver.pool.close()
    driver = opened(tmp_path)

    def no_memory(parts: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(driver.arena, "host_state", no_memory)
        with pytest.raises(SessionUnusable, match=r"out of memory\); try again"):
            driver.state("a")
    assert all(np.array_equal(driver.state(name), expected_state([ord(name)])) for name in "ab")
    assert driver.pool.stats()["quarantined_count"] == 0
    driver.pool.close()


class Cut:
    """A connection that is lost `times` times within a transaction. It reconnects at the next one."""

    def __init__(self, connection: Connection, times: int) -> None:
        self.connection, self.times, self.is_closed = connection, times, False

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        if statement == "BEGIN":
            self.is_closed = False
        if self.is_closed:
            raise ServerUnavailable("the connection is closed")
        if self.times and statement.startswith("SELECT"):
            self.times, self.is_closed = self.times - 1, True
            self.connection.execute("ROLLBACK")
            raise ServerUnavailable("terminated by the administrator")
        return self.connection.execute(statement, parameters)

    def close(self) -> None:
        self.connection.close()


def with_cuts(tmp_path: Path, times: int) -> Driver:
    """Open a pool with a stored session "a". The pool's reader loses its connection `times` times."""
    driver = opened(tmp_path)
    driver.turn("a", [1])
    driver.turn("b", [2])
    driver.pool.close()
    driver = opened(tmp_path)
    reader = get_store(driver).reader
    reader._connection = reader._loader._connection = Cut(reader._connection, times)  # type: ignore[assignment]
    return driver


@pytest.mark.parametrize("times", [1, 3])
def test_reader_reconnects_after_a_lost_connection(tmp_path: Path, times: int) -> None:
    driver = with_cuts(tmp_path, times)
    leases = [driver.pool.turns.checkout(name) for name in "ab"]
    for lease, tokens in zip(leases, ([1], [2]), strict=True):
        driver.ready(lease)
        assert np.array_equal(fold(driver.arena.memory[lease.read_slot], lease.replay), expected_state(tokens))
        driver.pool.turns.release(lease)
    driver.pool.close()


def test_reconnect_timeout_fails_all_waiting_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error counts, not the failed rollback on the lost connection. Later the server is back."""
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", -1.0)
    driver = with_cuts(tmp_path, 1)
    with pytest.raises(SessionReadFailed, match=r"does not answer \(terminated by the administrator\).*; try again"):
        driver.state("a")
    assert np.array_equal(driver.state("a"), expected_state([1]))
    driver.pool.close()


def test_close_fails_loads_that_wait_for_a_server(tmp_path: Path) -> None:
    driver = with_cuts(tmp_path, 1_000_000)
    reader, results = get_store(driver).reader, []
    reader._deliver = lambda outcome: outcome()
    reader.load(1, results.append)
    driver.until(lambda: bool(reader._waiting))
    reader.close()
    assert isinstance(results[0], SessionReadFailed) and "stopped" in str(results[0])
    driver.pool.close()


def test_the_writers_death_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    monkeypatch.setattr(get_store(driver).writer, "_commit_group", dies)
    with pytest.raises(PoolLost):
        driver.turn("s", [1])
    lost(driver, "state-pool-writer")


def test_the_readers_death_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    driver.pool.close()
    driver = opened(tmp_path)
    monkeypatch.setattr(get_store(driver).reader, "_catch_errors", dies)
    with pytest.raises(PoolLost):
        driver.state("s")
    lost(driver, "state-pool-reader")


def test_the_checkpointers_death_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_pool.disk.wal.wal_checkpoint", dies)
    driver = opened(tmp_path)
    with contextlib.suppress(PoolLost):  # it checkpoints the turn's commit, perhaps before the test looks
        driver.turn("s", [1])
    lost(driver, "state-pool-wal-0")


def test_thread_death_wakes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    woken: list[str | None] = []
    thread = get_store(driver).writer._thread
    monkeypatch.setattr(thread, "_on_death", lambda: woken.append(thread.failure))
    monkeypatch.setattr(get_store(driver).writer, "_commit_group", dies)
    get_store(driver).submit(Append(SessionRow(1, SessionKey("s"), None, 1, 1, 0.0, 0.0), [1]), Outcome())
    thread.join()
    assert woken == [driver.pool.failure]
    driver.pool.close()
