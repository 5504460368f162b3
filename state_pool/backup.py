"""The command `python -m state_pool.backup DATABASE COPY`: copies a database while a service uses it.

The copy is whole, compact and private. States in a checkpoint store stay there.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import sys
from pathlib import Path

from state_pool.disk.copies import copy_database


def backup(database: Path, copy: Path) -> int:
    """Copy a database and return its number of sessions. Raises sqlite3.Error, OSError."""
    if not database.is_file():
        raise FileNotFoundError(f"there is no file {database}")
    if copy.exists():
        raise FileExistsError(f"{copy} exists already; name a file that does not")
    source = sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=10.0)
    with contextlib.closing(source):
        count = int(source.execute("SELECT count(*) FROM sessions WHERE hidden = 0").fetchone()[0])
        copy_database(source, copy)
    return count


def main() -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path)
    parser.add_argument("copy", type=Path)
    arguments = parser.parse_args()
    try:
        count = backup(arguments.database, arguments.copy)
    except (OSError, sqlite3.Error) as error:
        sys.stderr.write(f"error: {arguments.database} was not copied: {error}\n")
        return 1
    sys.stdout.write(f"{count} sessions copied to {arguments.copy} ({arguments.copy.stat().st_size >> 10} kB)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
