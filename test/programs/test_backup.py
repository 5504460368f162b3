"""The commands `backup`, `restore` and `check`, on real files, also with kills."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sqlite3
import subprocess
import tarfile
import threading
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from app import main
from native.files import make_private_folder
from programs.backup import backup, check, restore
from programs.settings import Settings, parse_settings
from routes.file_store import Purpose, Store, StoredFile
from test.postgres import BINARIES, Server
from test.state_pool.conftest import postgres  # noqa: F401 - a fixture
from test.state_pool.stored_sessions import holds, raw, reopen, write_three

KILLS = 50 if "RWKV_LONG_TESTS" in os.environ else 8


def settings_of(folder: Path, *flags: str) -> Settings:
    return parse_settings(["--state-db", str(folder / "sessions.db"), *flags], {})


def write_all(folder: Path) -> None:
    """Store three sessions, a tuned state, an adapter list and an upload."""
    write_three(folder)
    make_private_folder(folder / "sessions.db.states")
    (folder / "sessions.db.states" / "polite.safetensors").write_bytes(b"state")
    (folder / "sessions.db.adapters.json").write_text("[]")
    store = Store(folder / "sessions.db.files", 1 << 20, 10)
    store.add_file(
        StoredFile(id="file-1", owner="", bytes=4, created_at=1, filename="in.jsonl", purpose=Purpose.BATCH), b"line"
    )


def assert_whole(folder: Path) -> None:
    assert (folder / "sessions.db.states" / "polite.safetensors").read_bytes() == b"state"
    assert (folder / "sessions.db.adapters.json").read_text() == "[]"
    store = Store(folder / "sessions.db.files", 1 << 20, 10)
    assert store.content("file-1").read_bytes() == b"line"
    assert [file.id for file in store.files("", "", "", 10, True)] == ["file-1"]
    for path in folder.glob("*[!1]"):  # not the replaced ones
        assert path.stat().st_mode & 0o077 == 0, path
    driver = reopen(folder)
    assert all(holds(driver, name) for name in "abc")
    driver.pool.close()


def test_a_backup_of_a_running_service_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(mode=0o700)
    new.mkdir(mode=0o700)
    write_all(old)
    driver = reopen(old)  # a service has the database open
    archive = tmp_path / "backup.tar"
    assert main(["backup", str(archive), "--state-db", str(old / "sessions.db")]) == 0
    counts = "sessions: 3, files of states and adapters: 2, files of uploads, batches, tunings and translations: 1; "
    assert capsys.readouterr().out.startswith(counts)
    assert archive.stat().st_mode & 0o777 == 0o600
    driver.turn("a", [9])
    driver.pool.close()
    assert main(["backup", str(archive), "--state-db", str(old / "sessions.db")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["restore", str(archive), "--state-db", str(new / "sessions.db")]) == 0
    assert capsys.readouterr().out == f"sessions restored to {new / 'sessions.db'}: 3\n"
    assert_whole(new)


def test_a_restore_replaces_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path)
    archive = tmp_path.parent / f"{tmp_path.name}.tar"
    backup(settings_of(tmp_path), archive)
    driver = reopen(tmp_path)
    driver.turn("a", [9])
    command = ["restore", str(archive), "--state-db", str(tmp_path / "sessions.db")]
    assert main(command) == 1
    refusal = capsys.readouterr().err
    assert "would be replaced; add --replace" in refusal and "sessions.db.files" in refusal
    assert main([*command, "--replace"]) == 1
    assert "in use by another process" in capsys.readouterr().err
    driver.pool.close()
    assert main([*command, "--replace"]) == 0
    assert_whole(tmp_path)
    assert (tmp_path / "sessions.db.replaced-1").is_file() and (tmp_path / "sessions.db.files.replaced-1").is_dir()


def test_a_check_names_the_damaged_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_three(tmp_path)
    assert check(tmp_path / "sessions.db") == ("sessions: 3 intact, 0 damaged", 0)
    with raw(tmp_path) as connection:
        connection.execute(
            "UPDATE state_chunks SET data = zeroblob(length(data)) WHERE id = (SELECT min(id) FROM state_chunks)"
        )
        connection.execute("UPDATE turns SET tokens = x'00' WHERE session = 1")
    assert main(["check", str(tmp_path / "sessions.db")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("sessions: 2 intact, 1 damaged\na: ") and "state_pool.salvage" in text
    assert main(["check", str(tmp_path / "none.db")]) == 1


def test_flags_of_settings_may_have_their_value_after_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_three(tmp_path)
    database, archive = str(tmp_path / "sessions.db"), tmp_path / "copy.tar"
    config = tmp_path / "config.toml"
    config.write_text(f"state-db = {database!r}\n")
    assert main(["check", "--state-db", database]) == main(["check", "--config", str(config)]) == 0
    assert main(["backup", "--state-db", database, "--access-log", str(archive)]) == 0 and archive.is_file()
    assert main(["backup", "--access-log", "no", "--retain-tokens", "-1", "--", str(archive)]) == 1
    capsys.readouterr()
    for arguments in (["--state-db"], ["--state-db", "--config", str(config)]):
        assert main(["check", *arguments]) == 2
        error = capsys.readouterr().err
        assert "--state-db: expected one argument; see" in error and error.endswith(" check --help\n")
    assert main(["check", database, "more"]) == 2 and "unexpected argument 'more'" in capsys.readouterr().err


def test_only_a_database_of_the_service_is_backed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, refusal in (("none.db", "there is no database"), ("other.db", "is no session database")):
        if name == "other.db":
            with contextlib.closing(sqlite3.connect(tmp_path / name)) as other:
                other.execute("CREATE TABLE diary(text)")
        assert main(["backup", str(tmp_path / "copy.tar"), "--state-db", str(tmp_path / name)]) == 1
        assert refusal in capsys.readouterr().err
        assert main(["check", str(tmp_path / name)]) == 1
        assert refusal in capsys.readouterr().err
    assert not (tmp_path / "copy.tar").exists()


def test_a_backup_that_cannot_be_read_is_named_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, reason in (("none.tar", "No such file or directory); check the name"), ("", "Is a directory); name a")):
        assert main(["restore", str(tmp_path / file), "--state-db", str(tmp_path / "s.db")]) == 1
        assert f"restore failed: {tmp_path / file} cannot be read or written ({reason}" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 2048])
def test_a_file_that_is_no_backup_is_refused(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    assert main(["restore", str(tmp_path / "x.tar"), "--state-db", str(tmp_path / "s.db")]) == 1
    assert "is not a backup" in capsys.readouterr().err and not (tmp_path / "s.db").exists()


@pytest.mark.parametrize(
    "header", [{"GNU.sparse.map": "a,b"}, {"mtime": "1e308"}, {"mtime": "nan"}, {"path": "a\0b"}, None]
)
def test_a_damaged_archive_is_refused_in_one_line(
    tmp_path: Path, header: dict[str, str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:gz" if header is None else "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("sessions.db")
        member.pax_headers, member.size = header or {}, 512
        tar.addfile(member, io.BytesIO(random.Random(1).randbytes(512)))
    if header is None:  # compressed and cut
        (tmp_path / "x.tar").write_bytes((tmp_path / "x.tar").read_bytes()[:-300])
    assert main(["restore", str(tmp_path / "x.tar"), "--state-db", str(tmp_path / "s.db")]) == 1
    said = capsys.readouterr().err
    assert "is not a backup" in said and said.count("\n") == 1


def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("sessions.db", "../outside"):
            tar.addfile(tarfile.TarInfo(name))
    (tmp_path / "in").mkdir()
    assert main(["restore", str(tmp_path / "x.tar"), "--state-db", str(tmp_path / "in" / "s.db")]) == 1
    assert "is not a backup" in capsys.readouterr().err and not (tmp_path / "outside").exists()


def killed(action: object, seconds: float) -> bool:
    """Run an action in a child and kill it after a time. Returns whether it had not ended."""
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())  # the default is shared with this process, which would wait for it for ever
        try:
            action()  # type: ignore[operator]
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """A killed backup leaves no file of its name. A killed restore can be repeated."""
    old = tmp_path / "old"
    old.mkdir(mode=0o700)
    write_all(old)
    archive = tmp_path / "backup.tar"
    dice, kills, number = random.Random(5), 0, 0
    started_at = time.monotonic()
    backup(settings_of(old), archive)
    duration = time.monotonic() - started_at
    while kills < KILLS:
        number += 1
        copy, new = tmp_path / f"{number}.tar", tmp_path / str(number)
        new.mkdir(mode=0o700)
        backup_killed = killed(lambda copy=copy: backup(settings_of(old), copy), dice.uniform(0, duration))
        kills += backup_killed
        if copy.exists():
            with tarfile.open(copy) as tar:
                assert ".files/content/file-1" in tar.getnames()
        restore_killed = killed(
            lambda new=new: restore(settings_of(new), archive, replace=False), dice.uniform(0, duration)
        )
        kills += restore_killed
        duration *= 1 if backup_killed or restore_killed else 0.7  # the first one was slow
        if (new / "sessions.db").exists():
            assert_whole(new)
        restore(settings_of(new), archive, replace=True)
        assert_whole(new)


def test_postgresql_names_the_commands_that_work(
    postgres: Server,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = postgres.database()
    dsn, _, schema = address.partition("#")
    driver = reopen(tmp_path, state_db=address)
    driver.turn("a", [97, 1])
    driver.turn("a", [2, 3])
    driver.pool.close()
    dump = tmp_path / "x.dump"
    for name in ("backup", "restore"):
        assert main([name, str(dump), "--state-db", address]) == 1
        command = capsys.readouterr().err.split("`")[1]
        assert f"--schema=rwkv_{schema} " in command and "secret" not in command
        shown = next(word for word in command.split() if "postgresql://" in word)
        command = command.replace(shown.removeprefix("--dbname="), dsn)
        done = subprocess.run([BINARIES / command.split()[0], *command.split()[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    driver = reopen(tmp_path, state_db=address)
    assert holds(driver, "a")
    driver.pool.close()
