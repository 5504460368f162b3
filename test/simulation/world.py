"""One world: the engine and its pool over a fake device, clients, faults, restarts; everything from one seed."""

from __future__ import annotations

import math
import random
import sqlite3
from pathlib import Path
from typing import Any

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.request import GenerateRequest
from state_pool.errors import PoolLost
from state_pool.layout import FIRST_FREE_SLOT
from state_pool.origins import is_mixture
from state_pool.session_key import SessionKey
from state_pool.sessions import LeaseState, Session
from test.simulation.checked import CheckedEngine, CheckedPool
from test.simulation.clients import Clients
from test.simulation.device import Device, Runner, fold
from test.simulation.disk import Disk
from test.simulation.faults import Faults, Settings, connection_class
from test.simulation.history import PLAIN, Beginning, History
from test.simulation.invariants import HeadOfLine, check_rest, check_step
from test.simulation.ledger import Gone, Ledger
from test.simulation.own_weights import OwnWeights
from test.simulation.tasks import PowerLost, Tasks
from test.simulation.violation import Violation, demand

STEPS = 140
DRAIN_STEPS = 4000
SCORING_WORLDS = 5
"""In one of this many worlds, prompts are scored, have candidates, or are only read."""
OWN_WORLDS = 6
"""In one of this many worlds, there are tuned states, mixtures and adapters."""
PIECES_WORLDS = 7
"""In one of this many worlds, clients act between the pieces of steps."""
SPECULATING_WORLDS = 3
"""In one of this many worlds, steps verify drafts."""
CROWDED_WORLDS = 20
"""In one of this many worlds, many sessions talk while the store hangs."""


class World:
    """A world. `run` builds, runs and checks it."""

    def __init__(self, seed: int, folder: Path, tasks: Tasks, without: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.rng = random.Random(f"{seed} world")
        more = random.Random(f"{seed} more")
        self.settings = Settings.random_settings(random.Random(f"{seed} settings"), more, without)
        if seed % CROWDED_WORLDS == 5:
            self.settings.crowd()
        if seed % OWN_WORLDS == 0 and self.settings.durability == "lazy" and "disk" not in without:
            self.settings.disk = 0.03  # no state of a mixture is in memory when the disk refuses its turn
        self.tasks = tasks
        self.database = folder / "sessions.db"
        self.disk = Disk(self.database, more, may_lose_power=self.settings.power > 0)
        self.ledger = Ledger(self.settings.durability == "lazy", lambda: tasks.now)
        self.faults = Faults(
            self.settings, tasks, random.Random(f"{seed} faults"), more, self.disk, self.ledger.on_sync
        )
        self.head_of_line = HeadOfLine()
        self.before: dict[Sequence, History] = {}
        """initial histories of rows"""
        self.failed_reads: dict[str, tuple[float, float]] = {}
        """session id -> begin and end of its last read that failed"""
        self.recording: Sequence | None = None
        self.connections: list[sqlite3.Connection] = []
        scoring = random.Random(f"{seed} scoring") if seed % SCORING_WORLDS == 1 else None
        self.clients = Clients(self, random.Random(f"{seed} clients"), scoring)
        self.own = OwnWeights(self, random.Random(f"{seed} own")) if seed % OWN_WORLDS == 0 else None
        self.counts: dict[str, int] = {"steps": 0, "crashes": 0, "power losses": 0, "restarts": 0}
        self.steps = 0
        self.speculates = seed % SPECULATING_WORLDS == 1
        self.drafting = random.Random(f"{seed} drafts")
        self.is_checking = False
        """whether sessions are read to be checked, so none expires"""
        self._drains = False

    # Start and stop ------------------------------------------------------------------------------------------

    def connect(
        self, *arguments: Any, factory: type[sqlite3.Connection] = sqlite3.Connection, **options: Any
    ) -> sqlite3.Connection:
        """Replaces `sqlite3.connect`."""
        watched = connection_class(self.tasks, self.faults, factory)
        connection = sqlite3.connect(*arguments, factory=watched, **options)
        self.connections.append(connection)
        return connection

    def open(self) -> None:
        """Start a new process on the same database."""
        settings, own = self.settings, self.own
        pool_config = settings.pool_config(
            l1_sessions=settings.l1_sessions + (own.more_sessions if own is not None else 0),
            state_db=str(self.database),
            state_slots=own.state_slots if own is not None else 0,
        )
        limits = settings.limits(max_batch_rows_with_interactive=int(self.seed % 4 == 3))
        parked = pool_config.l1_sessions + settings.prefix_cache_slots + FIRST_FREE_SLOT
        slots = settings.max_running + max(4, settings.max_running // 8) + parked
        slots += settings.session_slots * settings.max_running + pool_config.state_slots
        self.num_draft_slots = settings.max_running * self.speculates  # too few for long drafts of every row
        slots += self.num_draft_slots
        self.device = Device(slots, settings.delays, random.Random(f"{self.seed} copies {self.tasks.now}"))
        self.pool = CheckedPool(self.device, pool_config)
        self.pool.watch(self)
        runner = self.runner = Runner(
            limits,
            self.device,
            self.pool,
            settings.overlap,
            settings.splits,
            self.faults.before_launch,
            self.faults.before_read,
            self._act_within if self.seed % PIECES_WORLDS == 3 else None,
        )
        self.engine = CheckedEngine(EngineConfig(model_path="", pool=pool_config))
        self.engine.load(self, runner)
        if own is not None:
            own.open()
        for connection in self.connections:
            connection.is_open = True  # type: ignore[attr-defined]
        self.disk.sync()

    def crash(self) -> None:
        """Kill the process or lose the power, then start a new process.

        The `kill -9` is at any point of the threads.
        """
        has_lost_power = self.tasks.has_stopped
        self.counts["power losses" if has_lost_power else "crashes"] += 1
        self.faults.met("crash")
        self.tasks.kill()
        self.disk.stop()
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        self.disk.restore(has_lost_power)
        self.clients.lost()
        self.open()
        forgets = has_lost_power and self.settings.synchronous == "NORMAL"
        quiet, self.faults.quiet, self.is_checking = self.faults.quiet, True, True
        self.ledger.recover(self._existing(), self._state, forgets)
        self.faults.quiet, self.is_checking = quiet, False

    def restart(self, drained: bool = True) -> None:
        """A normal end, idle or busy, then a new process."""
        self.counts["restarts"] += 1
        self.faults.met("restart")
        self.faults.quiet = True
        if drained:
            self.drain()
        self.engine._draining = self.engine._stopping = True
        self.engine._serve()  # only the end of the file
        demand(self.engine._fatal_error is None, f"the engine died at its end: {self.engine._fatal_error}")
        demand(not self.clients.open_jobs, f"without an end: {self.clients.describe()}")
        self.clients.open_calls.clear()
        if self.pool.failure is not None:  # a thread died after the last step, perhaps between a commit and its report
            self.crash()
        else:
            self.tasks.kill()
            self.connections.clear()
            self.open()
            self.ledger.reopen(self._existing())
        self.faults.quiet = False

    def _existing(self) -> list[Any]:
        return [session for session in self.pool._index if session.exists]

    # Steps ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one engine step and a random part of the other threads."""
        self.counts["steps"] += 1
        self.faults.step()
        self.tasks.now += self.rng.choice((0.001, 0.003, 0.02, 0.1))
        self.engine._inbox.run_all()
        try:
            worked = self.engine.step()
        except PoolLost:  # the process ends and is restarted
            demand(self.faults.since(0.0, "thread"), "a thread of the pool has died")
            self.crash()
            return True
        except PowerLost:
            self.crash()
            return True
        self.tasks.run(self.rng.choice(self.settings.paces))
        if self.tasks.has_stopped:
            self.crash()
            return True
        demand(not self.tasks.died, f"a thread died: {self.tasks.died}")
        check_step(self.engine)
        self.head_of_line.check(self.pool)
        self.clients.check_step()
        return worked

    def run(self, steps: int) -> None:
        """Run `steps` steps of traffic. Then check that everything is answered, stored and found again."""
        self.open()
        if self.settings.is_crowded:
            self.clients.fill()
        for _ in range(steps // 2 if self.settings.is_crowded else steps):
            self.clients.act()
            if self.own is not None:
                self.own.act()
            self.step()
            chance = self.rng.random()
            if chance < self.settings.crash:
                self.crash()
            elif chance > 0.993:
                self.restart(drained=self.rng.random() < 0.5)
        self.restart()
        self.faults.quiet = True
        self.check_sessions()
        self.restart()

    def drain(self) -> None:
        """Run until every job has ended."""
        self._drains = True
        for _ in range(DRAIN_STEPS):
            self.step()
            self.tasks.run(20)
            if not self.clients.open_jobs and not self.clients.open_calls and self._is_quiet():
                check_rest(self.engine, self.pool)
                self._drains = False
                return
        raise Violation(f"never ends: {self.clients.describe()}")

    def _act_within(self) -> None:
        """Act between two pieces of a step."""
        if not self._drains:
            self.clients.act()

    def _is_quiet(self) -> bool:
        undeleted: Any = self.pool.turns.session_deletes._undeleted
        return not self.pool.pending and not self.engine._in_flight and not undeleted

    def check_sessions(self) -> None:
        self.is_checking = True
        for key, history in list(self.ledger.by_key.items()):
            if key.dialogue > 0 and key.session_id in self.ledger.lost_names:
                continue
            demand(self._state(key) == history.stored, f"{key} does not hold its history at the end")
        self.is_checking = False

    def _state(self, key: SessionKey) -> int:
        """Return the state that a next turn would start from. Its replay is applied. The session does not change."""
        session = self.pool._index.get(key)
        mixture = session.origin if session is not None and is_mixture(session.origin) else None
        lease = self.pool.turns.checkout(key.session_id, None if key.dialogue < 0 else key.dialogue, mixture=mixture)
        for _ in range(DRAIN_STEPS):
            if lease.state is not LeaseState.WAITING:
                break
            self.tasks.now += 0.01
            self.pool.poll()
            self.tasks.run(20)
        demand(lease.state is LeaseState.READY, f"{key}: {lease.state} {lease.error}")
        mark = 0 if lease.adapter is None else self.device.marks[lease.adapter.slot_index]
        state = fold(self.device.memory[lease.read_slot], lease.replay, mark)
        self.pool.turns.release(lease)
        return state

    # Callbacks of the checked parts --------------------------------------------------------------------------

    def beginning(self, request: GenerateRequest) -> Beginning:
        """Return the initial state of a new row of this request."""
        return PLAIN if self.own is None else self.own.beginning(request)

    def expired(self, sessions: list[Session], ttl: float) -> None:
        """Check that no turn used these sessions for the TTL. It does not matter what the clock says."""
        for session in sessions:
            unused_s = self.tasks.now - self.ledger.used.get(session.key, -math.inf)
            demand(unused_s >= ttl - 0.001, f"{session.key} expires {unused_s} s after its last use, the TTL is {ttl}")
            self.clients.deleted(session.key.session_id)
        self.ledger.delete(sessions)

    def deleted(self, session_id: str, prefix: bool, doomed: list[Any]) -> Gone:
        """Record a finished delete of every session that its name means."""
        gone = self.ledger.delete(doomed)
        left = [key for key in self.ledger.by_key if key.session_id == session_id]
        left += [key for key in self.ledger.by_key if prefix and key.display_name.startswith(session_id)]
        demand(not left, f"a delete of {session_id!r} leaves {left}")
        return gone
