"""SIGKILL at every named point and at random moments: acknowledged turns exist exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from state_pool.crash_points import POINTS
from state_pool.disk import checkpoint_objects
from state_pool.session_key import LINEAR
from test.conftest import IS_LONG
from test.pool_child import crash_config
from test.pool_fakes import Driver, FakeArena, expected_state
from test.state_pool.stored_sessions import raw

pytestmark = pytest.mark.slow

Key = tuple[str, int]
ROOT_FOLDER = Path(__file__).parents[2]
RANDOM_KILLS = 6 if IS_LONG else 3


class Ledger:
    """The journals of killed processes, and the histories the database may have."""

    def __init__(self, folder: Path, durability: str) -> None:
        self.folder = folder
        self.config = crash_config(folder, durability)
        self.known: dict[Key, list[int]] = {}

    def read_journal(self) -> tuple[dict[Key, list[int]], list[tuple[str, int | None, list[int]]], set[str]]:
        """(acknowledged histories, recorded but unacknowledged turns, sessions with an unacknowledged delete)"""
        known = dict(self.known)
        tried: list[tuple[str, int | None, list[int]]] = []
        deleting: set[str] = set()
        for line in (self.folder / "journal").read_text().splitlines():
            kind, *rest = json.loads(line)
            if kind == "try":
                tried.append((rest[0], rest[1], rest[2]))
            elif kind == "ack":
                name, dialogue, parent, tokens = rest
                before = [] if parent == 0 else known.get((name, LINEAR if parent is None else parent), [])
                known[name, dialogue] = before + tokens
                tried.remove((name, parent, tokens))
            elif kind == "deleting":
                deleting.add(rest[0])
            elif kind == "deleted":
                deleting.discard(rest[0])
                known = {key: history for key, history in known.items() if key[0] != rest[0]}
                tried = [entry for entry in tried if entry[0] != rest[0]]
        return known, tried, deleting

    def check(self) -> None:
        """Open the database as the next process would. Compare it with the journal."""
        with raw(self.folder) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        acknowledged, tried, deleting = self.read_journal()
        driver = Driver(FakeArena(num_slots=12), self.config)
        assert driver.pool.stats()["quarantined_count"] == 0
        found = self.histories(driver, acknowledged, tried)
        for key, history in acknowledged.items():
            if key[0] in deleting and not any(k[0] == key[0] for k in found):
                continue  # the delete was not acknowledged: it happened completely or not at all
            assert key in found, f"{key} was acknowledged and is lost"
            further = [history + tokens for name, parent, tokens in tried if (name, parent) == (key[0], None)]
            allowed = [history, *(further if key[1] == LINEAR else [])]
            assert found[key] in allowed, f"{key} has {len(found[key])} tokens, {len(history)} were acknowledged"
        driver.pool.close()
        self.known = found
        (self.folder / "journal").unlink()

    def histories(
        self, driver: Driver, known: dict[Key, list[int]], tried: list[tuple[str, int | None, list[int]]]
    ) -> dict[Key, list[int]]:
        """Return each stored session's history: the candidate that matches its state."""
        found: dict[Key, list[int]] = {}
        rows = driver.list_sessions(limit=10_000).sessions
        for key in [stored.key for stored in driver.pool._index if stored.exists]:
            name, dialogue = key
            state = driver.state(name, None if dialogue == LINEAR else dialogue)
            candidates = [known.get(key, [])]
            for tried_name, parent, tokens in tried:
                if tried_name == name and (parent is None) == (dialogue == LINEAR):
                    base = [] if parent == 0 else known.get((name, LINEAR if parent is None else parent), [])
                    candidates.append(base + tokens)
            matching = [history for history in candidates if history and np.array_equal(expected_state(history), state)]
            assert matching, f"{key} holds what nobody wrote; known {known.get(key)}, {candidates}"
            found[key] = matching[0]
        assert len(rows) == len(found)
        return found


def start_child(folder: Path, durability: str, seed: int, crash_at: str = "") -> subprocess.Popen[bytes]:
    """Start a process that works until it is killed or done."""
    environment = os.environ | {"RWKV_CRASH_AT": crash_at}
    arguments = [sys.executable, "-m", "test.pool_child", str(folder), durability, str(seed)]
    return subprocess.Popen(arguments, cwd=ROOT_FOLDER, env=environment)


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_killed_at_every_named_point(tmp_path: Path, durability: str) -> None:
    """One database survives a kill at each point."""
    ledger = Ledger(tmp_path, durability)
    unreached = {"before_append", "after_append"} if durability == "turn" else set()
    for seed, point in enumerate(POINTS):
        child = start_child(tmp_path, durability, seed, f"{point}:{3 + 5 * (seed % 4)}")
        code = child.wait(timeout=150)
        assert code == (0 if point in unreached else -signal.SIGKILL), f"{point} was not reached"
        ledger.check()
    assert ledger.known


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_killed_between_an_object_and_its_row(tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the upload, and before the row's commit. Also before the old object's delete."""
    (tmp_path / "objects").mkdir()
    ledger = Ledger(tmp_path, durability)
    for seed, point in enumerate(("before_checkpoint", "within_checkpoint", "before_commit", "after_checkpoint")):
        child = start_child(tmp_path, durability, seed, f"{point}:{5 + 3 * seed}")
        assert child.wait(timeout=150) == -signal.SIGKILL, f"{point} was not reached"
        ledger.check()
    assert ledger.known
    monkeypatch.setattr(checkpoint_objects, "ORPHAN_AGE_S", -60.0)
    driver = Driver(FakeArena(num_slots=12), ledger.config)
    store = driver.pool._store
    assert store is not None and store._objects is not None
    objects = store._objects
    driver.until(lambda: store._next_sweep > 0 and objects._sweeping is None)
    with raw(tmp_path) as connection:
        named = {key for (key,) in connection.execute("SELECT object_key FROM states")}
    there = {one.key for batch in objects._store.list(objects._key_prefix) for one in batch}
    assert len(there - named) == 1, "the one that marks the place"
    assert named <= there and objects.stats.orphans > 0
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_killed_at_random_moments(tmp_path: Path, durability: str) -> None:
    """The same database is killed repeatedly at random times."""
    ledger = Ledger(tmp_path, durability)
    rng = random.Random(3)
    for seed in range(RANDOM_KILLS):
        child = start_child(tmp_path, durability, 100 + seed)
        while not (tmp_path / "journal").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0.01, 0.3))
        child.kill()
        child.wait()
        ledger.check()


def test_an_unknown_crash_point_is_refused(tmp_path: Path) -> None:
    """A test that misspells a point must fail."""
    child = start_child(tmp_path, "log", 1, "after_lunch")
    assert child.wait(timeout=150) == 1
