"""Databases and session files of every earlier schema, opened by this version: nothing is lost.

The files in `upgrades/` were written by the versions themselves; see `upgrades/make_database.py`.
"""

from __future__ import annotations

import gzip
import logging
import time
from pathlib import Path

import numpy as np
import pytest

from state_pool.config import DEFAULT_SESSION_TTL_S
from state_pool.disk.migrations import SCHEMA_VERSION
from state_pool.disk.recover import salvage
from state_pool.errors import SessionUnusable
from state_pool.origins import Origin
from state_pool.session_file import decode
from test.pool_fakes import Driver, FakeArena, config_in, end, expected_state, get_session, names, opened
from test.state_pool.stored_sessions import raw

DATA = Path(__file__).parent / "upgrades"
SCHEMAS = sorted(int(file.name.removeprefix("schema-").removesuffix(".db.gz")) for file in DATA.glob("schema-*.db.gz"))
KINDS = {"stored": [1, 2, 3, 20], "logged": [21, 22, 23], "unused": [4, 4], "tuned": [5, 6]}
every_schema = pytest.mark.parametrize("schema", SCHEMAS)


def dialogues(schema: int) -> dict[int, list[int]]:
    """Tokens of each dialogue. Dialogue 3 was deleted; schema 1 gave its number again."""
    return {1: [10], 2: [10, 11], 3 if schema == 1 else 4: [10, 11, 13]}


def all_names(schema: int) -> set[str]:
    return {*KINDS, *(f"family:{number}" for number in dialogues(schema)), "other-model"}


def unpack(schema: int, folder: Path) -> None:
    """Write the database of that schema. Session "unused" was used 50 days ago, "tuned" 25 days ago."""
    (folder / "sessions.db").write_bytes(gzip.decompress((DATA / f"schema-{schema}.db.gz").read_bytes()))
    with raw(folder) as connection:
        connection.execute("UPDATE sessions SET updated = ?", (time.time() - 3600,))
        for name, days in (("unused", 50), ("tuned", 25)):
            values = (time.time() - days * 86400, name)
            connection.execute("UPDATE sessions SET updated = ? WHERE session_id = ?", values)


def check_states(driver: Driver, schema: int) -> None:
    """Every session has the state of all its turns; that of another model is refused by name."""
    assert names(driver) == all_names(schema)
    for name, tokens in KINDS.items():
        assert np.array_equal(driver.state(name), expected_state(tokens)), name
    for number, tokens in dialogues(schema).items():
        assert np.array_equal(driver.state("family", number), expected_state(tokens)), number
    with pytest.raises(SessionUnusable, match="belongs to another model"):
        driver.state("other-model")


def test_every_earlier_schema_has_a_database() -> None:
    """Run `upgrades/make_database.py` with the last version of a schema. Do so before the next migration's release."""
    assert list(range(1, SCHEMA_VERSION)) == [schema for schema in SCHEMAS if schema < SCHEMA_VERSION]


@every_schema
def test_a_database_of_an_earlier_schema_loses_nothing(tmp_path: Path, schema: int) -> None:
    unpack(schema, tmp_path)
    driver = opened(tmp_path)
    check_states(driver, schema)
    driver.turn("stored", [30])
    driver.turn("logged", [31])
    last = max(dialogues(schema))
    assert driver.turn("family", [32], branch_from=last).dialogue_idx == last + 1
    end(driver)
    driver = opened(tmp_path)
    assert names(driver) == {*all_names(schema), f"family:{last + 1}"}
    assert np.array_equal(driver.state("stored"), expected_state([*KINDS["stored"], 30]))
    assert np.array_equal(driver.state("logged"), expected_state([*KINDS["logged"], 31]))
    assert np.array_equal(driver.state("family", last + 1), expected_state([10, 11, 13, 32]))
    driver.pool.close()
    with raw(tmp_path) as connection:
        assert connection.execute("SELECT max(version) FROM schema_migrations").fetchone() == (SCHEMA_VERSION,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@every_schema
def test_a_fingerprint_of_earlier_versions_is_replaced_at_the_next_turn(tmp_path: Path, schema: int) -> None:
    """It has only the digest of a sample of the weights."""
    unpack(schema, tmp_path)
    driver = Driver(FakeArena(fingerprint="model-a.content"), config_in(tmp_path))
    check_states(driver, schema)
    others = driver.pool.stats()["database"]["other_models"]
    assert [other["fingerprint"] for other in others] == ["model-b"]
    for name in KINDS:
        driver.turn(name, [30])
    end(driver)
    with raw(tmp_path) as connection:
        found = connection.execute(
            "SELECT session_id, fingerprint, keeps_log FROM sessions WHERE hidden = 0"
        ).fetchall()
        stored = {name: (fingerprint, keeps_log) for name, fingerprint, keeps_log in found}
    assert all(stored[name] == ("model-a.content", 0) for name in KINDS)
    other = Driver(FakeArena(fingerprint="model-a.changed"), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match=r"fingerprint model-a\.content; this one is model-a\.changed"):
        other.state("stored")
    other.pool.close()


@pytest.mark.parametrize("schema", [schema for schema in SCHEMAS if schema >= 4])
def test_the_origin_of_a_session_is_kept(tmp_path: Path, schema: int) -> None:
    unpack(schema, tmp_path)
    driver = opened(tmp_path)
    assert get_session(driver, "tuned").origin == Origin("poet", "abc")
    driver.pool.close()


@every_schema
@pytest.mark.parametrize("shared", [False, True])
def test_sessions_of_an_earlier_schema_do_not_expire(
    tmp_path: Path, schema: int, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unpack(schema, tmp_path)
    sharing = {"engine": "one", "service": "here"} if shared else {}
    for _ in range(2):  # also at the start after the migration
        driver = opened(tmp_path, **sharing)
        driver.pool._next_retry = 0.0
        driver.pool._do_housekeeping(1e9)
        driver.settle()
        assert names(driver) == all_names(schema)
        assert driver.pool.stats()["session_ttl_s"] == 0
        driver.pool.close()
    assert "never expire; --session-ttl 2592000" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_an_expiry_is_logged_and_counted(tmp_path: Path, shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With a TTL that somebody has set."""
    caplog.set_level(logging.INFO)
    unpack(SCHEMAS[-1], tmp_path)
    sharing = {"engine": "one", "service": "here"} if shared else {}
    driver = opened(tmp_path, session_ttl=DEFAULT_SESSION_TTL_S, **sharing)
    driver.until(lambda: "unused" not in names(driver))
    driver.settle()
    assert driver.pool.stats()["counters"]["expired"] == 1
    assert "1 sessions deleted that no turn used since 20" in caplog.text
    assert "they expired (--session-ttl); 1 since this start" in caplog.text
    driver.pool.close()


def test_sessions_of_a_new_database_expire_after_30_days(tmp_path: Path) -> None:
    for _ in range(2):
        driver = opened(tmp_path)
        assert driver.pool.stats()["session_ttl_s"] == DEFAULT_SESSION_TTL_S
        driver.turn("a", [1])
        driver.pool.close()


@every_schema
def test_a_salvaged_database_loses_nothing(tmp_path: Path, schema: int) -> None:
    (tmp_path / "old").mkdir()
    unpack(schema, tmp_path / "old")
    saved, lost = salvage(tmp_path / "old" / "sessions.db", tmp_path / "sessions.db")
    assert (set(saved), lost) == (all_names(schema), [])
    driver = opened(tmp_path)
    check_states(driver, schema)
    assert driver.pool.stats()["session_ttl_s"] == 0
    driver.pool.close()


@every_schema
def test_a_session_file_of_an_earlier_version_is_imported(tmp_path: Path, schema: int) -> None:
    file = decode((DATA / f"session-{schema}.safetensors").read_bytes())
    driver = opened(tmp_path)
    answers: list[object] = []
    driver.pool.import_export.import_session("new", driver.pool.import_export.fit(file), answers.append)
    driver.until(lambda: bool(answers))
    assert np.array_equal(driver.state("new"), expected_state([1, 2, 3])), answers
    driver.pool.close()


def as_model(folder: Path, letter: str, **changes: object) -> Driver:
    changes = {"model_file": f"{letter}.pth", **changes}
    return Driver(FakeArena(fingerprint=f"model-{letter}"), config_in(folder, **changes))


def test_sessions_of_another_model_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = as_model(tmp_path, "a")
    for name in "xyz":
        driver.turn(name, [1])
    driver.settle()
    assert driver.pool.stats()["database"]["other_models"] == []
    driver.pool.close()
    assert "another model" not in caplog.text
    driver = as_model(tmp_path, "b")
    found = {"model": "a.pth", "fingerprint": "model-a", "sessions": 3}
    assert driver.pool.stats()["database"]["other_models"] == [found]
    assert "3 sessions of" in caplog.text and "(a.pth, fingerprint model-a)" in caplog.text
    with pytest.raises(SessionUnusable, match=r"another model \(a\.pth, fingerprint model-a; this one is model-b\)"):
        driver.state("x")
    driver.pool.close()


def test_a_session_rebuilt_for_another_model_can_return(tmp_path: Path) -> None:
    """Its log is kept from then on. This holds though states of the new model cover it."""
    driver = as_model(tmp_path, "a", retain_tokens=-1)
    driver.turn("s", [1, 2])
    driver.pool.close()
    driver = as_model(tmp_path, "b")
    driver.turn("s", [3])
    driver.pool.close()  # stores a state
    driver = as_model(tmp_path, "b")
    driver.turn("s", [4])
    driver.pool.close()
    driver = as_model(tmp_path, "a")
    assert np.array_equal(driver.state("s"), expected_state([1, 2, 3, 4]))
    driver.pool.close()
