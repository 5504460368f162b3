"""Lists of sessions, prefix deletes and /status are correct on all tiers. They do not scan all sessions."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rwkv_batch.errors import ErrorKind, ServiceError
from state_pool import session_file, session_listing
from state_pool.config import PoolConfig
from state_pool.errors import DatabaseReadFailed, DatabaseTimeout, PoolFull, SessionTooLarge
from state_pool.pool import StatePool
from state_pool.session_file import SessionFile
from state_pool.session_key import LINEAR, SessionKey, SessionPage, Tier
from state_pool.sessions import Session, SessionIndex
from test.harness import call, make_request, run, started_engine, tiny_model, turn
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, expected_state, get_store, opened
from test.state_pool.listing_cost import growth, measure
from test.state_pool.stored_sessions import raw


@contextmanager
def writer_held(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    writer, go = get_store(driver).writer, threading.Event()
    commit = writer._commit_group

    def held(group: Any) -> None:
        go.wait()
        commit(group)

    monkeypatch.setattr(writer, "_commit_group", held)
    try:
        yield
    finally:
        go.set()


@contextmanager
def reader_held(pool: StatePool) -> Iterator[None]:
    """Block the reader, like a disk that does not answer."""
    go = threading.Event()

    def hang() -> Any:
        go.wait()
        return lambda: None

    assert pool._store is not None
    pool._store.reader._jobs.put(hang)
    try:
        yield
    finally:
        go.set()


def test_the_engine_threads_work_does_not_grow_with_the_sessions(tmp_path: Path) -> None:
    found = growth(measure(tmp_path, 200), measure(tmp_path, 4000))
    assert set(found) == {"stats", "list", "list deep", "delete"}
    assert max(found.values()) <= 1.05, found


def test_unwritten_turns_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(FakeArena(num_slots=8), config_in(tmp_path, durability="lazy", l1_sessions=3, l2_sessions=20))
    for number in range(8):
        driver.turn(f"s{number}", [number])
    driver.settle()
    with writer_held(driver, monkeypatch):
        for name in ("s2", "new", "s5", "newest"):
            driver.turn(name, [1])
        expected = ["newest", "s5", "new", "s2", "s7", "s6", "s4", "s3", "s1", "s0"]
        pages = {(limit, offset): driver.list_sessions(limit, offset) for limit in range(5) for offset in range(12)}
        for (limit, offset), page in pages.items():
            assert [entry.session_id for entry in page.sessions] == expected[offset : offset + limit], (limit, offset)
        driver.until(lambda: len(driver.pool._index.l1) <= 3 and not driver.pool.tiers.busy)  # and all stays there
        whole = driver.list_sessions()
        tiers = [(entry.session_id, entry.tier) for entry in whole.sessions]
        assert tiers == [
            (s.key.display_name, s.tier) for s in map(driver.pool._index.get, map(SessionKey, expected)) if s
        ]
        assert {tier for _, tier in tiers} >= {Tier.SLOT, Tier.HOST}
    driver.settle()
    assert [entry.session_id for entry in driver.list_sessions().sessions] == expected
    driver.pool.close()


def test_broken_log_lists_sessions_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path, durability="lazy")
    driver.turn("old", [1])
    driver.settle()

    def fails(*arguments: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr("state_pool.disk.statements.append_turn", fails)
        for name in ("a", "old"):
            driver.turn(name, [2])
        driver.settle()
        assert [entry.session_id for entry in driver.list_sessions().sessions] == ["old", "a"]
    driver.pool.close()


def test_page_is_full_during_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    for number in range(6):
        driver.turn(f"s{number}", [number])
    outcome = Outcome()
    with writer_held(driver, monkeypatch):
        assert driver.pool.turns.delete("s4", on_deleted=outcome) == 1
        page = driver.list_sessions(3)
        assert [entry.session_id for entry in page.sessions] == ["s5", "s3", "s2"]
        assert page.total == 5
    driver.until(lambda: outcome.known)
    assert [entry.session_id for entry in driver.list_sessions(2, 1).sessions] == ["s3", "s2"]
    assert not get_store(driver)._deleted
    driver.pool.close()


def test_hung_reader_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_listing, "TIMEOUT_S", 0.0)
    driver = opened(tmp_path)
    driver.turn("s", [1])
    outcomes: list[SessionPage | Exception] = []
    with reader_held(driver.pool):
        for _ in range(session_listing.MAX_PENDING_LISTS):
            driver.pool.listing.request(outcomes.append)
        driver.until(lambda: len(outcomes) == session_listing.MAX_PENDING_LISTS)
        assert all(isinstance(outcome, DatabaseTimeout) for outcome in outcomes)
        assert not driver.pool.pending, "nobody waits any more"
        with pytest.raises(PoolFull, match="lists of sessions are being read already"):
            driver.pool.listing.request(outcomes.append)
    driver.until(lambda: not driver.pool.listing._requests)
    assert len(outcomes) == session_listing.MAX_PENDING_LISTS, "each gets one answer"
    monkeypatch.setattr(session_listing, "TIMEOUT_S", 60.0)
    assert driver.list_sessions().total == 1
    driver.pool.close()


def test_engine_runs_on_while_the_list_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PoolConfig(state_db=str(tmp_path / "sessions.db"))
    with started_engine(tiny_model(tmp_path), config) as engine:
        run(engine, turn("s", "hello", max_tokens=2))
        assert call(engine, "session_status", limit=5, offset=0).total == 1
        with monkeypatch.context() as patched, reader_held(engine.model_runner.pool):
            patched.setattr(session_listing, "TIMEOUT_S", 0.0)
            with pytest.raises(ServiceError, match="disk is slow or busy") as raised:
                call(engine, "session_status", limit=5, offset=0)
            assert (raised.value.info.kind, raised.value.info.field) == (ErrorKind.TIMEOUT, None)
            run(engine, make_request("the engine runs meanwhile", max_tokens=2))


def test_a_list_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    with raw(tmp_path) as connection:
        connection.execute("DROP INDEX sessions_by_updated")
    with pytest.raises(DatabaseReadFailed, match="no such index"):
        driver.list_sessions()
    assert np.array_equal(driver.state("s"), expected_state([1]))
    driver.pool.close()


def test_pending_lists_are_answered_at_close(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    outcomes: list[SessionPage | Exception] = []
    driver.pool.listing.request(outcomes.append)
    driver.pool.close()
    assert [outcome.total for outcome in outcomes if isinstance(outcome, SessionPage)] == [1]


def test_prefix_lookup_equals_a_full_scan() -> None:
    rng, index = random.Random(5), SessionIndex()
    kept: list[Session] = []
    for row in range(600):
        key = SessionKey("".join(rng.choices("ab:1é🙂", k=rng.randint(1, 5))), rng.choice([LINEAR, 1, 2, 12]))
        if index.get(key) is None:
            kept.append(Session(key, row, 0.0, 0.0, turn=1))
            index.add(kept[-1])
        if rng.random() < 0.3:
            index.remove(kept.pop(rng.randrange(len(kept))))
    names = [session.key.display_name for session in kept]
    for prefix in {name[:length] for name in names for length in range(1, len(name) + 1)} | {"c", "zz:"}:
        expected = {session.key for session in kept if session.key.display_name.startswith(prefix)}
        found = [session.key for session in index.matching(prefix, prefix=True)]
        assert set(found) == expected, prefix
        assert len(found) == len(expected), prefix


def test_too_large_session_file_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SessionFile("model-a", 3, [1, 2, 3], {"a": ("int32", (64,))}, {"a": bytes(256)})
    size = len(file.encode())
    monkeypatch.setattr(session_file, "MAX_FILE_BYTES", size)
    assert len(file.encode()) == size
    monkeypatch.setattr(session_file, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(SessionTooLarge, match=f"a file of {size} bytes; at most {size - 1}"):
        file.encode()
