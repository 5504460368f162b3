"""PostgreSQL only: outages, schema, addresses. Tests shared with SQLite: test_pool_shared.py, test_pool_killed.py."""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rwkv_batch.core.error_mapping import as_service_error
from rwkv_batch.errors import ErrorKind
from state_pool.addresses import parse_server_address
from state_pool.disk import postgres as adapter
from state_pool.disk import worker_threads
from state_pool.disk.database import open_writer
from state_pool.errors import (
    DatabaseUnusable,
    DirectoryUnreachable,
    InvalidSessionId,
    SessionReadFailed,
    StaleEpoch,
    TurnInDoubt,
)
from state_pool.session_file import decode
from state_pool.sessions import LeaseState
from test.database_link import _SOCKET, DatabaseLink, linked
from test.pool_fakes import Driver, FakeArena, config_in, end, expected_state, fold, get_store, opened
from test.postgres import Server
from test.serving import wait_for

pytestmark = pytest.mark.cluster


@pytest.fixture
def server(postgres: Server) -> Iterator[Server]:
    """The shared server. A test may kill it, since no other connection is open."""
    yield postgres
    if not postgres.runs:
        postgres.start()


def on_server(tmp_path: Path, address: str, name: str = "one") -> Driver:
    return opened(tmp_path, state_db=address, engine=name, service="here")


def test_turns_wait_for_a_server_that_comes_back(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", 60.0)  # starting takes long on a busy machine
    one = on_server(tmp_path, server.database())
    one.turn("s", [1])
    lease = one.ready(one.pool.turns.checkout("s"))
    slot = one.compute(lease, [2])
    server.kill()
    outcome = one.finish_turn(lease, [2], slot)
    waiting = one.pool.turns.checkout("t")
    one.until(lambda: one.pool.stats()["degraded"] is not None)
    assert not outcome.known
    server.start()
    one.until(lambda: outcome.known)
    assert outcome.ok
    one.pool.turns.release(one.ready(waiting))
    assert np.array_equal(one.state("s"), expected_state([1, 2]))
    end(one)


def test_long_outage_acknowledges_nothing(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", 0.5)
    one = on_server(tmp_path, server.database())
    one.turn("s", [1])
    lease = one.ready(one.pool.turns.checkout("s"))
    slot = one.compute(lease, [2])
    server.kill()
    outcome = one.finish_turn(lease, [2], slot)
    one.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], DirectoryUnreachable)
    assert "does not answer" in str(outcome.calls[0])
    with pytest.raises(DirectoryUnreachable):
        one.ready(one.pool.turns.checkout("t"))
    server.start()
    one.until(lambda: np.array_equal(try_state(one), expected_state([1])))
    one.turn("s", [3])
    assert np.array_equal(one.state("s"), expected_state([1, 3]))
    end(one)


def test_silent_server_counts_as_unavailable(tmp_path: Path, postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "CONNECT_TIMEOUT_S", 2)
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", 0.5)
    with linked(postgres.database()) as (address, link):
        one = on_server(tmp_path, address)
        one.turn("s", [1])
        link.cut(os.getpid())
        get_store(one).writer._connection._connection.read_timeout_s = 1.0  # type: ignore[attr-defined]
        with pytest.raises(DirectoryUnreachable, match="does not answer"):
            one.ready(one.pool.turns.checkout("s"))
        link.mend()
        one.until(lambda: np.array_equal(try_state(one), expected_state([1])))
        one.turn("s", [2])
        assert np.array_equal(one.state("s"), expected_state([1, 2]))
        end(one)


def test_migration_has_no_timeout(tmp_path: Path, postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "READ_TIMEOUT_S", 8.0)
    monkeypatch.setattr(adapter, "STATEMENT_TIMEOUT_SHARE", 0.05)  # the rest is for a busy machine to report it
    connection = adapter.Connection(parse_server_address(postgres.database()))
    with connection.without_timeouts():
        connection.execute("SELECT pg_sleep(0.8)")
    with pytest.raises(sqlite3.OperationalError, match="statement timeout"):
        connection.execute("SELECT pg_sleep(30)")


def test_slow_statement_runs_at_most_once(postgres: Server) -> None:
    """With a silent server, and one that ignores the statement timeout."""
    address = parse_server_address(postgres.database())
    connection, other = adapter.Connection(address), adapter.Connection(address)
    with other.without_timeouts():
        other.execute("CREATE TABLE slowly (n INTEGER)")
        for limit_ms, read_timeout_s, message in ((300, 8.0, "statement timeout"), (0, 0.4, "has not answered")):
            connection.execute(f"SET statement_timeout = {limit_ms}")
            connection._connection.read_timeout_s = read_timeout_s
            with pytest.raises(sqlite3.OperationalError, match=message):
                connection.execute("INSERT INTO slowly SELECT 1 FROM (SELECT pg_sleep(3)) s")
        behind = "FROM pg_stat_activity WHERE state = 'active' AND starts_with(query, 'INSERT INTO slowly')"
        wait_for(lambda: other.execute(f"SELECT count(*) = 0 {behind}").fetchone()[0], 10, "what runs behind it ends")
        assert other.execute("SELECT count(*) FROM slowly").fetchone()[0] <= 1


def try_state(driver: Driver) -> np.ndarray:
    try:
        return driver.state("s")
    except DirectoryUnreachable:
        return expected_state([0])


class LosesCommitAnswer(adapter.Connection):
    """Commits a turn and loses the answer."""

    lose = False

    def execute(self, statement: str, parameters: object = ()) -> object:
        found = super().execute(statement, parameters)  # type: ignore[arg-type]
        if statement.startswith("INSERT INTO turns"):
            self.appended = True
        if statement == "COMMIT" and self.lose and getattr(self, "appended", False):
            type(self).lose = False
            self.close()
            raise adapter.ServerUnavailable("the connection was lost")
        return found


def test_a_commit_in_doubt_counts_once(tmp_path: Path, postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "Connection", LosesCommitAnswer)
    one = on_server(tmp_path, postgres.database())
    one.turn("s", [1])
    LosesCommitAnswer.lose = True
    one.turn("s", [2])
    assert not LosesCommitAnswer.lose
    assert np.array_equal(one.state("s"), expected_state([1, 2]))
    end(one)


class LosesConnection(adapter.Connection):
    """Loses the answer to a turn's commit; the server may then be down."""

    lose = is_down = reconnects = commits_turn = False

    def _connect(self) -> None:
        if self.is_down:
            raise adapter.ServerUnavailable("there is nobody")
        super()._connect()

    def execute(self, statement: str, parameters: object = ()) -> object:
        self.commits_turn = not statement.startswith("BEGIN") and self.commits_turn
        self.commits_turn = self.commits_turn or statement.startswith(("INSERT INTO turns", "INSERT INTO states"))
        found = super().execute(statement, parameters)  # type: ignore[arg-type]
        if statement == "COMMIT" and self.lose and self.commits_turn:
            LosesConnection.lose, LosesConnection.is_down = False, not self.reconnects
            self.close()
            raise adapter.ServerUnavailable("the connection was lost")
        return found


@pytest.mark.parametrize(("durability", "reconnects"), [("log", False), ("turn", False), ("turn", True)])
def test_commit_in_doubt_is_reported(
    tmp_path: Path, postgres: Server, monkeypatch: pytest.MonkeyPatch, durability: str, reconnects: bool
) -> None:
    monkeypatch.setattr(adapter, "Connection", LosesConnection)
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(LosesConnection, "is_down", False)
    monkeypatch.setattr(LosesConnection, "reconnects", reconnects)
    address = postgres.database()
    one = opened(tmp_path, state_db=address, durability=durability, engine="one")
    one.turn("s", [1])
    LosesConnection.lose = True
    with pytest.raises(TurnInDoubt) as raised:
        one.turn("s", [2])
    info = as_service_error(raised.value).info
    assert info.kind is ErrorKind.ENGINE_LOST and info.retry_after_s is None and "may have been kept" in info.message
    if not reconnects:
        with pytest.raises(DirectoryUnreachable, match="try again in a moment"):
            one.turn("other", [2])
    LosesConnection.is_down = False
    one.settle()
    one.until(lambda: one.pool._store is not None and not one.pool._store.writer.is_collecting_garbage)
    two = on_server(tmp_path, address, "two")
    assert np.array_equal(two.state("s"), expected_state([1, 2])), "it was kept"
    for driver in (one, two):
        assert np.array_equal(driver.state("s"), expected_state([1, 2]))
        end(driver)


class LosesAcquireAnswer(LosesConnection):
    """The same for the commit that starts a turn."""

    def execute(self, statement: str, parameters: object = ()) -> object:
        self.commits_turn = self.commits_turn or statement.startswith("UPDATE directory SET holder")
        return super().execute(statement, parameters)


def test_session_acquired_in_doubt_is_released(
    tmp_path: Path, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "Connection", LosesAcquireAnswer)
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(LosesConnection, "is_down", False)
    monkeypatch.setattr(LosesConnection, "reconnects", False)
    address = postgres.database()
    one = on_server(tmp_path, address, "one")
    one.turn("s", [1])
    LosesConnection.lose = True
    with pytest.raises(DirectoryUnreachable):
        one.ready(one.pool.turns.checkout("s"))
    assert not LosesConnection.lose
    LosesConnection.is_down = False
    two = on_server(tmp_path, address, "two")
    waiting = two.pool.turns.checkout("s")

    def has_started() -> bool:
        one.pool.poll()
        return waiting.state is not LeaseState.WAITING

    two.until(has_started)
    two.pool.turns.release(two.ready(waiting))
    end(one, two)


def test_engine_behind_a_cut_link_is_fenced(tmp_path: Path, postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection hangs while other engines continue. Later its turn is refused."""
    address = postgres.database()
    one, two = on_server(tmp_path, address, "one"), on_server(tmp_path, address, "two")
    one.turn("s", [1])
    lease = one.ready(one.pool.turns.checkout("s"))
    slot = one.compute(lease, [2])
    assert one.pool._store is not None
    connection, go = one.pool._store.writer._connection, threading.Event()
    execute = connection.execute

    def held(statement: str, parameters: object = ()) -> object:
        if not connection.in_transaction:  # let a running transaction end: others would wait for its locks
            go.wait()
        return execute(statement, parameters)  # type: ignore[arg-type]

    monkeypatch.setattr(connection, "execute", held)
    two.turn("s", [3])
    outcome = one.finish_turn(lease, [2], slot)
    go.set()
    one.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], StaleEpoch)
    assert np.array_equal(one.state("s"), expected_state([1, 3]))
    end(one, two)


def test_states_in_several_chunks_are_loaded(tmp_path: Path, postgres: Server) -> None:
    address, words = postgres.database(), 600_000  # 2.4 MB: three chunks
    drivers = [
        Driver(FakeArena(words=words), config_in(tmp_path, state_db=address, durability="turn", engine=name))
        for name in ("one", "two")
    ]
    drivers[0].turn("s", [1, 2])
    lease = drivers[1].ready(drivers[1].pool.turns.checkout("s"))
    assert np.array_equal(fold(drivers[1].arena.memory[lease.read_slot], lease.replay), expected_state([1, 2], words))
    drivers[1].pool.turns.release(lease)
    end(*drivers)


def test_refused_statement_quarantines_no_session(tmp_path: Path, postgres: Server) -> None:
    """A renamed table or a missing right is no damage."""
    address = postgres.database()
    drivers = [opened(tmp_path, state_db=address, durability="turn", engine=n) for n in "ab"]
    drivers[0].turn("s", [1, 2])
    other = adapter.Connection(parse_server_address(address))
    other.execute("ALTER TABLE state_chunks RENAME TO chunks_elsewhere")
    refused = drivers[1].pool.turns.checkout("s")
    drivers[1].until(lambda: refused.state is LeaseState.FAILED)
    assert isinstance(refused.error, SessionReadFailed)
    other.execute("ALTER TABLE chunks_elsewhere RENAME TO state_chunks")
    other.close()
    assert np.array_equal(drivers[1].state("s"), expected_state([1, 2]))
    end(*drivers)


class LosesConnectionOnRead(adapter.Connection):
    """Loses the server right after a load starts."""

    lose: Callable[[], None] | None = None

    def execute(self, statement: str, parameters: object = ()) -> object:
        found = super().execute(statement, parameters)  # type: ignore[arg-type]
        if self._reads_only and statement == "BEGIN" and self.lose is not None:
            lose, LosesConnectionOnRead.lose = LosesConnectionOnRead.lose, None
            lose()
        return found


@pytest.mark.parametrize("reconnects", [True, False])
def test_load_waits_for_a_restarted_server(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, reconnects: bool
) -> None:
    """Loads wait as long as turns do. Then they fail with the same error."""
    monkeypatch.setattr(adapter, "Connection", LosesConnectionOnRead)
    monkeypatch.setattr(worker_threads, "RECONNECT_TIMEOUT_S", 60.0 if reconnects else 0.5)
    address = server.database()
    one = on_server(tmp_path, address)
    one.turn("s", [1, 2])
    end(one)
    two = on_server(tmp_path, address, "two")
    LosesConnectionOnRead.lose = staticmethod(server.kill)
    lease = two.pool.turns.checkout("s")
    reader = get_store(two).reader
    if reconnects:
        two.until(lambda: bool(reader._waiting))
        server.start()
        two.ready(lease)
        assert np.array_equal(fold(two.arena.memory[lease.read_slot], lease.replay), expected_state([1, 2]))
        two.pool.turns.release(lease)
    else:
        two.until(lambda: lease.state is LeaseState.FAILED)
        assert lease.error is not None
        info = as_service_error(lease.error).info
        assert (info.kind, info.retry_after_s) == (ErrorKind.ENGINE_LOST, 2.0) and "does not answer" in info.message
        with pytest.raises(DirectoryUnreachable, match=r"could not list its sessions: the server .* does not answer"):
            two.list_sessions()
        server.start()
        two.until(lambda: np.array_equal(try_state(two), expected_state([1, 2])))
    end(two)


def test_the_schema_is_sqlites(tmp_path: Path, postgres: Server) -> None:
    address = postgres.database()
    on_server(tmp_path, address).pool.close()
    other = adapter.Connection(parse_server_address(address))
    columns = other.execute(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    ).fetchall()
    ours: sqlite3.Connection = open_writer(str(tmp_path / "new.db"), "NORMAL")
    tables = [name for (name,) in ours.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert set(columns) == {(table, row[1]) for table in tables for row in ours.execute(f"PRAGMA table_info({table})")}
    other.execute("INSERT INTO schema_migrations VALUES (99, 'later', 0)")
    other.close()
    with pytest.raises(DatabaseUnusable, match="has schema 99"):
        on_server(tmp_path, address)


def test_messages_hide_the_password(tmp_path: Path, postgres: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    address = postgres.database()
    assert "secret" in address
    one = on_server(tmp_path, address)
    raised = repr(one.pool.stats())
    one.pool.close()
    with pytest.raises(DatabaseUnusable) as refused:
        on_server(tmp_path, "postgresql://rwkv:secret@/nowhere?host=/nowhere")
    assert not re.search("secret", raised + str(refused.value) + caplog.text)


def test_id_that_postgres_cannot_store_is_refused(tmp_path: Path, postgres: Server) -> None:
    one = on_server(tmp_path, postgres.database())
    with pytest.raises(InvalidSessionId, match=r"U\+0000"):
        one.pool.turns.checkout("a\x00b")
    one.turn("é🙂'; --%s?", [1])
    assert np.array_equal(one.state("é🙂'; --%s?"), expected_state([1]))
    file, answers = decode(one.export("é🙂'; --%s?").encode()), []
    for ask in (
        lambda: one.pool.turns.delete("a\x00b", False, answers.append),
        lambda: one.pool.turns.delete("a\x00", True, answers.append),
        lambda: one.pool.import_export.export("a\x00b", answers.append),
        lambda: one.pool.import_export.import_session("a\x00b", one.pool.import_export.fit(file), answers.append),
    ):
        with pytest.raises(InvalidSessionId, match=r"U\+0000"):
            ask()
    one.settle()
    assert answers == []
    end(one)


@pytest.mark.parametrize("is_ours", [True, False])
def test_data_sent_over_a_cut_link_arrives_later(tmp_path: Path, is_ours: bool) -> None:
    client_folder, server_folder = tmp_path / "ours", tmp_path / "server"
    client_folder.mkdir()
    server_folder.mkdir()
    with socket.create_server(str(server_folder / _SOCKET), family=socket.AF_UNIX) as listener:
        link = DatabaseLink(client_folder, server_folder)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(client_folder / _SOCKET))
            server, _ = listener.accept()
            with server:
                client.sendall(b"a")
                assert server.recv(1) == b"a" and link.held == 0
                link.cut(os.getpid() if is_ours else 1)
                client.sendall(b"b")
                if is_ours:
                    wait_for(lambda: link.held == 1, 10, "it is held back")
                    link.mend()
                assert server.recv(1) == b"b" and link.held == is_ours
        link.close()
