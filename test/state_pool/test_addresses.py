"""Addresses of databases and checkpoint stores; errors contain no secrets."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from programs.settings import SettingsError, parse_settings
from state_pool.addresses import parse_checkpoint_address, parse_server_address
from state_pool.disk import postgres as adapter
from state_pool.errors import DatabaseUnusable
from test.pool_fakes import config_in
from test.state_pool.stored_sessions import reopen


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://u:secret@host/db", "postgresql://host/db"),
        ("postgres://u:s?cret@[::1]:5432,other:5433/db#one", "postgres://[::1]:5432,other:5433/db#one"),
        ("postgresql://u:secret@/db?host=@socket&sslpassword=secret", "postgresql:///db"),
        ("postgresql://h/db?password=secret#s", "postgresql://h/db#s"),
        ("postgresql://", "postgresql://"),
    ],
)
def test_display_name_hides_secrets(given: str, shown: str) -> None:
    address = parse_server_address(given)
    assert address.display_name == shown
    assert address.dsn == given.partition("#")[0]


WRONG = [
    "postgresql://u:secret@[::1/db",
    "postgresql://u:sec/ret@h/db",
    "postgresql://u:sec#ret@h/db",
    "postgresql://u:sec@ret@h/db",
    "postgresql://u:sec/re?t@h/db#s@t",
    "postgresql://u:secret",
    "postgresql://u:secret@h:port/db",
    "postgresql://u:6789012",
    "postgresql://h,u:65536/db",
]


@pytest.mark.parametrize("given", WRONG)
def test_error_for_wrong_address_hides_it(given: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--state-db must be postgresql://") as refused:
        parse_settings(["--state-db", given], {})
    with pytest.raises(DatabaseUnusable, match="--state-db must be postgresql://") as unusable:
        adapter.PostgresStore(config_in(tmp_path, state_db=given))
    for error in (refused.value, unusable.value):
        assert not any(
            piece in "".join(traceback.format_exception(error)) for piece in ("u:sec", "ret@", "h/db", "6789", "65536")
        )


@pytest.mark.cluster
@pytest.mark.parametrize("given", ["postgresql://u:sec%ret@nowhere/db", "postgresql://nowhere/db?secret"])
def test_driver_error_hides_password(given: str, tmp_path: Path) -> None:
    store = adapter.PostgresStore(config_in(tmp_path, state_db=given))
    with pytest.raises(DatabaseUnusable, match=r"postgresql://nowhere/db: .*as %XX") as refused:
        store.open_writer()
    assert "sec" not in str(refused.value) and refused.value.__cause__ is None


def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    with pytest.raises(DatabaseUnusable, match=r"needs psycopg, .*requirements-cluster") as refused:
        reopen(tmp_path, state_db="postgresql://u:secret@nowhere/db")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("/shared/folder", "must be file:///"),
        ("file://shared/folder", "three slashes"),
        ("file:relative", "three slashes"),
        ("s3:///prefix", "the bucket's name"),
        ("s3://key:secret@bucket/x", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/x?endpont=http://h", "unknown parameter 'endpont'"),
        ("s3://bucket/x?endpoint=h:9000", "http:// or https://"),
        ("s3://bucket/x?endpoint=http://key:secret@h", "without a password"),
    ],
)
def test_wrong_checkpoint_addresses_are_refused(given: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_checkpoint_address(given)
    assert "secret@" not in str(refused.value)
