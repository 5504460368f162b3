"""A PostgreSQL server for tests: in a temporary folder, on a socket, not run by root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path("/usr/bin"))
_USER = "postgres"


def unavailable_reason() -> str | None:
    """Return why no server can run here, or None."""
    if not (BINARIES / "initdb").is_file():
        return "PostgreSQL is not installed"
    if os.geteuid() == 0 and _USER not in {user.pw_name for user in pwd.getpwall()}:
        return f"PostgreSQL does not run as root, and there is no user {_USER!r}"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    return None


class Server:
    """One server and its data. `database` gives each test its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        if os.geteuid() == 0:
            shutil.chown(self.folder, _USER, _USER)
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        data = str(self.folder / "data")
        self._run("initdb", "-D", data, "-A", "trust", "-U", "rwkv", "--no-sync", "-E", "UTF8", "--locale", "C")
        self.start()

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [str(BINARIES / program), *arguments]
        return (
            ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--init-groups", *command]
            if not os.geteuid()
            else command
        )

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(self._command(program, *arguments), check=True, capture_output=True, cwd="/")

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        options = ("-k", str(self.folder), "-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=60")
        with (self.folder / "log").open("ab") as log:
            command = self._command("postgres", "-D", str(self.folder / "data"), *options)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + 120
        while subprocess.run(
            [str(BINARIES / "pg_isready"), "-q", "-h", str(self.folder), "-U", "rwkv", "-d", "postgres"], check=False
        ).returncode:
            assert time.monotonic() < deadline and self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    @property
    def runs(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Kill all its processes at once. This is like a power loss that spares the disk."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(60)
            self._process = None

    def database(self) -> str:
        """Return the address of a new, empty database. It is a schema, which is faster to create."""
        self._number += 1
        return f"postgresql://rwkv:secret@/postgres?host={self.folder}#test{self._number}"

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
