"""The commands `backup`, `restore` and `check`.

A backup is a tar file: `sessions.db`, and the files next to the database: `.states`, `.adapters.json` and `.files`.
A service may run during `backup`. Each database is copied whole, in one transaction.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from native.files import FILE_MODE, FOLDER_MODE, make_private_folder, open_private, sync
from programs.settings import CommandParser, Settings, parse_settings, reports_errors
from programs.settings.values import file_error
from state_pool.disk.copies import copy_file
from state_pool.disk.process_lock import ProcessLock
from state_pool.disk.recover import verify_sessions
from state_pool.errors import DatabaseUnusable

_DATABASE = "sessions.db"
_COMPANIONS = (".states", ".adapters.json", ".files")
"""Endings of the files and folders next to a database."""
_CONTENTS = {
    (".states", ".adapters.json"): "files of states and adapters",
    (".files",): "files of uploads, batches, tunings and translations",
}
"""Beginnings of names in a backup -> what it reports."""
_LOGS = ("-wal", "-shm")
_SKIPPED = (".half", ".part", *_LOGS)
"""Endings of files that are being written, or belong to a database."""


class BackupError(Exception):
    """A command failed. The message says what to do."""


def backup(settings: Settings, archive: Path) -> str:
    """Write everything into one file, and check it. Returns a summary.

    Raises BackupError, DatabaseUnusable, OSError.
    """
    stem = _stem(settings, "pg_dump --format=custom {schema}--file={file} {address}", archive)
    if archive.exists():
        raise BackupError(f"{archive} exists already; name a file that does not")
    if not Path(stem).is_file():
        raise BackupError(f"there is no database {stem}; name it with --state-db")
    part = archive.with_name(f"{archive.name}.part")
    with tempfile.TemporaryDirectory(dir=archive.absolute().parent, prefix=".backup-") as folder:
        copy = Path(folder) / _DATABASE
        copy_file(Path(stem), copy)
        count = len(verify_sessions(copy)[0])
        with os.fdopen(open_private(part, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(copy, _DATABASE)
                companions = list(_companion_files(stem, _files_folder(settings, stem)))
                for source, name in companions:
                    _add(tar, source, name, Path(folder))
            file.flush()
            os.fsync(file.fileno())
    part.rename(archive)
    sync(archive.absolute().parent)
    store = settings.engine.pool.checkpoint_store
    warning = f"; states are in {store.partition('?')[0]} too: copy that store as well" if store else ""
    held_files = [name for source, name in companions if source.suffix != ".db"]  # a database is no user's file
    others = {text: sum(name.startswith(endings) for name in held_files) for endings, text in _CONTENTS.items()}
    held = ", ".join(f"{text}: {number}" for text, number in {"sessions": count, **others}.items())
    return f"{held}; {archive.stat().st_size >> 10} kB in {archive}{warning}"


def restore(settings: Settings, archive: Path, *, replace: bool) -> str:
    """Put a backup in place. Returns a summary. Raises BackupError, DatabaseUnusable, OSError.

    The database comes last, so an interrupted restore leaves no database that lacks its files.
    """
    stem = _stem(settings, "pg_restore --clean --if-exists {schema}--dbname={address} {file}", archive)
    targets = {_DATABASE: Path(stem)} | {ending: Path(stem + ending) for ending in _COMPANIONS}
    targets[".files"] = _files_folder(settings, stem)
    present = [str(path) for path in [*targets.values(), *(Path(stem + log) for log in _LOGS)] if path.exists()]
    if present and not replace:
        raise BackupError(f"{', '.join(present)} would be replaced; add --replace, which keeps them as NAME.replaced-1")
    with contextlib.ExitStack() as stack:
        if Path(stem).exists():
            lock = ProcessLock(str(Path(stem).resolve()))
            stack.callback(lock.release)
        folder = Path(f"{stem}.restored")
        shutil.rmtree(folder, ignore_errors=True)
        make_private_folder(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            with tarfile.open(archive, "r:") as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, ValueError, OverflowError) as error:  # not all of a header is checked by tarfile
            raise BackupError(f"{archive} is not a backup: {error}") from None
        if not (folder / _DATABASE).is_file():
            raise BackupError(f"{archive} is not a backup: it has no {_DATABASE}")
        intact, damaged = verify_sessions(folder / _DATABASE)
        for path in folder.rglob("*"):
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
            sync(path)
        number = next(
            n for n in itertools.count(1) if not any(Path(f"{path}.replaced-{n}").exists() for path in present)
        )
        for one in present:
            Path(one).rename(f"{one}.replaced-{number}")
        for name in (*_COMPANIONS, _DATABASE):
            if (folder / name).exists():
                (folder / name).rename(targets[name])
        sync(Path(stem).absolute().parent)
    return f"sessions restored to {stem}: {len(intact)}" + (f", {len(damaged)} of them damaged" if damaged else "")


def check(database: Path) -> tuple[str, int]:
    """Verify all checksums. Returns (report, number of damaged sessions). Raises BackupError."""
    if not database.is_file():
        raise BackupError(f"there is no database {database}; name its file")
    intact, damaged = verify_sessions(database)
    lines = [f"sessions: {len(intact)} intact, {len(damaged)} damaged", *damaged[:20]]
    if damaged:
        lines.append(f"`python -m state_pool.salvage {database} NEW` copies the intact ones")
    return "\n".join(lines), len(damaged)


def _companion_files(stem: str, files: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, archive name) of every file next to the database."""
    for ending in _COMPANIONS:
        top = files if ending == ".files" else Path(stem + ending)
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and not path.is_symlink() and not path.name.endswith(_SKIPPED):
                yield path, str(Path(ending) / path.relative_to(top))


def _add(tar: tarfile.TarFile, source: Path, name: str, scratch: Path) -> None:
    """Add a file. A database is copied first. A file that no longer exists is left out."""
    with contextlib.suppress(FileNotFoundError):
        if source.suffix == ".db":
            copy = scratch / source.name
            copy_file(source, copy)
            source = copy
        with source.open("rb") as file:  # its size may grow
            tar.addfile(tar.gettarinfo(arcname=name, fileobj=file), file)


def _stem(settings: Settings, command: str, file: Path) -> str:
    """Return the path of the database. Raises BackupError if sessions are elsewhere."""
    pool = settings.engine.pool
    if pool.on_server:
        address, _, schema = pool.database_display_name.partition("#")
        shown = command.format(file=file, address=address, schema=f"--schema=rwkv_{schema} " if schema else "")
        raise BackupError(
            f"PostgreSQL has the sessions; run `{shown}` with user and password, and copy {pool.files_stem}.*"
        )
    if not pool.state_db:
        raise BackupError("--state-db is empty: the service keeps sessions in memory only; name a database")
    return pool.state_db


def _files_folder(settings: Settings, stem: str) -> Path:
    folder = settings.http.files_dir
    return Path(f"{stem}.files" if folder in ("auto", "none") else folder)


def build_parser(name: str) -> CommandParser:
    description, example = _COMMANDS[name]
    parser = CommandParser(name, f"{description} {_EPILOG}", example, takes_settings=True)
    if name == "check":
        parser.add_argument("database", type=Path, nargs="?", metavar="DATABASE", help="default: the one of --state-db")
    else:
        parser.add_argument("file", type=Path, metavar="FILE", help="the backup, a tar file")
    if name == "restore":
        parser.add_argument("--replace", action="store_true", help="rename what is there to NAME.replaced-1")
    return parser


@reports_errors()
def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command of this name. Returns the exit code: 1 if it failed or found damage, 2 for a wrong flag."""
    try:
        chosen, flags = build_parser(name).parse(arguments)
        settings = parse_settings(flags, os.environ)
        if name == "check":
            text, damaged = check(chosen.database or Path(settings.engine.pool.state_db))
            sys.stdout.write(text + "\n")
            return int(damaged > 0)
        text = (
            backup(settings, chosen.file)
            if name == "backup"
            else restore(settings, chosen.file, replace=chosen.replace)
        )
    except (BackupError, DatabaseUnusable, OSError) as error:
        reason = file_error(error) if isinstance(error, OSError) else error
        sys.stderr.write(f"error: {name} failed: {reason}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


_COMMANDS = {
    "backup": (
        "Writes sessions, tuned states, adapters and files into one new FILE, also while the service runs.",
        "backup.tar --state-db rwkv_sessions.db",
    ),
    "restore": ("Puts a backup in place. The service must not run.", "backup.tar --state-db rwkv_sessions.db"),
    "check": (
        "Verifies the checksums of all sessions and logs of a database, also while the service runs.",
        "rwkv_sessions.db",
    ),
}
"""Command -> its description and an example."""
_EPILOG = "Flags of serve such as --state-db and --config, and its environment variables, name the database."
