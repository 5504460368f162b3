"""Killed or stopped engines over one database: their acknowledged turns survive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from demo.random_weights import write_random_model
from test.conftest import IS_LONG
from test.pool_fakes import Driver, FakeArena, config_in, expected_state, fold
from test.pool_integrity import integrity_faults

pytestmark = pytest.mark.slow

CHILD = """
import os, sys
from pathlib import Path
from test.pool_fakes import Driver, FakeArena, config_in
folder, address, durability, name = sys.argv[1:]
given = {"state_db": address} if address else {}
driver = Driver(FakeArena(), config_in(Path(folder), **given, durability=durability, engine=name, service="here"))
turn = 0
while True:
    turn += 1
    driver.turn(f"{name}.{turn % 5}", [turn])
    os.write(1, f"{name}.{turn % 5} {turn}\\n".encode())
"""


class Child:
    """An engine in its own process, which reports each acknowledged turn.

    Each report is one `os.write`. A `print` would use several writes, and a stopped process might leave half a line.
    """

    def __init__(self, name: str, folder: Path, address: str = "", durability: str = "log", crash_at: str = "") -> None:
        command = [sys.executable, "-c", CHILD, str(folder), address, durability, name]
        environment = {**os.environ, **({"RWKV_CRASH_AT": crash_at} if crash_at else {})}
        self._reports = folder / f"reports-of-{name}"
        with self._reports.open("wb") as reports:
            self.process = subprocess.Popen(command, stdout=reports, env=environment)

    @property
    def reports(self) -> list[str]:
        """All reports, also those before a kill."""
        return self._reports.read_text().splitlines()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def check(self, here: Driver) -> None:
        """Check the acknowledged turns. Each session may have one more turn without a report."""
        histories: dict[str, list[int]] = {}
        for line in self.reports:
            histories.setdefault(line.split()[0], []).append(int(line.split()[1]))
        for name, history in histories.items():
            lease = here.ready(here.pool.turns.checkout(name))
            found = fold(here.arena.memory[lease.read_slot], lease.replay)
            here.pool.turns.release(lease)
            later = [*history, history[-1] + 5]
            assert any(np.array_equal(found, expected_state(known)) for known in (history, later)), name
            here.turn(name, [999])


def is_locked(path: Path) -> bool:
    """Whether another process holds SQLite's lock for longer than a transaction."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.execute("ROLLBACK")
        return False


def stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send the signal and wait until it takes effect."""
    process.send_signal(how)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_acknowledged_turns_of_killed_engines_survive(tmp_path: Path, how: signal.Signals) -> None:
    here = Driver(FakeArena(), config_in(tmp_path, engine="parent", service="here"))
    child = Child("child", tmp_path)
    try:
        here.until(lambda: len(child.reports) > 40)
        stop(child.process, how)
        while how is signal.SIGSTOP and is_locked(tmp_path / "sessions.db"):
            child.process.send_signal(signal.SIGCONT)  # stopped within a transaction, it would keep SQLite's lock
            time.sleep(0.01)
            stop(child.process, how)
        child.check(here)
    finally:
        child.close()
        here.pool.close()


POINTS = ("before_append", "after_append", "before_commit", "after_commit", "before_acknowledgement")
STATE_POINTS = ("before_checkpoint", "within_checkpoint", "after_checkpoint")


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.cluster)])
def test_engines_killed_at_any_point_of_a_commit(request: pytest.FixtureRequest, tmp_path: Path, store: str) -> None:
    address = request.getfixturevalue("postgres").database() if store == "postgres" else ""
    settings = {"state_db": address} if address else {}
    here = Driver(FakeArena(), config_in(tmp_path, **settings, engine="parent", service="here"))
    killed = [("log", point) for point in POINTS] + [("turn", point) for point in STATE_POINTS]
    killed = killed if store == "sqlite" else [("log", "after_commit"), ("turn", "within_checkpoint")]
    children = [
        Child(f"{kind}-{point}", tmp_path, address, kind, f"{point}:{17 + 3 * number}")
        for number, (kind, point) in enumerate(killed)
    ]
    try:
        for child in children:
            assert child.process.wait(150) == -signal.SIGKILL
            assert child.reports
            child.check(here)
        here.settle()
        assert integrity_faults(here.pool) == []
    finally:
        for child in children:
            child.close()
        here.pool.close()


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_acknowledged_turns_survive_kills_of_the_service(tmp_path: Path) -> None:
    """Kills all processes at random times under load. Each turn is compared with an uninterrupted run."""
    model = write_random_model(tmp_path / "tiny.pth", 2, 128)
    command = [sys.executable, "-m", "bench.chaos.crash", "--kills", "1" if IS_LONG else "0"]  # and one at the end
    command += ["--model", str(model), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, found
    assert found["acknowledged"] > 10
    assert (found["different"], found["bad_files"]) == (0, 0), found
