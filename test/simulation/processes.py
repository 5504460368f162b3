"""The processes of a world with a fleet: engines that share a database, and HTTP workers."""

from __future__ import annotations

import random
import sqlite3
from typing import TYPE_CHECKING, Any

from rwkv_batch.calls import AddState, Reply, StateInfo
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.speculation import Speculation
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.engine import Engine
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.runner.state_library import StateLibrary
from state_pool.cache.slots import DraftSlots
from state_pool.layout import FIRST_FREE_SLOT
from state_pool.origins import Origin
from state_pool.pool import StatePool
from test.pool_fakes import FakeHost
from test.simulation.device import TOKENIZER, Device, Runner
from test.simulation.invariants import check_step
from test.simulation.tasks import Tasks

if TYPE_CHECKING:
    from test.simulation.fleet_world import FleetWorld

NUM_WORKERS = 2


def shared_connection_class(tasks: Tasks, product: type[sqlite3.Connection]) -> type[sqlite3.Connection]:
    """Return a connection class whose statements yield to other tasks.

    They also yield while another process has the lock.
    """

    class Connection(product):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, timeout: float, **options: Any) -> None:
            super().__init__(*arguments, timeout=0.0, **options)
            self._busy_timeout_s = timeout

        def execute(self, sql: str, parameters: Any = (), /) -> Any:
            if sql == "PRAGMA busy_timeout=0":
                self._busy_timeout_s = 0.0
            deadline = tasks.now + self._busy_timeout_s
            while True:
                tasks.pause()
                try:
                    return super().execute(sql, parameters)
                except sqlite3.OperationalError as error:
                    if "locked" not in str(error) or tasks.now >= deadline:
                        raise
                tasks.wait(lambda: False, 0.01)

    return Connection


class SharedLock:
    """Replaces the lock of a database file between processes."""

    is_on_path = True

    def __init__(self, world: FleetWorld) -> None:
        self.process = world.tasks.process
        self._locks = world.locks
        world.tasks.wait(lambda: all(lock.is_shared for lock in self._locks))
        self.is_first, self.is_shared = not self._locks, False
        self._locks.append(self)

    def share(self) -> None:
        self.is_shared = True

    def take_alone(self) -> bool:
        return self._locks == [self]

    def release(self) -> None:
        if self in self._locks:
            self._locks.remove(self)


class _OrderedSet(dict[Any, None]):
    """A set in the order of its additions. It makes a world the same every time."""

    def add(self, value: Any) -> None:
        self[value] = None

    def discard(self, value: Any) -> None:
        self.pop(value, None)


class States(StateLibrary):
    """Tuned states in the world's folder. Writing and reading one takes a while."""

    world: FleetWorld

    def open(self, pool: StatePool, *_: Any) -> None:
        self._pool = pool
        for name in list(self.world.folder_of_states):
            self._register_number(name)

    def _register_number(self, name: str) -> StateInfo:
        data = self.world.folder_of_states[name].to_bytes(16, "little")
        self._pool.tuned.add(Origin(name, f"d{name}"), FakeHost({"a.wkv": data[:12], "a.shift": data[12:]}))
        self._infos[name] = StateInfo(name=name)
        return self._infos[name]

    def add(self, call: AddState, reply: Reply[StateInfo]) -> None:
        def write() -> str:
            self.world.tasks.wait(lambda: False, self.world.rng.choice((0.001, 0.05)))
            self.world.folder_of_states[call.name] = self.world.numbers[call.name]
            return call.name

        self._read_and_register(reply, write, self._register_number)


class FleetEngine(Engine):
    """The real engine over a fake device. Its thread is a task."""

    world: FleetWorld

    def _load(self) -> None:
        world, config = self.world, self.config
        settings = world.settings
        limits = settings.limits()
        pool_config = config.pool
        slots = settings.max_running * (1 + settings.session_slots) + 4 + pool_config.l1_sessions
        slots += settings.prefix_cache_slots + pool_config.state_slots + FIRST_FREE_SLOT
        device = Device(slots, settings.delays, random.Random(f"{world.seed} copies {world.tasks.now}"))
        pool = StatePool(device, pool_config, self._wake.set)
        self.model_runner = Runner(  # type: ignore[assignment]
            limits, device, pool, settings.overlap, settings.splits, lambda rows: None, lambda step: None
        )
        self._user_files.states.open(pool)  # type: ignore[call-arg]
        world.tasks.wait(lambda: False, world.rng.choice((0.0, 0.3, 1.0)))
        self.state_manager = StateManager(pool, TOKENIZER, settings.overlap)
        self.scheduler = Scheduler(limits, self.state_manager, False)
        self.speculation = Speculation("off", DraftSlots(pool.tiers.slots, 0), self.scheduler.forget_plain)
        self.jobs = JobTable(self.scheduler, self.state_manager, self.speculation, TOKENIZER, self.model_runner.vocab)

    def step(self) -> bool:
        """Let the other threads run, then make a step and check it."""
        self.world.tasks.pause()
        worked = super().step()
        self.world.counts["steps"] += 1
        check_step(self)
        return worked


class EngineProcess:
    """One engine's process, from its start to its end."""

    def __init__(self, world: FleetWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"engine-{number}"
        self.address = f"{self.name} at {world.tasks.now:.3f}"
        self.engine: FleetEngine | None = None
        self.server: EngineServer | None = None
        self.connections: list[sqlite3.Connection] = []
        self.is_serving = self.is_draining = False

    def run(self) -> None:
        """Main function, as `run_engine`."""
        world, settings = self.world, self.world.settings
        world.tasks.wait(lambda: False, world.rng.choice((0.3, 0.6)))  # reads the weights
        pool = settings.pool_config(
            state_db=str(world.database),
            durability="log" if settings.durability == "lazy" else settings.durability,
            synchronous="NORMAL",
            session_ttl=settings.session_ttl and max(3600.0, settings.session_ttl),
            state_slots=2,
            engine=self.name,
            service="service",
        )
        engine = FleetEngine(EngineConfig(model_path="", pool=pool))
        engine.world = world
        files: Any = engine._user_files
        files.states = States(engine.config, engine._inbox.put, engine._unavailable_error)
        files.states.world = world
        engine.start()
        self.engine, self.server = engine, EngineServer(engine)
        world.num_starts += 1
        self.server._started += world.num_starts / 1e6  # the world's clock stands still meanwhile, a real one does not
        self.server._peers = _OrderedSet()  # type: ignore[assignment]
        self.server._ledger._quotas.clock = world.quota_clock
        self.server.listen(self.address)
        self.is_serving = True
        world.announce(self, ModelStatus.READY)

    def drain(self) -> None:
        """End in good order, as the supervisor's command makes it."""
        assert self.engine is not None and self.server is not None
        self.is_draining = True
        self.engine.drain(1.0)
        self.is_serving = False
        self.engine.stop()
        self.server.finish(2.0)
        self.world.ended(self)

    def info(self, status: ModelStatus) -> ServedModel:
        return ServedModel(
            spec=ModelSpec(name="m", file=""), status=status, address=self.address, since=0, engine=self.name
        )


class Worker:
    """One HTTP worker's process."""

    def __init__(self, world: FleetWorld, number: int) -> None:
        self.number = number
        self.name = f"http-{number}"
        limits = FleetLimits(resubmit=2, wait_s=10.0, shares_sessions=True, num_routers=NUM_WORKERS)
        world.tasks.process = self
        self.fleet = Fleet(limits)
        self.fleet._rng = random.Random(f"{world.seed} {self.name} {world.tasks.now}")
        self.fleet.quotas._copy.clock = world.quota_clock
        self.fleet.start(self.name)
        world.tasks.process = None
