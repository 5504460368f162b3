"""A world's settings and faults, all from its seed."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.core.shares import Limits
from state_pool.config import PoolConfig
from test.simulation.disk import Disk
from test.simulation.tasks import Tasks

CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"
CROWD = 110
"""Sessions of a crowded world: more than the pool tries per step."""
DISK_TROUBLES = ("database or disk is full", "disk I/O error", "database is locked")
KINDS = ("disk", "read", "step", "memory", "crash", "thread", "import", "power", "clock", "hang")
"""Names of the faults, to disable some during an analysis."""


@dataclass
class Settings:
    """Sizes and probabilities of one world."""

    durability: str
    overlap: bool
    splits: bool
    groups: int
    """micro-batches"""
    max_running: int
    session_slots: int
    """further slots per row"""
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
    """polls until a copy is done"""
    paces: list[int]
    """how often other threads run between two steps"""
    num_sessions: int
    disk: float
    """probability of disk failures, per step; likewise below"""
    read: float
    step: float
    memory: float
    crash: float
    thread: float
    """probability of an error other than SQLite's in a thread of the pool"""
    bad_import: float
    synchronous: str
    power: float
    """probability of a power loss, per statement that syncs"""
    clock: float
    """probability that the clock of the day is set"""
    hang: float
    """probability that the store answers no reads for a while"""
    session_ttl: float | None
    is_crowded: bool
    """whether many sessions talk at once"""

    def limits(self, **others: int) -> Limits:
        return Limits(
            max_running=self.max_running,
            max_waiting_rows=self.max_waiting_rows,
            prefill_tokens_per_step=self.prefill_tokens,
            prefill_chunk=self.prefill_chunk,
            max_prefill_tokens_with_decode=max(4, self.prefill_tokens // 2),
            groups=self.groups,
            **others,
        )

    def pool_config(self, **others: Any) -> PoolConfig:
        """Return a pool's configuration. `others` take precedence."""
        names = "l1_sessions l2_sessions durability synchronous session_ttl checkpoint_tokens checkpoint_idle_s "
        names += "prefix_cache_slots prefix_cache_l2 retain_tokens transfer_states"
        return PoolConfig(**{name: getattr(self, name) for name in names.split()} | others)

    @staticmethod
    def random_settings(rng: random.Random, more: random.Random, without: frozenset[str] = frozenset()) -> Settings:
        often = rng.random() < 0.5  # half of the worlds have no faults: they must answer all requests
        durability = rng.choice(["log", "log", "log", "turn", "lazy"])

        def chance(kind: str, maximum: float) -> float:
            sampled = rng.random() * maximum
            may_lose = durability == "lazy" and kind in ("read", "thread")  # as its documents say
            return sampled if often and kind not in without and not may_lose else 0.0

        return Settings(
            durability=durability,
            overlap=rng.random() < 0.6,
            splits=rng.random() < 0.4,
            groups=rng.choice([1, 1, 1, 2, 3]),
            max_running=rng.choice([1, 2, 3, 5, 8]),
            session_slots=rng.choice([0, 0, 1, 2]),
            l1_sessions=rng.choice([0, 1, 1, 2, 4]),
            l2_sessions=rng.choice([0, 1, 2, 4]),
            prefix_cache_slots=rng.choice([0, 1, 1, 2, 3]),
            prefix_cache_l2=rng.choice([0, 1, 1, 2, 4]),
            transfer_states=rng.choice([1, 2, 4]),
            prefill_tokens=rng.choice([8, 40, 100]),
            prefill_chunk=rng.choice([4, 16, 64]),
            max_waiting_rows=rng.choice([8, 30, 100]),
            checkpoint_tokens=rng.choice([10, 60, 400]),
            checkpoint_idle_s=rng.choice([0.1, 1.0, 10.0]),
            retain_tokens=rng.choice([0, 0, 20, -1]),
            delays=rng.choice([[0], [0, 1, 3], [2, 8]]),
            paces=rng.choice([[20], [0, 1, 3, 10], [0, 0, 0, 2, 30]]),
            num_sessions=rng.choice([2, 5, 12]),
            disk=chance("disk", 0.02),
            read=chance("read", 0.05),
            step=chance("step", 0.01),
            memory=chance("memory", 0.01),
            crash=chance("crash", 0.02),
            thread=chance("thread", 0.005),
            bad_import=chance("import", 0.02),
            synchronous=more.choice(["FULL", "FULL", "NORMAL"]),
            power=more.choice([0.0, 0.05]) if "power" not in without else 0.0,
            clock=more.choice([0.0, 0.0, 0.05]) if "clock" not in without else 0.0,
            hang=more.choice([0.0, 0.0, 0.02]) if "hang" not in without else 0.0,
            session_ttl=more.choice([None, 0.0, 3600.0, 3.0]),
            is_crowded=False,
        )

    def crowd(self) -> None:
        """Let many sessions talk at once."""
        self.is_crowded, self.num_sessions, self.max_waiting_rows = True, CROWD, 10 * CROWD
        self.max_running, self.l1_sessions, self.l2_sessions, self.delays = 8, 4, 16, [2, 8]
        self.crash = self.power = self.thread = self.read = self.disk = self.hang = 0.0


@dataclass
class Faults:
    """Active faults, and the time of each kind's last occurrence."""

    settings: Settings
    tasks: Tasks
    rng: random.Random
    more: random.Random
    disk: Disk
    on_sync: Callable[[], None]
    """called when everything written so far is safe"""
    last: dict[str, float] = field(default_factory=dict)
    """kind -> virtual time"""
    _disk_until: float = -1.0
    _trouble: str = ""
    hangs_until: float = -1.0
    """virtual time until which the store answers no reads"""
    quiet: bool = False
    """no further faults"""

    def step(self) -> None:
        """Perhaps start a disk failure, set the clock or hang the store. Called once per step."""
        if not self.quiet:
            self.tasks.set_clock(self.more, self.settings.clock)
        if not self.quiet and self.more.random() < self.settings.hang:
            self.hang(self.more.choice([0.3, 3.0]))
        if not self.quiet and self.rng.random() < self.settings.disk:
            self._disk_until = self.tasks.now + self.rng.choice([0.01, 0.2, 3.0])
            self._trouble = self.rng.choice(DISK_TROUBLES)

    def hang(self, seconds: float) -> None:
        """Let the store answer no reads for a while."""
        self.met("hang")
        self.hangs_until = self.tasks.now + seconds

    def wait_for_store(self) -> None:
        if self.tasks.runs("state-pool-reader") and self.tasks.now < self.hangs_until:
            self.tasks.wait(lambda: self.quiet, self.hangs_until - self.tasks.now)

    def after_statement(self, sql: str, is_whole: bool) -> None:
        """A statement that may sync has run. Perhaps the power fails before the disk has all of it."""
        if not self.quiet and self.more.random() < self.settings.power:
            self.met("power")
            self.disk.during(sql)
            self.tasks.stop_machine()
        elif self.disk.after(sql, is_whole):
            self.on_sync()

    def met(self, kind: str) -> None:
        self.last[kind] = self.tasks.now

    def since(self, time: float, *kinds: str) -> bool:
        """Return whether one of these kinds occurred at `time` or later."""
        return any(self.last.get(kind, -1.0) >= time for kind in kinds)

    def before_launch(self, _rows: Any) -> None:
        """Perhaps raise a device error."""
        if self.quiet:
            return
        if self.rng.random() < self.settings.step:
            self.met("step")
            raise RuntimeError("a kernel failed")
        if self.rng.random() < self.settings.memory:
            self.met("memory")
            raise MemoryError("no memory for this step")

    def before_read(self, _step: Any) -> None:
        """Perhaps raise a device error while tokens are read."""
        if not self.quiet and self.rng.random() < self.settings.step:
            self.met("step")
            raise RuntimeError("a kernel has failed")

    def before_statement(self, sql: str) -> None:
        """Perhaps raise a disk error, or one in the thread."""
        if self.quiet or sql.startswith("ROLLBACK"):
            return
        verb = sql.lstrip().partition(" ")[0]
        if verb in ("INSERT", "UPDATE", "DELETE", "COMMIT") and self.tasks.now < self._disk_until:
            self.met("disk")
            raise sqlite3.OperationalError(self._trouble)
        if verb == "SELECT" and self.rng.random() < self.settings.read / 4:
            self.met("read")
            raise sqlite3.OperationalError("disk I/O error")
        if self.rng.random() < self.settings.thread / 10:
            self.met("thread")
            raise RuntimeError("out of memory in a thread")


class _Row:
    """A cursor over one row."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def fetchone(self) -> Any:
        return self._row


def connection_class(tasks: Tasks, faults: Faults, product: type[sqlite3.Connection]) -> type[sqlite3.Connection]:
    """Return a connection class whose statements yield to other threads. They may also fail."""

    class Connection(product):  # type: ignore[misc, valid-type]
        is_open = False
        """whether the service has started: opening the database does not fail"""

        def execute(self, sql: str, parameters: Any = (), /) -> Any:
            tasks.pause()
            if not self.is_open:
                return super().execute(sql, parameters)
            faults.wait_for_store()
            faults.before_statement(sql)
            cursor: Any = super().execute(sql, parameters)
            if sql in ("COMMIT", CHECKPOINT):
                row = cursor.fetchone()
                faults.disk.syncs_commits = super().execute("PRAGMA synchronous").fetchone()[0] >= 2
                faults.after_statement(sql, row is not None and not row[0] and row[1] == row[2])
                return _Row(row)
            return cursor

    return Connection
