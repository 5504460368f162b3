"""Make a session database and an exported session.

The program's version is the one in the working directory.

`python -P .../make_database.py SCHEMA FOLDER` in a checkout of that version writes `schema-SCHEMA.db.gz` and
`session-SCHEMA.safetensors`. `test_upgrades.py` opens them with this version. Both are kept: a released file never
changes, so run this once per schema, with the last version that writes it.
"""

from __future__ import annotations

import gzip
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, ".")

from test.pool_fakes import Driver, FakeArena, config_in, end

_DAY_S = 86400.0


def export(driver: Driver, name: str) -> bytes:
    found: list = []
    exporter = getattr(driver.pool, "import_export", driver.pool)
    try:
        exporter.export(name, found.append)
    except TypeError:  # the dialogue came before the callback once
        exporter.export(name, None, found.append)
    driver.until(lambda: bool(found))
    return found[0].encode()


def main(schema: int, folder: Path) -> None:
    """Sessions of each kind: stored states, logs alone, dialogues, a deleted dialogue, another model, an old use."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        driver = Driver(FakeArena(fingerprint="model-b"), config_in(work))
        driver.turn("other-model", [7, 8])
        end(driver)
        driver = Driver(FakeArena(), config_in(work))
        driver.turn("stored", [1, 2])
        driver.turn("stored", [3])
        driver.turn("unused", [4, 4])
        driver.turn("tuned", [5, 6])
        driver.turn("family", [10], branch_from=0)
        driver.turn("family", [11], branch_from=1)
        driver.turn("family", [12], branch_from=0)
        driver.delete("family:3")
        driver.settle()
        driver.pool.close()  # stores all states
        driver = Driver(FakeArena(), config_in(work, l1_sessions=40))
        file = export(driver, "stored")
        driver.turn("stored", [20])  # in the log, after the state
        driver.turn("logged", [21, 22])
        driver.turn("logged", [23])
        driver.turn("family", [13], branch_from=2)
        driver.settle()
        with sqlite3.connect(work / "sessions.db") as source:
            source.execute("VACUUM INTO ?", (str(work / "copy.db"),))
        driver.pool.close()
        with sqlite3.connect(work / "copy.db") as copy:
            copy.execute("UPDATE sessions SET updated = ? WHERE session_id = 'unused'", (time.time() - 60 * _DAY_S,))
            if schema >= 4:
                copy.execute(
                    "UPDATE sessions SET origin_name = 'poet', origin_digest = 'abc' WHERE session_id = 'tuned'"
                )
            version = copy.execute("SELECT max(version) FROM schema_migrations").fetchone()[0]
            assert version == schema, f"this version writes schema {version}"
        copy.close()
        content = gzip.compress((work / "copy.db").read_bytes(), mtime=0)
    (folder / f"schema-{schema}.db.gz").write_bytes(content)
    (folder / f"session-{schema}.safetensors").write_bytes(file)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
