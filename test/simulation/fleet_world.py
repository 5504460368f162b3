"""A world of two engines, two HTTP workers and their network. Everything is from one seed."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rwkv_batch.ipc.served_model import ModelStatus
from test.simulation.faults import Settings
from test.simulation.fleet_clients import KEYS, FleetClients
from test.simulation.invariants import check_rest
from test.simulation.network import Network
from test.simulation.processes import NUM_WORKERS, EngineProcess, SharedLock, Worker, shared_connection_class
from test.simulation.tasks import Tasks
from test.simulation.violation import Violation, demand

FLEET_STEPS = 160
DRAIN_STEPS = 3000
PROCESS_FAULTS = ("kill", "worker", "drain")
LINK_FAULTS = ("cut", "stall")


class FleetWorld:
    """Two engines behind two HTTP workers. `run` builds, runs and checks it."""

    def __init__(self, seed: int, folder: Path, tasks: Tasks, without: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.tasks = tasks
        self.rng = random.Random(f"{seed} world")
        more = random.Random(f"{seed} more")
        self.settings = Settings.random_settings(random.Random(f"{seed} settings"), more, without)
        self.settings.max_running = max(2, self.settings.max_running)
        self.settings.max_waiting_rows = more.choice((3, 30))
        self.network = Network(tasks, random.Random(f"{seed} network"))
        self.database = folder / "sessions.db"
        self.locks: list[SharedLock] = []
        self.connections: list[sqlite3.Connection] = []
        self.folder_of_states: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        """of all tuned states"""
        self.counts = {"steps": 0, "kills": 0, "cuts": 0, "drains": 0}
        self.clients = FleetClients(self, random.Random(f"{seed} clients"))
        self.engines: dict[int, EngineProcess] = {}
        self.num_starts = 0
        self.last_fault = -1e9
        self.is_calm = more.random() < 0.5
        """whether there are no faults, so that every request is answered and paid for exactly"""
        self.has_link_faults = not self.is_calm and more.random() < 0.5
        """whether links lose bytes: then nobody may have heard of a turn that a lost engine began"""
        if self.has_link_faults:
            self.network.buffer_bytes = more.choice((300, 5_000, 100_000))
        self._announced: dict[str, Any] = {}
        self._news: list[tuple[float, Worker, list[Any]]] = []
        """what the supervisor tells each worker, and when it arrives"""
        self._ended: deque[EngineProcess] = deque()
        self.workers = [Worker(self, number) for number in range(NUM_WORKERS)]

    @staticmethod
    def quota_clock() -> float:
        """Stands still, so that a minute's tokens are all there are."""
        return 0.0

    def connect(
        self, *arguments: Any, factory: type[sqlite3.Connection] = sqlite3.Connection, **options: Any
    ) -> sqlite3.Connection:
        """Replaces `sqlite3.connect`."""
        connection = sqlite3.connect(*arguments, factory=shared_connection_class(self.tasks, factory), **options)
        self.tasks.process.connections.append(connection)
        self.connections.append(connection)
        return connection

    @contextlib.contextmanager
    def acting_for(self, process: Any) -> Iterator[None]:
        """Threads that the block starts belong to the process."""
        self.tasks.process = process
        try:
            yield
        finally:
            self.tasks.process = None

    # The supervisor ------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        process = self.engines[number] = EngineProcess(self, number)
        self.clients.log_event(f"{process.name} starts")
        self.announce(process, ModelStatus.LOADING)
        with self.acting_for(process):
            self.tasks.start("engine-main", process.run)

    def announce(self, process: EngineProcess, status: ModelStatus) -> None:
        """Tell every worker about an engine. The news arrive in order."""
        self._announced[process.name] = process.info(status)
        for worker in self.workers:
            self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        earlier = [at for at, one, _ in self._news if one is worker]
        at = max([self.tasks.now + self.rng.choice((0.0, 0.01, 0.15)), *earlier])
        self._news.append((at, worker, list(self._announced.values())))

    def _deliver_news(self) -> None:
        due = [one for one in self._news if one[0] <= self.tasks.now]
        self._news = [one for one in self._news if one[0] > self.tasks.now]
        for _, worker, engines in due:
            with self.acting_for(worker):
                worker.fleet.update(engines)

    def ended(self, process: EngineProcess) -> None:
        self._ended.append(process)

    def kill(self, process: EngineProcess) -> None:
        """End an engine's process at any point of its threads."""
        self.clients.log_event(f"{process.name} ends")
        process.is_serving = False
        self.tasks.kill(process)
        self.network.kill(process)
        for connection in process.connections:
            connection.close()
            self.connections.remove(connection)
        self.locks[:] = [lock for lock in self.locks if lock.process is not process]

    def kill_worker(self, number: int) -> None:
        worker = self.workers[number]
        self.clients.log_event(f"{worker.name} is killed")
        self.tasks.kill(worker)
        self.network.kill(worker)
        self._news = [one for one in self._news if one[1] is not worker]
        self.clients.lost(worker)
        self.workers[number] = Worker(self, number)
        self._tell(self.workers[number])

    # Steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let time pass and threads run."""
        self.tasks.now += self.rng.choice((0.001, 0.003, 0.02, 0.1))
        self._deliver_news()
        self.tasks.run(self.rng.choice((10, 40, 200)))
        demand(not self.tasks.died, f"a thread died: {self.tasks.died}")
        while self._ended:
            process = self._ended.popleft()
            self.kill(process)
            self.start(process.number)
        for process in self.engines.values():
            self._check_engine(process)

    def _check_engine(self, process: EngineProcess) -> None:
        engine = process.engine
        if engine is None or not process.is_serving:
            return
        demand(engine._fatal_error is None, f"{process.name} died: {engine._fatal_error}")
        missing = [name for name in self.clients.states if name not in engine._user_files.states._infos]
        missing *= not engine._draining  # it admits no jobs, and lists are another engine's
        demand(not missing, f"{process.name} serves without {missing}, which were acknowledged")

    def _fault(self) -> None:
        rng, serving = self.rng, [one for one in self.engines.values() if one.is_serving and not one.is_draining]
        # The engine with the earliest Unix time of its start holds the ledger, so it moves if the clock is set back
        # before another starts. Then what is counted meanwhile is not exact.
        if not self.is_calm or len(serving) == len(self._announced) == 2:
            self.tasks.set_clock(rng, self.settings.clock)
        if self.is_calm or rng.random() > 0.06:
            return
        kind = rng.choice(PROCESS_FAULTS + (LINK_FAULTS if self.has_link_faults else ()))
        self.last_fault = self.tasks.now
        self.clients.log_event(f"fault: {kind}")
        if kind == "kill" and serving:
            self.counts["kills"] += 1
            process = rng.choice(serving)
            self.kill(process)
            self.start(process.number)
        elif kind == "worker":
            self.counts["kills"] += 1
            self.kill_worker(rng.randrange(NUM_WORKERS))
        elif kind == "drain" and len(serving) > 1:
            self.counts["drains"] += 1
            process = rng.choice(serving)
            process.is_draining = True
            self.announce(process, ModelStatus.UNLOADING)
            with self.acting_for(process):
                self.tasks.start("supervisor-pipe", process.drain)
        elif kind == "cut":
            self.counts["cuts"] += 1
            self.network.cut()
        elif kind == "stall":
            self.network.stall(rng.choice((0.3, 5.0)))

    def run(self, steps: int) -> None:
        """Run traffic. Then check that everything is answered, paid for and found again."""
        self.start(0)
        joins_at = self.rng.randrange(steps // 2)
        if self.rng.random() < 0.5:
            joins_at = -1
            self.start(1)
        self._until(lambda: all(worker.fleet.is_connected for worker in self.workers))
        for number in range(steps):
            if number == joins_at:
                self.start(1)
            self._fault()
            self.clients.act()
            self.step()
        self._until(self._is_connected)
        self._until(lambda: not self.clients.open and not self.clients.open_calls)
        for name, session in self.clients.sessions.items():
            if not session.is_unclear:
                self.clients.turn(name)
        self._until(lambda: not self.clients.open)
        self._settle()
        self._check_ledger()
        for process in self.engines.values():
            engine: Any = process.engine
            check_rest(engine, engine.model_runner.pool)

    @property
    def has_unknown_engine(self) -> bool:
        """Whether a worker knows one engine and not another that serves."""
        serving = [one.address for one in self.engines.values() if one.is_serving]
        return any(
            0 < sum(member.client.is_connected for member in worker.fleet.members) < len(serving)
            for worker in self.workers
        )

    def _is_connected(self) -> bool:
        engines = [one for one in self.engines.values() if one.is_serving and not one.is_draining]
        fleets = [worker.fleet for worker in self.workers]
        return (
            len(engines) == len(self.engines)
            and all(member.is_available for fleet in fleets for member in fleet.members)
            and all(len(fleet.members) == len(engines) for fleet in fleets)
        )

    def _until(self, holds: Any) -> None:
        for _ in range(DRAIN_STEPS):
            if holds():
                return
            self.step()
        raise Violation(f"never ends: {self.clients.describe()}")

    def _settle(self) -> None:
        """Let the engines rest and the workers report everything."""

        def is_quiet() -> bool:
            engines: list[Any] = [process.engine for process in self.engines.values()]
            return not any(one.model_runner.pool.pending or one._in_flight or one.scheduler.has_work for one in engines)

        self._until(lambda: not self.network.is_stalled)
        for _ in range(60):
            self.step()
        self._until(is_quiet)

    # The limits' ledger --------------------------------------------------------------------------------------

    def _check_ledger(self) -> None:
        """Check what the holder of the ledger has charged each key."""
        holders = {worker.fleet.quotas._find_holder().name for worker in self.workers}  # type: ignore[union-attr]
        demand(len(holders) == 1, f"several engines hold the ledger: {holders}")
        server = next(one.server for one in self.engines.values() if one.name in holders)
        assert server is not None
        limit = self.clients.limits.tokens_per_minute
        assert limit is not None
        quotas = server._ledger._quotas
        demand(not quotas.jobs(), f"jobs count although all have ended: {quotas.jobs()}")
        levels = {balance.client: balance.tokens for balance in quotas.balances()}
        for key in (f"key{number}" for number in range(KEYS)):
            charged = limit - levels.get(key, float(limit))  # type: ignore[operator]
            requests = [one for one in self.clients.requests if one.job.client == key]
            cost, maximum = sum(one.cost for one in requests), sum(one.max_cost for one in requests)
            demand(
                charged <= maximum or self.has_link_faults,  # an end that was lost may be charged again in part
                f"{key} was charged {charged} tokens and can have used {maximum}",
            )
            if self.is_calm:
                demand(charged == cost, f"{key} was charged {charged} tokens and has used {cost}")
