"""A fake arena in host memory, for tests of the state pool. Also a driver that plays the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.tools.pool_driver import PoolDriver
from state_pool.config import PoolConfig
from state_pool.disk.store import Store
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT
from state_pool.session_file import SessionFile
from state_pool.session_key import SessionKey
from state_pool.sessions import Lease, Session
from test.pool_integrity import integrity_faults

STATE_WORDS = 32


@dataclass
class FakeHost:
    data: dict[str, bytes]

    def parts(self) -> dict[str, memoryview]:
        return {name: memoryview(data) for name, data in self.data.items()}


@dataclass
class FakeCopy:
    """A copy that ends after a number of polls. It reads or writes at the last allowed moment."""

    host: FakeHost
    polls_left: int = 0
    finish: Callable[[], None] | None = None

    def is_done(self) -> bool:
        """Count a poll; finish the copy at the last one."""
        self.polls_left -= 1
        if self.polls_left < 0:
            self.wait()
        return self.polls_left < 0

    def wait(self) -> None:
        if self.finish is not None:
            self.finish()
            self.finish = None


@dataclass
class FakeArena:
    """Slots of a toy model. Its state is a function of all tokens in order."""

    num_slots: int = 16
    words: int = STATE_WORDS
    fingerprint: str = "model-a"
    vocab: int = 1 << 16
    delay: int = 0
    """Polls until a copy is done."""
    saves: int = 0
    loads: int = 0
    layout: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    memory: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Fill all slots but the zero state with a pattern. It must never be read."""
        self.layout = self.layout or {"a.wkv": ("int32", (self.words - 4,)), "a.shift": ("int32", (4,))}
        self.memory = np.full((self.num_slots, self.words), 0xDEADBEEF, dtype=np.uint32)
        self.memory[ZERO_SLOT] = 0

    @property
    def state_bytes(self) -> int:
        return self.words * 4

    def save(self, slot: int) -> FakeCopy:
        """Copy a slot out. Reads it only at the end, so that a forbidden write shows."""
        self.saves += 1
        host = FakeHost({})

        def finish() -> None:
            row = self.memory[slot].copy()
            host.data = {"a.wkv": row[:-4].tobytes(), "a.shift": row[-4:].tobytes()}

        return FakeCopy(host, self.delay, finish)

    def load(self, slot: int, host: FakeHost) -> FakeCopy:
        """Copy a state in at once. The device orders later reads after the copy."""
        self.loads += 1
        self.memory[slot] = np.frombuffer(host.data["a.wkv"] + host.data["a.shift"], dtype=np.uint32)
        return FakeCopy(host, self.delay)

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> FakeHost:
        for name, (_, shape) in self.layout.items():
            if len(parts.get(name, b"")) != 4 * int(np.prod(shape)):
                raise ValueError(f"part {name} has {len(parts.get(name, b''))} bytes")
        return FakeHost({name: bytes(data) for name, data in parts.items()})

    def run(self, read: int, write: int, tokens: Sequence[int]) -> None:
        """Run one row: state(read) and tokens -> state(write)."""
        assert write not in (ZERO_SLOT, DUMMY_SLOT)
        self.memory[write] = fold(self.memory[read], tokens)


def fold(state: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """The toy model: every word depends on every token and on their order."""
    state = state.astype(np.uint32).copy()
    step = np.arange(1, len(state) + 1, dtype=np.uint32)
    with np.errstate(over="ignore"):
        for token in tokens:
            state = (state * np.uint32(1664525) + np.uint32(token + 1) * step + np.uint32(1013904223)).astype(np.uint32)
    return state


def expected_state(tokens: Sequence[int], words: int = STATE_WORDS) -> np.ndarray:
    """Return the state after a whole history."""
    return fold(np.zeros(words, dtype=np.uint32), tokens)


class Outcome:
    """Records the calls of `on_durable` and `on_deleted`. A number counts as None."""

    def __init__(self) -> None:
        self.calls: list[Exception | None] = []

    def __call__(self, result: Exception | int | None) -> None:
        self.calls.append(result if isinstance(result, Exception) else None)

    @property
    def known(self) -> bool:
        return bool(self.calls)

    @property
    def ok(self) -> bool:
        """Whether it was called once, with None."""
        return self.calls == [None]


class Driver(PoolDriver):
    """Plays the engine over a pool and a fake arena. Runs one or several turns."""

    def __init__(self, arena: FakeArena, config: PoolConfig) -> None:
        super().__init__(arena, config)
        self.arena = arena

    def compute(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Prefill the replay and the turn's tokens. Returns the slot with the state after them."""
        slot = self.slot()
        self.arena.run(lease.read_slot, slot, [*lease.replay, *tokens])
        return slot

    def finish_turn(self, lease: Lease, tokens: list[int], slot: int | None = None) -> Outcome:
        """Record and check in a turn, without waiting for its acknowledgement. `slot`: None: it is computed first."""
        slot, outcome = self.compute(lease, tokens) if slot is None else slot, Outcome()
        self.pool.turns.record(lease, tokens, outcome)
        self.pool.turns.checkin(lease, slot)
        return outcome

    def turn(self, session_id: str, tokens: list[int], branch_from: int | None = None) -> Lease:
        """Run a whole turn until it is acknowledged. Raises its error."""
        lease = self.ready(self.pool.turns.checkout(session_id, branch_from))
        outcome = self.finish_turn(lease, tokens)
        self.until(lambda: outcome.known)
        if outcome.calls[0] is not None:
            raise outcome.calls[0]
        assert outcome.ok
        return lease

    def state(self, session_id: str, branch_from: int | None = None) -> np.ndarray:
        """Return the state that the next turn would read, replay included. Does not change the session."""
        lease = self.ready(self.pool.turns.checkout(session_id, branch_from))
        state = fold(self.arena.memory[lease.read_slot], lease.replay)
        self.pool.turns.release(lease)
        return state

    def export(self, session_id: str, dialogue: int | None = None) -> SessionFile:
        found: list[SessionFile | Exception] = []
        self.pool.import_export.export(session_id, found.append, dialogue)
        self.until(lambda: bool(found))
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def import_session(self, session_id: str, file: SessionFile) -> None:
        outcome = Outcome()
        self.pool.import_export.import_session(session_id, self.pool.import_export.fit(file), outcome)
        self.until(lambda: outcome.known)
        if outcome.calls[0] is not None:
            raise outcome.calls[0]

    def delete(self, session_id: str, prefix: bool = False) -> int:
        outcome = Outcome()
        count = self.pool.turns.delete(session_id, prefix, outcome)
        self.until(lambda: outcome.known)
        assert outcome.ok
        return count


def config_in(folder: Path, **changes: object) -> PoolConfig:
    """Configure a small pool over a database in a folder."""
    settings: dict[str, object] = {"state_db": str(folder / "sessions.db"), "l1_sessions": 4, "l2_sessions": 8}
    return PoolConfig(**(settings | changes))  # type: ignore[arg-type]


def opened(folder: Path, delay: int = 0, **changes: object) -> Driver:
    """Open a pool of `config_in`. delay: of the arena"""
    return Driver(FakeArena(delay=delay), config_in(folder, **changes))


def names(driver: Driver) -> set[str]:
    """Ids of the listed sessions."""
    return {entry.session_id for entry in driver.list_sessions().sessions}


def get_store(driver: Driver) -> Store:
    """The pool's third tier."""
    assert driver.pool._store is not None
    return driver.pool._store


def get_session(driver: Driver, name: str, dialogue: int = -1) -> Session:
    found = driver.pool._index.get(SessionKey(name, dialogue))
    assert found is not None
    return found


@contextmanager
def idle_writer(driver: Driver) -> Iterator[None]:
    """Keep the writer thread idle. Its connection is then free for the test."""
    changed = get_store(driver).writer._changed
    while True:
        with changed:
            if changed._waiters:  # type: ignore[attr-defined]
                yield
                return
        time.sleep(driver.poll_interval_s)


def end(*drivers: Driver) -> None:
    """Settle the pools that are open, check their bookkeeping and close them."""
    for driver in drivers:
        if driver.pool._store is not None and driver.pool._store.writer._stopping:
            continue
        driver.settle()
        assert integrity_faults(driver.pool) == []
        driver.pool.close()
