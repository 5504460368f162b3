"""Sessions of several owners, and the engines that may open a database."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from state_pool.config import PoolConfig
from state_pool.disk import database, process_lock
from state_pool.errors import DatabaseUnusable
from state_pool.session_key import owned_id, owner_of, without_owner
from test.pool_fakes import Driver, FakeArena, config_in, end, expected_state, opened

OWN, OTHER, SHARED = owned_id("anna", "s"), owned_id("bert", "s"), "s"


@pytest.fixture(
    params=["memory", "sqlite-log", "sqlite-lazy", "shared", pytest.param("postgres", marks=pytest.mark.cluster)]
)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    """One engine. With a shared database, another engine has made the sessions `OTHER` and `SHARED`."""
    kind, _, durability = request.param.partition("-")
    state_db = {"memory": "", "postgres": ""}.get(kind, str(tmp_path / "pool.db"))
    if kind == "postgres":
        state_db = request.getfixturevalue("postgres").database()
    engine = {"engine": "one", "service": "here"} if kind in ("shared", "postgres") else {}
    config = config_in(tmp_path, state_db=state_db, durability=durability or "log", **engine)
    used = Driver(FakeArena(delay=1), config)
    makers = [used]
    if engine:
        makers.append(opened(tmp_path, delay=1, state_db=state_db, engine="two", service="here"))
    used.turn(OWN, [1])
    makers[-1].turn(OTHER, [2])
    makers[-1].turn(SHARED, [3])
    makers[-1].turn(owned_id("bert", "tree"), [4], branch_from=0)
    for maker in makers[1:]:
        end(maker)
    yield used
    end(used)


def names(driver: Driver, owner: str) -> list[str]:
    page = driver.list_sessions(owner=owner)
    assert page.total == len(page.sessions) == page.in_slots + page.in_host_memory + page.on_disk
    return sorted(entry.session_id for entry in page.sessions)


def found(driver: Driver, *session_ids: str) -> str | Exception | None:
    outcomes: list[str | Exception | None] = []
    driver.pool.listing.find_first(session_ids, outcomes.append)
    driver.until(lambda: bool(outcomes))
    return outcomes[0]


def test_an_owner_lists_its_sessions_and_shared_ones(driver: Driver) -> None:
    tree = owned_id("bert", "tree:1")
    assert names(driver, "anna") == [OWN, SHARED]
    assert names(driver, "bert") == [OTHER, tree, SHARED]
    assert names(driver, "carl") == [SHARED]
    assert names(driver, "") == [OWN, OTHER, tree, SHARED]
    page = driver.list_sessions(limit=1, offset=1, owner="anna")
    assert page.total == 2 and [entry.session_id for entry in page.sessions] in ([OWN], [SHARED])


def test_the_first_known_id_is_found(driver: Driver) -> None:
    assert found(driver, OWN, SHARED) == OWN
    assert found(driver, owned_id("carl", "s"), SHARED) == SHARED
    assert found(driver, owned_id("bert", "tree"), "tree") == owned_id("bert", "tree")
    assert found(driver, owned_id("anna", "tree"), "tree") is None


@pytest.mark.parametrize("prefix", ["s", "o", "owner", "owner=bert/s"])
def test_a_prefix_of_shared_ids_deletes_no_owners_sessions(driver: Driver, prefix: str) -> None:
    deleted: list[int | Exception] = []
    driver.pool.turns.delete(prefix, True, deleted.append)
    driver.until(lambda: bool(deleted))
    victims = {"s": [SHARED], "owner=bert/s": [OTHER]}.get(prefix, [])
    assert deleted == [len(victims)]
    assert names(driver, "") == sorted({OWN, OTHER, owned_id("bert", "tree:1"), SHARED} - set(victims))


def test_ids_with_owners() -> None:
    assert [owner_of(name) for name in (OWN, owned_id("bert", OWN))] == ["anna", "bert"]
    assert [owner_of(name) for name in (SHARED, "owner=", "owner=a b/s", "")] == [""] * 4
    assert without_owner(f"session {OWN!r} is busy with {OTHER!r}") == "session 's' is busy with 's'"
    assert without_owner(repr(owned_id("a", OTHER))) == repr(OTHER)


def test_another_service_is_refused_while_an_engine_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (opened(tmp_path, engine=name, service="here") for name in ("one", "two"))
    monkeypatch.setattr(process_lock, "BUSY_TIMEOUT_S", 0.1)
    for config in (config_in(tmp_path), config_in(tmp_path, engine="x", service="elsewhere")):
        with pytest.raises(DatabaseUnusable, match=rf"in use by another process \(pid {os.getpid()}\)"):
            Driver(FakeArena(), config)
    for driver in (one, two):
        assert driver.pool.failure is None
        driver.pool.close()


def test_engine_joins_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened(tmp_path, engine="one", service="here")
    briefly = database.disable_busy_wait
    other = sqlite3.connect(tmp_path / "sessions.db", isolation_level=None, check_same_thread=False)

    def while_locked(connection: sqlite3.Connection) -> None:
        briefly(connection)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.2, lambda: other.execute("COMMIT")).start()

    monkeypatch.setattr(database, "disable_busy_wait", while_locked)
    two = opened(tmp_path, engine="two", service="here")
    two.turn("s", [1])
    for driver in (one, two):
        end(driver)
    other.close()


def test_lazy_durability_needs_a_single_engine(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusable, match="lazy"):
        opened(tmp_path, durability="lazy", engine="one", service="here")


def test_single_engine_finds_all_sessions(tmp_path: Path) -> None:
    one, two = (opened(tmp_path, engine=name, service="here") for name in ("one", "two"))
    one.turn("a", [1])
    two.turn("b", [2])
    one.pool.close()
    two.pool.close()
    alone = opened(tmp_path)
    assert np.array_equal(alone.state("a"), expected_state([1]))
    assert np.array_equal(alone.state("b"), expected_state([2]))
    alone.pool.close()


def test_engine_and_service_are_not_flags() -> None:
    assert (PoolConfig().engine, PoolConfig().service) == ("", "")
