"""Engines over one database are killed and stopped, and their server; then every turn is accounted for:
`python -m bench.faults.shared_history --turns 10000 --sessions 500 --postgres`.

Engines are processes with a real state pool over an arena of plain numbers. Each turn's token is one that no other turn
has, and each engine notes when a turn began, was acknowledged, or failed. At the end the token log, kept whole, is the
history, and is checked: an acknowledged turn is there once, one that was refused for certain is not, turns of one
session that followed each other in time do so in the log, and the state is that of the log. Bound by the database and
by how often something is killed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from state_pool.errors import PoolError, SessionNotFound, StaleEpoch
from state_pool.sessions import Lease, LeaseState
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, fold, state_of
from test.postgres import Server

AT_ONCE = 16
STOPPED_S = 3.0
_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    """Run, check, print; exit 1 if anything was lost, doubled or out of order."""
    asked = options()
    server = Server() if asked.postgres else None
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        address = server.database() if server is not None else str(Path(folder) / "sessions.db")
        try:
            figures = run(Path(folder), address, server, asked)
        finally:
            if server is not None:
                server.close()
    print(json.dumps({"bench": "shared_history", **figures}))
    sys.exit(bool(figures["faults"]))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line, or a list of its arguments, says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1000, help="acknowledged turns after which it ends")
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--postgres", action="store_true", help="a server of its own in the file's place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the database and the notes are")
    return parser.parse_args(arguments)


def run(folder: Path, address: str, server: Server | None, asked: argparse.Namespace) -> dict[str, Any]:
    """Traffic and faults until enough turns are acknowledged, then the check; returns counts and faults found."""
    draw, started, killed = random.Random(asked.seed), 0, Counter[str]()
    engines: list[BaseProcess] = []
    notes = folder / "notes"
    notes.mkdir()
    next_fault, at_last_fault = time.monotonic() + asked.every, 0
    while (acknowledged := _acknowledged(notes)) < asked.turns:
        engines = [engine for engine in engines if engine.is_alive()]
        while len(engines) < asked.engines:
            started += 1
            given = (f"engine-{len(engines)}-{started}", folder, address, notes, asked.sessions, started)
            engines.append(_spawn.Process(target=_engine, args=given))
            engines[-1].start()
        if time.monotonic() > next_fault and acknowledged > at_last_fault:  # else a slow machine gets nowhere
            at_last_fault = acknowledged
            killed[_fault(draw, engines, server)] += 1
            next_fault = time.monotonic() + asked.every
        time.sleep(0.1)
    for engine in engines:
        engine.terminate()
    for engine in engines:
        engine.join()
    faults = check(folder, address, notes)
    return {"turns": _acknowledged(notes), "engines_started": started, "faults": faults, **killed}


def _fault(draw: random.Random, engines: list[BaseProcess], server: Server | None) -> str:
    kind = draw.choice(["killed", "stopped", "server_killed"] if server is not None else ["killed", "stopped"])
    victim = draw.choice(engines).pid
    if kind == "server_killed" and server is not None:
        server.kill()
        time.sleep(draw.random())
        server.start()
    elif victim is not None:
        os.kill(victim, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "stopped":
            time.sleep(STOPPED_S)
            os.kill(victim, signal.SIGCONT)
    return kind


def _acknowledged(notes: Path) -> int:
    return sum(file.read_text().count('"ack"') for file in notes.iterdir())


# In an engine's process ----------------------------------------------------------------------------------------------


def _engine(name: str, folder: Path, address: str, notes: Path, sessions: int, number: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whoever started this process may ignore it, which is inherited
    draw = random.Random(number)
    config = config_in(folder, state_db=address, engine=name, service="bench", retain_tokens=-1, l1_sessions=64)
    driver = Driver(FakeArena(num_slots=128, vocab=1 << 31), config)
    with (notes / name).open("a", buffering=1) as book:
        turns = _Turns(driver, book, number << 20)
        while True:
            turns.step(lambda: f"s{draw.randrange(sessions)}")


class _Turns:
    """Some turns at once; each is noted when it begins and when its fate is told."""

    def __init__(self, driver: Driver, book: Any, first: int) -> None:
        self._driver = driver
        self._book = book
        self._next = first
        self._waiting: list[tuple[Lease, int]] = []
        self._running: list[tuple[str, int, Outcome]] = []

    def step(self, choose: Any) -> None:
        """Begin turns, and go on with those that can."""
        while len(self._waiting) + len(self._running) < AT_ONCE:
            self._next += 1
            session = choose()
            self._note("begin", session, self._next)
            self._waiting.append((self._driver.pool.checkout(session), self._next))
        self._driver.pool.poll()
        time.sleep(0.0005)
        waiting, self._waiting = self._waiting, []
        for lease, turn in waiting:
            self._go_on(lease, turn)
        for session, turn, outcome in [one for one in self._running if one[2].known]:
            self._tell(session, turn, outcome.calls[0])
        self._running = [one for one in self._running if not one[2].known]

    def _go_on(self, lease: Lease, turn: int) -> None:
        session = lease.session.key.session_id
        if lease.poll() is LeaseState.WAITING:
            self._waiting.append((lease, turn))
        elif lease.poll() is LeaseState.FAILED:
            self._driver.pool.release(lease)
            self._note("refused", session, turn)
        else:
            slot, outcome = self._driver.compute(lease, [turn]), Outcome()
            self._driver.pool.record(lease, [turn], outcome)
            self._driver.pool.checkin(lease, slot)
            self._running.append((session, turn, outcome))

    def _tell(self, session: str, turn: int, error: Exception | None) -> None:
        certain = isinstance(error, StaleEpoch | SessionNotFound)
        self._note("ack" if error is None else "refused" if certain else "unsure", session, turn)

    def _note(self, what: str, session: str, turn: int) -> None:
        self._book.write(json.dumps([what, session, turn, time.monotonic()]) + "\n")


# The check -----------------------------------------------------------------------------------------------------------


def check(folder: Path, address: str, notes: Path) -> list[str]:
    """What is wrong with the history; empty: every turn is accounted for."""
    lines = [json.loads(line) for file in notes.iterdir() for line in file.read_text().splitlines() if line[-1:] == "]"]
    told = {turn: (what, at) for what, _, turn, at in lines if what != "begin"}
    begun = {turn: at for what, _, turn, at in lines if what == "begin"}
    of = {turn: session for what, session, turn, _ in lines if what == "begin"}
    driver = Driver(
        FakeArena(vocab=1 << 31),
        config_in(folder, state_db=address, engine="checker", service="bench", retain_tokens=-1),
    )
    faults: list[str] = []
    seen: Counter[int] = Counter()
    for session in sorted(set(of.values())):
        history, state = _history(driver, session)
        seen.update(history)
        if not np.array_equal(state, state_of(history)):
            faults.append(f"{session}: its state is not that of its log")
        latest = 0.0
        for turn in history:
            if told.get(turn, ("", 0.0))[0] == "ack" and told[turn][1] < latest:
                faults.append(f"{session}: turn {turn} was acknowledged before one began that stands before it")
            latest = max(latest, begun[turn])
        faults += [f"{session}: turn {turn} is another session's" for turn in history if of[turn] != session]
    driver.pool.close()
    for turn, (what, _) in told.items():
        if (what == "ack" and seen[turn] != 1) or (what == "refused" and seen[turn]):
            faults.append(f"{of[turn]}: turn {turn} ({what}) is there {seen[turn]} times")
    faults += [f"turn {turn} is there {count} times" for turn, count in seen.items() if count > 1]
    return faults


def _history(driver: Driver, session: str) -> tuple[list[int], np.ndarray]:
    """The token log of a session, and its state as the next turn would read it."""
    store = driver.pool._store
    assert store is not None
    try:
        lease = driver.ready(driver.pool.checkout(session))
    except PoolError as error:
        print(f"{session}: {error}", file=sys.stderr)
        return [], np.zeros(1)
    state = fold(driver.arena.memory[lease.read_slot], lease.replay)
    row = lease.session.row
    driver.pool.release(lease)
    driver.settle()
    with store.writer._changed:  # its thread waits meanwhile
        found = store.writer._connection.execute("SELECT tokens FROM turns WHERE session = ? ORDER BY turn", (row,))
        return [int.from_bytes(bytes(tokens)[:4], "little") for (tokens,) in found.fetchall()], state


if __name__ == "__main__":
    main()
