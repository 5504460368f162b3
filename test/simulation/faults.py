"""What a world is like and what goes wrong in it, all drawn from its seed."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from test.simulation.tasks import Tasks

DISK_TROUBLES = ("database or disk is full", "disk I/O error", "database is locked")
KINDS = ("disk", "read", "step", "memory", "crash", "thread", "import")
"""Names of the faults, for switching some off while one is looked for."""


@dataclass
class Settings:
    """Sizes and habits of one world."""

    durability: str
    overlap: bool
    splits: bool
    groups: int
    """micro-batches"""
    max_running: int
    session_slots: int
    """slots for each row beside its own"""
    l1_sessions: int
    l2_sessions: int
    prefix_cache_slots: int
    prefix_cache_l2: int
    transfer_states: int
    prefill_tokens: int
    prefill_chunk: int
    max_waiting_rows: int
    checkpoint_tokens: int
    checkpoint_idle_s: float
    retain_tokens: int
    delays: list[int]
    """looks until a copy is done"""
    paces: list[int]
    """how often other threads may go on between two steps"""
    num_sessions: int
    disk: float
    """chance of trouble with the disk, per step; likewise below"""
    read: float
    step: float
    memory: float
    crash: float
    thread: float
    """of an error in one of the pool's threads that is not SQLite's"""
    bad_import: float

    @staticmethod
    def draw(draw: random.Random, without: frozenset[str] = frozenset()) -> Settings:
        """The settings of a seed."""
        often = draw.random() < 0.5  # half of the worlds have no faults at all: they must answer everything
        durability = draw.choice(["log", "log", "log", "turn", "lazy"])

        def chance(kind: str, most: float) -> float:
            drawn = draw.random() * most
            may_lose = durability == "lazy" and kind in ("disk", "read", "thread")  # as its documents say
            return drawn if often and kind not in without and not may_lose else 0.0

        return Settings(
            durability=durability,
            overlap=draw.random() < 0.6,
            splits=draw.random() < 0.4,
            groups=draw.choice([1, 1, 1, 2, 3]),
            max_running=draw.choice([1, 2, 3, 5, 8]),
            session_slots=draw.choice([0, 0, 1, 2]),
            l1_sessions=draw.choice([0, 1, 1, 2, 4]),
            l2_sessions=draw.choice([0, 1, 2, 4]),
            prefix_cache_slots=draw.choice([0, 1, 1, 2, 3]),
            prefix_cache_l2=draw.choice([0, 1, 1, 2, 4]),
            transfer_states=draw.choice([1, 2, 4]),
            prefill_tokens=draw.choice([8, 40, 100]),
            prefill_chunk=draw.choice([4, 16, 64]),
            max_waiting_rows=draw.choice([8, 30, 100]),
            checkpoint_tokens=draw.choice([10, 60, 400]),
            checkpoint_idle_s=draw.choice([0.1, 1.0, 10.0]),
            retain_tokens=draw.choice([0, 0, 20, -1]),
            delays=draw.choice([[0], [0, 1, 3], [2, 8]]),
            paces=draw.choice([[20], [0, 1, 3, 10], [0, 0, 0, 2, 30]]),
            num_sessions=draw.choice([2, 5, 12]),
            disk=chance("disk", 0.02),
            read=chance("read", 0.05),
            step=chance("step", 0.01),
            memory=chance("memory", 0.01),
            crash=chance("crash", 0.02),
            thread=chance("thread", 0.005),
            bad_import=chance("import", 0.02),
        )


@dataclass
class Faults:
    """Faults under way, and when each kind was met last."""

    settings: Settings
    tasks: Tasks
    draw: random.Random
    last: dict[str, float] = field(default_factory=dict)
    """kind -> time of the world"""
    _disk_until: float = -1.0
    _trouble: str = ""
    quiet: bool = False
    """nothing more goes wrong"""

    def step(self) -> None:
        """Once a step: perhaps the disk begins to fail for a while."""
        if not self.quiet and self.draw.random() < self.settings.disk:
            self._disk_until = self.tasks.now + self.draw.choice([0.01, 0.2, 3.0])
            self._trouble = self.draw.choice(DISK_TROUBLES)

    def met(self, kind: str) -> None:
        """A fault was let loose."""
        self.last[kind] = self.tasks.now

    def since(self, time: float, *kinds: str) -> bool:
        """Whether one of these kinds was met at `time` or later."""
        return any(self.last.get(kind, -1.0) >= time for kind in kinds)

    def before_launch(self, _rows: Any) -> None:
        """The device may fail."""
        if self.quiet:
            return
        if self.draw.random() < self.settings.step:
            self.met("step")
            raise RuntimeError("a kernel failed")
        if self.draw.random() < self.settings.memory:
            self.met("memory")
            raise MemoryError("no memory for this step")

    def before_read(self, _step: Any) -> None:
        """The same while the tokens are fetched."""
        if not self.quiet and self.draw.random() < self.settings.step:
            self.met("step")
            raise RuntimeError("a kernel has failed")

    def before_statement(self, sql: str) -> None:
        """The disk may fail under a statement, and a thread with it."""
        if self.quiet or sql.startswith("ROLLBACK"):
            return
        verb = sql.lstrip().partition(" ")[0]
        if verb in ("INSERT", "UPDATE", "DELETE", "COMMIT") and self.tasks.now < self._disk_until:
            self.met("disk")
            raise sqlite3.OperationalError(self._trouble)
        if verb == "SELECT" and self.draw.random() < self.settings.read / 4:
            self.met("read")
            raise sqlite3.OperationalError("disk I/O error")
        if self.draw.random() < self.settings.thread / 10:
            self.met("thread")
            raise RuntimeError("out of memory in a thread")


def connection_class(tasks: Tasks, faults: Faults, product: type[sqlite3.Connection]) -> type[sqlite3.Connection]:
    """Connections of the product's class whose statements stop for other threads, and fail when the world says so."""

    class Connection(product):  # type: ignore[misc, valid-type]
        is_open = False
        """whether the service has begun: opening the database is not what is tried here"""

        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            tasks.pause()
            if self.is_open:
                faults.before_statement(sql)
            cursor: sqlite3.Cursor = super().execute(sql, parameters)
            return cursor

    return Connection
