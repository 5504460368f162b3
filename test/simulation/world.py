"""One world: the engine and its pool over a fake device, clients, faults, restarts; everything from one seed."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import state_pool.crash_points
import state_pool.disk.process_lock
import state_pool.layout
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.shares import Limits
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest
from state_pool.config import PoolConfig
from state_pool.errors import PoolLost
from state_pool.layout import FIRST_FREE_SLOT
from state_pool.origins import is_mixture
from state_pool.pool import StatePool
from state_pool.session_key import SessionKey
from state_pool.sessions import LeaseState
from state_pool.turns.import_export import FittedFile
from test.simulation.clients import Clients
from test.simulation.device import TOKENIZER, Device, Runner, fold, read_slots
from test.simulation.faults import Faults, Settings, connection_class
from test.simulation.history import PLAIN, Beginning, History
from test.simulation.invariants import check_rest, check_step
from test.simulation.ledger import Gone, Ledger
from test.simulation.own_weights import OwnWeights
from test.simulation.tasks import PatchedModule, Primitives, Tasks
from test.simulation.violation import Violation, demand

STEPS = 140
DRAIN_STEPS = 4000
CHUNK_BYTES = 8
"""Bytes per written piece of a state, so that a state has several."""
SCORING_WORLDS = 5
"""In one of this many worlds, prompts are scored, have candidates, or are only read."""
OWN_WORLDS = 6
"""In one of this many worlds, there are tuned states, mixtures and adapters."""
PIECES_WORLDS = 7
"""In one of this many worlds, clients act between the pieces of steps."""


class CheckedStateManager(StateManager):
    """The engine's state manager, checked against the ledger."""

    def __init__(self, world: World, pool: StatePool, overlap: bool) -> None:
        super().__init__(pool, TOKENIZER, overlap)
        self._world = world

    def prepare(self, sequence: Sequence) -> None:
        """A row starts from its whole history, or a true prefix of its prompt."""
        super().prepare(sequence)
        lease, device, began = sequence.lease, self._world.device, self._world.beginning(sequence.request)
        if lease is not None:
            history = self._world.ledger.history(lease.source)
            demand(lease.exists == bool(history), f"{lease.session.key}: {lease.num_tokens} tokens, not {len(history)}")
            self._world.before[sequence] = history = history or History(began=began)
            began = history.began
            if not sequence.members:
                state = fold(device.memory[lease.read_slot], lease.replay, began.mark)
                demand(state == history.stored, f"{lease.session.key} does not hold its history")
        demand(device.mark_of(sequence) == began.mark, "a row has another adapter than it should")
        begun = History(sequence.token_ids[: sequence.num_computed_tokens], began)
        if lease is not None and lease.exists:
            read_again = sequence.turn_start - sequence.num_computed_tokens
            demand(sequence.replayed_tokens == read_again, f"{read_again} tokens of {lease.session.key} are read again")
        if lease is None or sequence.members:
            found = tuple(device.memory[slot] for slot in read_slots(sequence))
            demand(found == begun.states, f"a row begins from something else after {len(begun)} tokens")

    def record_turn(self, sequence: Sequence, acknowledge: Any) -> None:
        """The recorded tokens are the predicted answer."""
        world, ledger = self._world, self._world.ledger
        world.recording = sequence

        def reported(error: Any) -> None:
            ledger.reported(ledger.turns[sequence], error)
            acknowledge(error)

        super().record_turn(sequence, reported)

    def check_in(self, sequence: Sequence) -> None:
        """The parked state is the one after the turn."""
        turn = self._world.ledger.turns[sequence]
        expected = (turn.before + turn.tokens).stored
        if not sequence.members:  # of a mixture only the tokens are kept
            demand(self._world.device.memory[sequence.slot] == expected, f"{turn.session.key} parks a wrong state")
        super().check_in(sequence)


class CheckedPool(StatePool):
    """Reports the engine's calls to the ledger."""

    world: World

    def watch(self, world: World) -> None:
        """Report the calls from here on to the world's ledger."""
        self.world = world
        turns: Any = self.turns
        turns.record = partial(self._record, turns.record)
        turns.delete_counted = partial(self._delete_counted, turns.delete_counted)
        import_export: Any = self.import_export
        import_export.import_session = partial(self._import_session, import_export.import_session)

    def _record(self, record: Any, lease: Any, tokens: list[int], on_durable: Any) -> None:
        sequence = self.world.recording
        assert sequence is not None
        self.world.ledger.begin(sequence, tokens, self.world.beginning(sequence.request))
        record(lease, tokens, on_durable)

    def _import_session(self, import_session: Any, session_id: str, file: FittedFile, on_durable: Any) -> None:
        ledger, key = self.world.ledger, SessionKey(session_id)
        parts = {} if file.host is None else file.host.parts()
        state = int.from_bytes(b"".join(parts[name] for name in ("a.wkv", "a.shift") if name in parts), "little")
        carried = ledger.carried(state, file.replay)
        ledger.arrived.add(session_id)

        def durable(error: Exception | None) -> None:
            if error is None:
                session = self._index.get(key)
                assert session is not None
                ledger.keep(session, ledger.imported(carried, file.num_tokens))
            on_durable(error)

        import_session(session_id, file, durable)
        for history in carried[:1]:  # until it is reported, a crash may leave all of it, or only its stored state
            ledger.unsure.setdefault(key, []).extend([history, history[: len(history) - len(file.replay)]])

    def _delete_counted(self, delete_counted: Any, session_id: str, delete_prefix: bool, on_deleted: Any) -> None:
        gone = self.world.deleted(session_id, delete_prefix, list(self._index.matching(session_id, delete_prefix)))

        def durable(outcome: int | Exception) -> None:
            if not isinstance(outcome, Exception):
                self.world.ledger.deleted(gone)
            on_deleted(outcome)

        delete_counted(session_id, delete_prefix, durable)


class CheckedEngine(Engine):
    """The real engine over a world's runner. Its thread is never started."""

    def load(self, world: World, runner: Runner) -> None:
        """Replaces loading a model."""
        self.model_runner = runner  # type: ignore[assignment]
        self.state_manager = CheckedStateManager(world, runner.pool, runner.overlaps)
        self.scheduler = Scheduler(runner.limits, self.state_manager, runner.has_pieces)
        self.jobs = JobTable(self.scheduler, self.state_manager, TOKENIZER, runner.vocab)


class World:
    """A world. `run` builds, runs and checks it."""

    def __init__(self, seed: int, folder: Path, tasks: Tasks, without: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.rng = random.Random(f"{seed} world")
        self.settings = Settings.random_settings(random.Random(f"{seed} settings"), without)
        self.tasks = tasks
        self.faults = Faults(self.settings, tasks, random.Random(f"{seed} faults"))
        self.ledger = Ledger(self.settings.durability == "lazy")
        self.before: dict[Sequence, History] = {}
        """initial histories of rows"""
        self.recording: Sequence | None = None
        self.connections: list[sqlite3.Connection] = []
        self.database = folder / "sessions.db"
        scoring = random.Random(f"{seed} scoring") if seed % SCORING_WORLDS == 1 else None
        self.clients = Clients(self, random.Random(f"{seed} clients"), scoring)
        self.own = OwnWeights(self, random.Random(f"{seed} own")) if seed % OWN_WORLDS == 0 else None
        self.counts: dict[str, int] = {"steps": 0, "crashes": 0, "restarts": 0}
        self.steps = 0
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
        pool_config = PoolConfig(
            l1_sessions=settings.l1_sessions + (own.more_sessions if own is not None else 0),
            l2_sessions=settings.l2_sessions,
            state_db=str(self.database),
            durability=settings.durability,
            checkpoint_tokens=settings.checkpoint_tokens,
            checkpoint_idle_s=settings.checkpoint_idle_s,
            prefix_cache_slots=settings.prefix_cache_slots,
            prefix_cache_l2=settings.prefix_cache_l2,
            retain_tokens=settings.retain_tokens,
            transfer_states=settings.transfer_states,
            state_slots=own.state_slots if own is not None else 0,
        )
        limits = Limits(
            max_running=settings.max_running,
            max_waiting_rows=settings.max_waiting_rows,
            prefill_tokens_per_step=settings.prefill_tokens,
            prefill_chunk=settings.prefill_chunk,
            max_prefill_tokens_with_decode=max(4, settings.prefill_tokens // 2),
            groups=settings.groups,
            max_batch_rows_with_interactive=int(self.seed % 4 == 3),
        )
        parked = pool_config.l1_sessions + settings.prefix_cache_slots + FIRST_FREE_SLOT
        slots = settings.max_running + max(4, settings.max_running // 8) + parked
        slots += settings.session_slots * settings.max_running + pool_config.state_slots
        self.device = Device(slots, settings.delays, random.Random(f"{self.seed} copies {self.tasks.now}"))
        self.pool = CheckedPool(self.device, pool_config)
        self.pool.watch(self)
        runner = Runner(
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

    def crash(self) -> None:
        """kill -9 at any point of the threads, then a new process."""
        self.counts["crashes"] += 1
        self.faults.met("crash")
        self.tasks.kill()
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        self.clients.lost()
        self.open()
        quiet, self.faults.quiet = self.faults.quiet, True
        self.ledger.recover(self._existing(), self._state)
        self.faults.quiet = quiet

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
        self.tasks.kill()
        self.connections.clear()
        self.open()
        self.ledger.reopen(self._existing())
        self.faults.quiet = False

    def _existing(self) -> list[Any]:
        return [session for session in self.pool._index if session.exists]

    # Steps ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step of the engine and a random part of the other threads."""
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
        self.tasks.run(self.rng.choice(self.settings.paces))
        demand(not self.tasks.died, f"a thread died: {self.tasks.died}")
        check_step(self.engine)
        self.clients.check_step()
        return worked

    def run(self, steps: int) -> None:
        """Run `steps` steps of traffic, then check that everything is answered, stored and found again."""
        self.open()
        for _ in range(steps):
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
        """Check that every session exists and holds its history."""
        for key, history in list(self.ledger.by_key.items()):
            demand(self._state(key) == history.stored, f"{key} does not hold its history at the end")

    def _state(self, key: SessionKey) -> int:
        """Return the state that a next turn would start from, with its replay applied. The session does not change."""
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

    def deleted(self, session_id: str, prefix: bool, doomed: list[Any]) -> Gone:
        """Record a finished delete of every session that its name means."""
        gone = self.ledger.delete(doomed)
        left = [key for key in self.ledger.by_key if key.session_id == session_id]
        left += [key for key in self.ledger.by_key if prefix and key.display_name.startswith(session_id)]
        demand(not left, f"a delete of {session_id!r} leaves {left}")
        return gone


PRODUCT = ("rwkv_batch.engine", "rwkv_batch.core", "state_pool")


@contextlib.contextmanager
def cooperative(world_of: Any, tasks: Tasks) -> Iterator[None]:
    """Replace the product's threads by tasks, and its clock and disk by the world's."""
    parts = Primitives(tasks)
    patches = {
        id(threading): PatchedModule(threading, **parts.threading),
        id(time): PatchedModule(time, **parts.time),
        id(sqlite3): PatchedModule(sqlite3, connect=lambda *a, **k: world_of().connect(*a, **k)),
        id(ThreadPoolExecutor): parts.executor,
        id(sys.modules["queue"]): PatchedModule(sys.modules["queue"], **parts.queue),
        id(SimpleQueue): parts.queue["SimpleQueue"],
        id(state_pool.crash_points.reach): lambda _point: tasks.pause(),
        id(state_pool.disk.process_lock.ProcessLock): _NoLock,
    }
    patches.pop(id(None), None)
    replaced: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(PRODUCT) or name == "state_pool.crash_points":
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in patches:
                replaced.append((module, attribute, value))
                setattr(module, attribute, patches[id(value)])
    replaced.append((state_pool.layout, "CHUNK_BYTES", state_pool.layout.CHUNK_BYTES))
    state_pool.layout.CHUNK_BYTES = CHUNK_BYTES
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


class _NoLock:
    """Replaces the lock between processes: a world has one process."""

    is_first = True
    is_on_path = True

    def __init__(self, path: str, service: str = "") -> None:
        pass

    def share(self) -> None: ...

    def release(self) -> None: ...


class WorldFailed(AssertionError):  # noqa: N818 - the failed thing is a world
    """A world that failed, with its last events."""


def run(seed: int, steps: int = STEPS, without: frozenset[str] = frozenset()) -> dict[str, int]:
    """Run one world from beginning to end and return its counts. Raises WorldFailed."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="world-", dir=memory if memory.is_dir() else None))
    tasks = Tasks(random.Random(f"{seed} order"))
    worlds: list[World] = []
    try:
        with cooperative(lambda: worlds[0], tasks):
            worlds.append(World(seed, folder, tasks, without))
            try:
                worlds[0].run(steps)
            except (Exception, Violation) as error:
                trace = "\n  ".join(worlds[0].clients.log)
                reported = f"{type(error).__name__}: {error}"
                at = worlds[0].counts["steps"]
                raise WorldFailed(f"seed {seed}, step {at}: {reported}\n{worlds[0].settings}\n  {trace}") from error
            finally:
                tasks.kill()
                for connection in worlds[0].connections:
                    connection.close()
        return {**worlds[0].counts, **worlds[0].clients.counts, "digest": worlds[0].clients.digest}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
