"""A process in which each file call of a script fails once.

The script uses the pool. Start the process with `python -m test.state_pool.nth_failure`.

Arguments: folder, durability, first number, step, most numbers, calls that fail, synchronous. Prints a line of JSON per
violation, and a last line with the numbers that were tried.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from state_pool.config import PoolConfig
from state_pool.errors import PoolError, SessionNotFound
from state_pool.session_file import SessionFile, decode
from state_pool.session_key import LINEAR
from test.failing_calls import ONLY, SYNCS, FailingCalls
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, expected_state
from test.pool_integrity import integrity_faults

Key = tuple[str, int]
EXPECTED = (PoolError, OSError, sqlite3.Error)
"""A caller gets one of these, with a text."""


class Script:
    """Create, talk, branch, export, import, delete, restart, talk; remembers what was acknowledged."""

    def __init__(self, config: PoolConfig, calls: FailingCalls) -> None:
        self.config = config
        self.calls = calls
        are_synced = config.synchronous == "FULL" and config.durability != "lazy"
        self.needs_syncs = are_synced and os.environ.get(ONLY) == SYNCS
        """Whether no turn may be acknowledged while syncs fail."""
        self.acknowledged: dict[Key, list[int]] = {}
        self.unknown: dict[Key, list[list[int]]] = {}
        """histories that an unacknowledged turn may have left"""
        self.deleting: set[str] = set()
        self.faults: list[str] = []
        self.driver: Driver | None = None

    def attempt(self, step: Callable[[Driver], None]) -> None:
        """Run a step. Only a described error may leave it."""
        try:
            if self.driver is None:
                self.driver = Driver(FakeArena(num_slots=12), self.config)
            step(self.driver)
        except EXPECTED as error:
            if not str(error).strip():
                self.faults.append(f"{type(error).__name__} without a text")
        except AssertionError as error:
            self.faults.append(f"hang or wrong state: {error}")
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")

    def turn(self, name: str, tokens: list[int], parent: int | None = None) -> None:
        """Run a turn; note it before, and whether it was acknowledged."""

        def step(driver: Driver) -> None:
            base = self.acknowledged.get((name, LINEAR if parent is None else parent), [])
            key = (name, LINEAR if parent is None else -2)
            self.unknown.setdefault(key, []).append(base + tokens)
            syncs_fail = self.needs_syncs and self.calls.failed > 0
            lease = driver.turn(name, tokens, parent)
            dialogue = LINEAR if lease.dialogue_idx is None else lease.dialogue_idx
            self.acknowledged[name, dialogue] = base + tokens
            if syncs_fail:
                self.faults.append(f"a turn of {name} was acknowledged without a sync")

        self.attempt(step)

    def copy(self, name: str, target: str) -> None:
        """Export a session and import it under another name."""

        def step(driver: Driver) -> None:
            found: list[SessionFile | Exception] = []
            driver.pool.import_export.export(name, found.append)
            driver.until(lambda: bool(found))
            if isinstance(found[0], Exception):
                raise found[0]
            history = self.acknowledged.get((name, LINEAR), [])
            self.unknown.setdefault((target, LINEAR), []).append(history)
            outcome = Outcome()
            driver.pool.import_export.import_session(
                target, driver.pool.import_export.fit(decode(found[0].encode())), outcome
            )
            driver.until(lambda: outcome.known)
            if outcome.calls[0] is not None:
                raise outcome.calls[0]
            self.acknowledged[target, LINEAR] = history

        self.attempt(step)

    def delete(self, name: str) -> None:
        """Delete a session; until it is acknowledged, it may exist or not."""

        def step(driver: Driver) -> None:
            self.deleting.add(name)
            outcome = Outcome()
            driver.pool.turns.delete(name, False, outcome)
            driver.until(lambda: outcome.known)
            if outcome.calls[0] is not None:
                raise outcome.calls[0]
            for key in [key for key in self.acknowledged if key[0] == name]:
                del self.acknowledged[key]
            self.deleting.discard(name)
            self.unknown.pop((name, LINEAR), None)

        self.attempt(step)

    def restart(self) -> None:
        """Close the pool, as a service that stops in order does. The next step opens it."""

        def step(driver: Driver) -> None:
            self.driver = None
            driver.settle()
            driver.pool.close()

        self.attempt(step)

    def run(self) -> None:
        for i in range(3):
            self.turn(f"s{i}", [i, 1, 2, 3])
        self.turn("s0", [7, 8])
        self.turn("s1", [9], parent=0)
        self.copy("s0", "copy")
        self.attempt(lambda driver: driver.settle())
        self.delete("s2")
        self.restart()
        self.turn("s0", list(range(40)))
        self.turn("s3", [4])

    def check(self) -> None:
        """Nothing fails now: everything acknowledged is there, nothing leaks, and each session continues."""
        if self.driver is None:
            self.driver = Driver(FakeArena(num_slots=12), self.config)
        for again in range(2):
            driver = self.driver
            driver.settle()
            self.faults += integrity_faults(driver.pool)
            for (name, dialogue), history in self.acknowledged.items():
                self._compare(driver, name, dialogue, history)
            if not again:
                driver.pool.close()
                self.driver = Driver(FakeArena(num_slots=12), self.config)
        self.driver.turn("last", [1])
        self.driver.settle()
        self.driver.pool.close()

    def _compare(self, driver: Driver, name: str, dialogue: int, history: list[int]) -> None:
        allowed = [history, *self.unknown.get((name, dialogue), [])]
        try:
            state = driver.state(name, None if dialogue == LINEAR else dialogue)
        except SessionNotFound:
            if name not in self.deleting:
                self.faults.append(f"{name}:{dialogue} was acknowledged and is lost")
            return
        except PoolError as error:
            self.faults.append(f"{name}:{dialogue} cannot be read: {error}")
            return
        if not history and name in self.deleting:
            return
        matching = [known for known in allowed if len(known) >= len(history)]
        if name not in self.deleting and not any(np.array_equal(expected_state(known), state) for known in matching):
            self.faults.append(f"{name}:{dialogue} has another state")


def main(folder: Path, durability: str, first: int, step: int, maximum: int, count: int, synchronous: str) -> None:
    calls = FailingCalls()
    number, tried = first, 0
    while tried < maximum:
        home = folder / f"{durability}-{number}"
        home.mkdir()
        open_before = len(os.listdir("/proc/self/fd"))
        sizes = {"l1_sessions": 2, "l2_sessions": 2, "checkpoint_tokens": 30}
        script = Script(config_in(home, durability=durability, synchronous=synchronous, **sizes), calls)
        calls.arm(number, count)
        script.run()
        failed = calls.disarm()
        try:
            script.check()
        except Exception as error:
            script.faults.append(f"after the failure: {type(error).__name__}: {error}")
        if len(os.listdir("/proc/self/fd")) > open_before:
            script.faults.append(f"{len(os.listdir('/proc/self/fd')) - open_before} descriptors leak")
        for fault in script.faults:
            print(json.dumps({"number": number, "call": calls.last, "fault": fault}), flush=True)
        shutil.rmtree(home)
        if not failed:
            break
        number, tried = number + step, tried + 1
    print(json.dumps({"tried": tried, "last": number, "exhausted": tried < maximum}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *(int(one) for one in sys.argv[3:7]), sys.argv[7])
