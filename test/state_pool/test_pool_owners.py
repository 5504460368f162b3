"""Sessions of several owners: what each finds, lists and deletes, in memory, in SQLite and in a shared database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from state_pool.session_key import owned_id, owner_of, without_owner
from test.pool_fakes import Driver, FakeArena, config_in, end

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
        makers.append(Driver(FakeArena(delay=1), config_in(tmp_path, state_db=state_db, engine="two", service="here")))
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
    driver.pool.turns.delete_counted(prefix, True, deleted.append)
    driver.until(lambda: bool(deleted))
    victims = {"s": [SHARED], "owner=bert/s": [OTHER]}.get(prefix, [])
    assert deleted == [len(victims)]
    assert names(driver, "") == sorted({OWN, OTHER, owned_id("bert", "tree:1"), SHARED} - set(victims))


def test_ids_with_owners() -> None:
    assert [owner_of(name) for name in (OWN, owned_id("bert", OWN))] == ["anna", "bert"]
    assert [owner_of(name) for name in (SHARED, "owner=", "owner=a b/s", "")] == [""] * 4
    assert without_owner(f"session {OWN!r} is busy with {OTHER!r}") == "session 's' is busy with 's'"
    assert without_owner(repr(owned_id("a", OTHER))) == repr(OTHER)
