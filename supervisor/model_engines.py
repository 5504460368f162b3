"""The engines of models that are loaded while the service runs: a process each, beside the engine of its own model.

A model that cannot be loaded, or whose engine dies while it loads, is told as failed and touches nothing else. An
engine that is lost later is started again. Unloading drains: running answers end, sessions are stored.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.config import EngineConfig
from rwkv_batch.ipc.process import LogStyle
from rwkv_batch.ipc.served_model import USUAL_NAME, ModelCommand, ModelStatus, ModelWish, ServedModel
from supervisor.child import Child

logger = logging.getLogger("supervisor")

MAX_FAILED = 16
"""Failed models that are remembered; the oldest go first."""


@dataclass(frozen=True)
class ModelLimits:
    """How many models, and for how long."""

    count: int
    idle_s: float
    """0: unused ones stay."""
    last_words_s: float
    """What an engine gets beyond --drain-timeout-s before it is killed."""


@dataclass(eq=False)
class ModelEngine:
    """One model's process and what is told of it."""

    told: ServedModel
    child: Child
    last_used: float
    deadline: float = 0.0
    """When an engine that drains is killed."""

    @property
    def status(self) -> ModelStatus:
        """Where it stands."""
        return self.told.status


class ModelEngines:
    """Starts, watches and ends them; the supervisor's loop calls `look_after`."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        style: LogStyle,
        context: SpawnContext,
        target: Callable[..., None],
        factory: str,
        limits: ModelLimits,
    ) -> None:
        """`config` is that of the service's own model, whose settings the others have but for their wishes."""
        self._config = config
        self._folder = folder
        self._style = style
        self._context = context
        self._target = target
        self._factory = factory
        self._limits = limits
        self._numbers = itertools.count(1)
        self._engines: dict[str, ModelEngine] = {}

    @property
    def table(self) -> tuple[ServedModel, ...]:
        """All that were asked for and have not left, in that order."""
        return tuple(engine.told for engine in self._engines.values())

    def obey(self, command: ModelCommand) -> str | None:
        """Do what an HTTP worker asks; returns why it cannot be done, in one line."""
        return self._unload(command.unload) if command.wish is None else self._load(command.wish)

    def used(self, names: tuple[str, ...]) -> None:
        """Requests of these models run or have just come."""
        now = time.monotonic()
        for name in names:
            if name in self._engines:
                self._engines[name].last_used = now

    def look_after(self) -> None:
        """Listen to the engines, start again what was lost, end what drains, let idle ones leave."""
        now = time.monotonic()
        for name, engine in list(self._engines.items()):
            self._listen(engine)
            if engine.child.process is not None and not engine.child.is_alive:
                self._listen(engine)
                self._reap(name, engine)
            elif engine.status is ModelStatus.UNLOADING and now > engine.deadline:
                engine.child.kill()
            elif engine.status is ModelStatus.READY and self._is_idle(engine, now):
                logger.info("model %s has not been used for %.0f s and leaves", name, self._limits.idle_s)
                self._unload(name)
            if engine.child.process is None and engine.status is ModelStatus.LOADING and now >= engine.child.restart_at:
                self._start(engine)

    def wait_s(self) -> float | None:
        """Seconds until something is due here; None: nothing is."""
        now = time.monotonic()
        due = [engine.deadline for engine in self._engines.values() if engine.status is ModelStatus.UNLOADING]
        for engine in self._engines.values():
            if engine.status is ModelStatus.LOADING and engine.child.process is None:
                due.append(engine.child.restart_at)
            if engine.status is ModelStatus.READY and self._limits.idle_s:
                due.append(engine.last_used + self._limits.idle_s)
        return max(0.0, min(due) - now) if due else None

    @property
    def waitables(self) -> list[Any]:
        """What becomes readable when an engine speaks or ends."""
        return [one for engine in self._engines.values() for one in engine.child.waitables]

    @property
    def are_alive(self) -> bool:
        """Whether any runs."""
        return any(engine.child.is_alive for engine in self._engines.values())

    def drain(self) -> None:
        """Unload all: the service ends."""
        for name, engine in list(self._engines.items()):
            if engine.status is not ModelStatus.UNLOADING:
                self._unload(name)

    def kill(self) -> None:
        """End all at once."""
        for engine in self._engines.values():
            engine.child.kill()

    def _load(self, wish: ModelWish) -> str | None:
        known = self._engines.get(wish.name)
        is_own = wish.name in (self._config.model_name, USUAL_NAME)
        if is_own or (known is not None and known.status is not ModelStatus.FAILED):
            state = "" if known is None else f", {known.status}"
            return f"name: a model {wish.name!r} is here already{state}; unload it first, or give another name"
        resident = [engine for engine in self._engines.values() if engine.status is not ModelStatus.FAILED]
        if len(resident) >= self._limits.count:
            return (
                f"name: {len(resident)} models are loaded already, the limit is {self._limits.count} (--max-models); "
                "unload one first"
            )
        if known is not None:
            known.child.kill()  # it has said that it failed, and may not have ended yet
            del self._engines[wish.name]
        self._forget_failures()
        address = os.path.join(self._folder, f"model-{next(self._numbers)}")
        config = _config_of(self._config, wish)
        arguments = (config, address, self._factory, self._style)
        told = ServedModel(wish=wish, status=ModelStatus.LOADING, address=address, since=int(time.time()))
        child = Child(f"engine-{wish.name}", self._context, self._target, arguments)
        self._engines[wish.name] = ModelEngine(told, child, time.monotonic())
        logger.info("loading model %s from %s", wish.name, wish.file)
        return None

    def _unload(self, name: str) -> str | None:
        engine = self._engines.get(name)
        if engine is None:
            return f"name: no model {name!r} was loaded while serving; GET /v1/models lists those that were"
        if engine.status is ModelStatus.UNLOADING:
            return None
        if engine.child.process is None:
            del self._engines[name]
            return None
        if engine.status is ModelStatus.LOADING:
            engine.child.kill()  # it has no sessions yet, or their turns are in the log
            engine.child.reap()
            del self._engines[name]
            return None
        self._tell(engine, ModelStatus.UNLOADING)
        engine.deadline = time.monotonic() + self._config.drain_timeout_s + self._limits.last_words_s
        engine.child.tell("drain")
        return None

    def _start(self, engine: ModelEngine) -> None:
        """Start its process. Where the system has none to give, a model that has served is tried again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(engine.told.address)
        try:
            engine.child.start()
        except (EOFError, OSError) as error:
            engine.child.process = None
            delay = engine.child.plan_restart()
            logger.error("process %s cannot be started (%r)", engine.child.name, error)
            if engine.told.has_served:
                logger.error("%s is tried again in %.1f s", engine.child.name, delay)
            else:
                self._tell(engine, ModelStatus.FAILED, error=f"its process cannot be started: {error}; load it again")

    def _listen(self, engine: ModelEngine) -> None:
        for subject, value in engine.child.heard():
            match subject:
                case "ready":
                    logger.info("serving model %s too", engine.told.wish.name)
                    engine.last_used = time.monotonic()
                    self._tell(engine, ModelStatus.READY, has_served=True)
                case "failed" if not engine.told.has_served:
                    self._tell(engine, ModelStatus.FAILED, error=value)
                case "failed":
                    logger.error("%s did not start again: %s", engine.child.name, value)
                case "drained":
                    engine.child.tell("end")

    def _reap(self, name: str, engine: ModelEngine) -> None:
        cause = engine.child.reap()
        match engine.status:
            case ModelStatus.UNLOADING:
                logger.info("model %s is unloaded", name)
                del self._engines[name]
            case ModelStatus.FAILED:
                logger.error("model %s cannot be loaded: %s", name, engine.told.error)
            case ModelStatus.LOADING if not engine.told.has_served:
                self._tell(engine, ModelStatus.FAILED, error=f"its process ended while it loaded ({cause})")
                logger.error("model %s cannot be loaded: %s", name, engine.told.error)
            case _:
                delay = engine.child.plan_restart()
                logger.error("process %s ended (%s); it is started again in %.1f s", engine.child.name, cause, delay)
                self._tell(engine, ModelStatus.LOADING)

    def _tell(self, engine: ModelEngine, status: ModelStatus, error: str = "", has_served: bool = False) -> None:
        engine.told = msgspec.structs.replace(
            engine.told,
            status=status,
            error=error,
            since=int(time.time()),
            has_served=has_served or engine.told.has_served,
        )

    def _is_idle(self, engine: ModelEngine, now: float) -> bool:
        return bool(self._limits.idle_s) and now - engine.last_used > self._limits.idle_s

    def _forget_failures(self) -> None:
        failed = [name for name, engine in self._engines.items() if engine.status is ModelStatus.FAILED]
        for name in failed[: max(0, len(failed) - MAX_FAILED + 1)]:
            del self._engines[name]


def _config_of(base: EngineConfig, wish: ModelWish) -> EngineConfig:
    """The settings of a model's engine; its sessions are in a database of its own beside the service's."""
    database = base.pool.state_db
    if database:
        path = Path(database)
        database = str(path.with_name(f"{path.stem}-{wish.name}{path.suffix}"))
    return msgspec.structs.replace(
        base,
        model_path=wish.file,
        model_name=wish.name,
        dtype=wish.dtype or base.dtype,
        adapters=wish.adapters,
        states=(),
        served_adapters=(),
        gives_way=True,
        strategy="",
        layers=() if wish.devices else base.layers,
        devices=wish.devices or base.devices,
        gpu_memory_utilization=wish.gpu_memory_utilization or base.gpu_memory_utilization,
        max_running=base.max_running if wish.max_running is None else wish.max_running,
        pool=msgspec.structs.replace(base.pool, state_db=database),
    )
