"""The engine processes: replicas of the service's own model, and models loaded while serving.

A lost engine is restarted. If an initial engine cannot start, the service ends. If a later one cannot start, it is
reported as failed. A draining engine finishes its answers or moves them to another engine, and stores its sessions.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import Any

import msgspec

from programs.serve.child import Child
from programs.serve.engine_process import EngineProcess, model_config, reason_for_request, replica_config
from programs.serve.fork_context import ForkedContext
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogConfig
from rwkv_batch.ipc.served_model import DEFAULT_MODEL_NAME, ModelCommand, ModelSpec, ModelStatus, ServedModel

logger = logging.getLogger("supervisor")

MIN_IDLE_S = 10.0
"""With --model-idle-s, a model that is unused for this long may be unloaded to make room for another."""
MAX_FAILED = 16
"""Failed engines that are remembered. The oldest are dropped first."""
MAX_REPLICAS = 64
RESTARTABLE = (ModelStatus.READY, ModelStatus.FAILED)
PRELOAD_MODULE = "rwkv_batch.ipc.preload"
"""Module that the fork server imports for engines."""
ALL = "all"
"""Engine name that means every engine of the own model, one after the other."""


@dataclass(frozen=True)
class ModelLimits:
    count: int
    idle_s: float
    """0: never unload."""
    kill_grace_s: float
    """Seconds after --drain-timeout-s until an engine is killed."""


class Engines:
    """Starts, monitors and ends the engines. The supervisor's loop calls `poll`."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        log_config: LogConfig,
        context: SpawnContext,
        target: Callable[..., None],
        factory: str,
        limits: ModelLimits,
        replicas: Sequence[tuple[str, ...]] = (),
        forks: ForkedContext | None = None,
    ) -> None:
        """
        config: settings of the service's own model. Loaded models inherit them.
        replicas: devices of each initial engine.
        forks: context that forks the engines of loaded models. None: they are spawned.
        """
        self._config = config
        self._folder = folder
        self._log_config = log_config
        self._context = context
        self._forks = forks or context
        self._target = target
        self._factory = factory
        self._limits = limits
        self._numbers = itertools.count(1)
        self._replica_numbers = itertools.count()
        self._engines: dict[str, EngineProcess] = {}
        """by name"""
        self._device_indices: dict[str, int] = {}
        """GPU index of each replica that names no device."""
        self._to_restart: deque[str] = deque()
        self.is_up = False
        """Whether an engine of the own model has been ready."""
        for devices in replicas:
            self._add(devices, len(replicas))

    @property
    def registered(self) -> tuple[ServedModel, ...]:
        """All engines that were requested and not removed, in that order."""
        return tuple(engine.info for engine in self._engines.values())

    def handle_command(self, command: ModelCommand) -> str | None:
        """Executes an HTTP worker's command. Returns one line that says why it failed, or None."""
        if command.spec is not None:
            return self._load(command.spec)
        if command.unload:
            return self._unload(command.unload)
        if command.add_engine is not None:
            return self._add_replica(command.add_engine)
        return self._remove(command.remove_engine) if command.remove_engine else self._restart(command.restart_engine)

    def mark_used(self, names: tuple[str, ...]) -> None:
        """Records that these models have requests."""
        now = time.monotonic()
        for engine in self._engines.values():
            if engine.info.spec.name in names:
                engine.last_used = now

    def poll(self) -> None:
        """Reads messages, restarts lost engines, ends drained ones, unloads idle ones.

        Raises StartupError if an initial engine cannot start.
        """
        now = time.monotonic()
        for name, engine in list(self._engines.items()):
            self._listen(engine)
            if engine.child.process is not None and not engine.child.is_alive:
                self._listen(engine)
                self._reap(name, engine)
            elif engine.status is ModelStatus.UNLOADING and now > engine.deadline:
                engine.child.kill()
            elif engine.status is ModelStatus.READY and self._is_idle(engine, now):
                logger.info("model %s was not used for %.0f s and is unloaded", name, self._limits.idle_s)
                engine.drain(self._drain_s)
            if self._may_start(engine) and now >= engine.child.restart_at:
                engine.start()
        self._restart_next()

    def wait_s(self) -> float | None:
        """Seconds until the next timer, or None."""
        now = time.monotonic()
        due = [engine.deadline for engine in self._engines.values() if engine.status is ModelStatus.UNLOADING]
        due += [engine.child.restart_at for engine in self._engines.values() if self._may_start(engine)]
        if self._limits.idle_s:
            due += [
                engine.last_used + self._limits.idle_s
                for engine in self._engines.values()
                if engine.status is ModelStatus.READY and not engine.info.is_own
            ]
        return max(0.0, min(due) - now) if due else None

    @property
    def waitables(self) -> list[Any]:
        """Returns objects to wait for. They become readable when an engine sends a message or ends."""
        return [one for engine in self._engines.values() for one in engine.child.waitables]

    @property
    def any_alive(self) -> bool:
        return any(engine.child.is_alive for engine in self._engines.values())

    def drain(self) -> None:
        self._to_restart.clear()
        for engine in list(self._engines.values()):
            self._drain_or_end(engine)

    def kill(self) -> None:
        for engine in self._engines.values():
            engine.child.kill()

    @property
    def _drain_s(self) -> float:
        return self._config.drain_timeout_s + self._limits.kill_grace_s

    # Models --------------------------------------------------------------------------------------------------

    def _load(self, spec: ModelSpec) -> str | None:
        known = self._model(spec.name)
        is_own = spec.name in (self._config.model_name, DEFAULT_MODEL_NAME)
        if is_own or (known is not None and known.status is not ModelStatus.FAILED):
            if known is not None and known.status is ModelStatus.UNLOADING:
                return f"name: model {spec.name!r} is being unloaded; wait for its end or use another name"
            state = "" if known is None else f", {known.status}"
            return f"name: model {spec.name!r} is loaded{state}; unload it first or use another name"
        others = [engine for engine in self._engines.values() if not engine.info.is_own]
        leaving = (ModelStatus.FAILED, ModelStatus.UNLOADING)
        active_models = [engine for engine in others if engine.status not in leaving]
        if len(active_models) >= self._limits.count and not self._unload_idle(active_models):
            return (
                f"name: {len(active_models)} models are loaded, the limit is {self._limits.count} (--max-models); "
                "unload one first"
            )
        if known is not None:
            known.child.kill()  # it reported a failure and may still run
            self._forget(known)
        self._drop_old_failures()
        config = model_config(self._config, spec, len(self._replicas))
        self._create(f"model-{next(self._numbers)}", f"engine-{spec.name}", spec, config)
        logger.info("loading model %s from %s", spec.name, spec.file)
        return None

    def _unload_idle(self, models: list[EngineProcess]) -> bool:
        """Unloads the least recently used model. Returns False if none may be unloaded."""
        since = time.monotonic() - min(self._limits.idle_s, MIN_IDLE_S)
        ready = [engine for engine in models if engine.status is ModelStatus.READY]
        idle = [engine for engine in ready if self._limits.idle_s and engine.last_used < since]
        if not idle:
            return False
        engine = min(idle, key=lambda one: one.last_used)
        logger.info("model %s is unloaded to make room for another", engine.info.spec.name)
        self._drain_or_end(engine)
        return True

    def _may_start(self, engine: EngineProcess) -> bool:
        """Whether the engine should start and has room. Models that make room for it must have ended."""
        if not engine.needs_start or engine.info.is_own:
            return engine.needs_start
        others = [one for one in self._engines.values() if not one.info.is_own and one.child.process is not None]
        return sum(one.status is not ModelStatus.FAILED for one in others) < self._limits.count

    def _unload(self, name: str) -> str | None:
        engine = self._model(name)
        if engine is None:
            return f"name: no model {name!r} was loaded while serving; GET /v1/models lists the loaded ones"
        self._drain_or_end(engine)
        return None

    def _model(self, name: str) -> EngineProcess | None:
        others = (engine for engine in self._engines.values() if not engine.info.is_own)
        return next((engine for engine in others if engine.info.spec.name == name), None)

    def _drain_or_end(self, engine: EngineProcess) -> None:
        """Drains the engine, or kills it if there is nothing to drain."""
        if engine.status is ModelStatus.UNLOADING:
            engine.restarts = False
        elif engine.child.process is None:
            self._forget(engine)
        elif engine.status is ModelStatus.LOADING:
            engine.child.kill()  # it has no sessions yet, or their turns are in the log already
            engine.child.reap()
            self._forget(engine)
        else:
            engine.drain(self._drain_s)

    # Replicas ------------------------------------------------------------------------------------------------

    @property
    def _replicas(self) -> dict[str, EngineProcess]:
        return {name: engine for name, engine in self._engines.items() if engine.info.is_own}

    def _add(self, devices: tuple[str, ...], num_replicas: int) -> None:
        """Starts one more engine of the own model. `num_replicas`: engines in total."""
        number = next(self._replica_numbers)
        name = f"engine-{number}"
        spec = ModelSpec(name=self._config.model_name, file=self._config.model_path, devices=devices)
        used_indices = {self._device_indices[one] for one in self._replicas}
        self._device_indices[name] = device_index = next(free for free in itertools.count() if free not in used_indices)
        config = msgspec.structs.replace(
            self._config, devices=devices or self._config.devices, replica=device_index, replicas=num_replicas
        )
        self._create(name, name, spec, replica_config(config, name), is_own=True)

    def _add_replica(self, devices: tuple[str, ...]) -> str | None:
        active = [engine for engine in self._replicas.values() if engine.status is not ModelStatus.FAILED]
        if len(active) >= MAX_REPLICAS:
            return f"devices: {len(active)} engines serve the model, the limit is {MAX_REPLICAS}; remove one first"
        if self._config.pool.state_db and not self._config.pool.service:
            return (
                "devices: the service was started without --replicas, so its engine does not share the session "
                "database; start it with --replicas 1 or more"
            )
        self._drop_old_failures()
        self._add(devices, len(active) + 1)
        return None

    def _remove(self, name: str) -> str | None:
        engine = self._replicas.get(name)
        if engine is None:
            return self._unknown(name)
        others = [one for one in self._replicas.values() if one is not engine]
        serves = engine.status is ModelStatus.READY
        remaining = [one for one in others if (one.status is ModelStatus.READY if serves else one.is_active)]
        if not remaining and engine.status is not ModelStatus.FAILED:
            return (
                f"engine: {name!r} is the last one that serves the model; add another one first, or wait until one is "
                "ready"
            )
        self._drain_or_end(engine)
        return None

    def _restart(self, name: str) -> str | None:
        names = list(self._replicas) if name == ALL else [name]
        if name != ALL and name not in self._replicas:
            return self._unknown(name)
        if name != ALL and self._replicas[name].status not in RESTARTABLE:
            return f"engine: {name!r} is {self._replicas[name].status}; wait until it is ready, or has failed"
        self._to_restart.extend(one for one in names if one not in self._to_restart)
        self._restart_next()
        return None

    def _restart_next(self) -> None:
        """Drains the next engine to restart, once all others are ready."""
        busy = (ModelStatus.UNLOADING, ModelStatus.LOADING)
        if not self._to_restart or any(engine.status in busy for engine in self._replicas.values()):
            return
        engine = self._engines.get(self._to_restart.popleft())
        if engine is not None and engine.status in RESTARTABLE:
            logger.info("%s (%s) restarts", engine.info.engine, engine.status)
            engine.restart(self._drain_s)

    def _unknown(self, name: str) -> str:
        return f"engine: no engine {name!r} serves the model, only {', '.join(self._replicas)}"

    # Each ----------------------------------------------------------------------------------------------------

    def _create(self, name: str, process: str, spec: ModelSpec, config: EngineConfig, is_own: bool = False) -> None:
        address = os.path.join(self._folder, name)
        arguments = (config, address, self._factory, self._log_config)
        info = ServedModel(
            spec=spec, status=ModelStatus.LOADING, address=address, since=int(time.time()), engine=name, is_own=is_own
        )
        child = Child(process, self._context if is_own else self._forks, self._target, arguments)
        self._engines[name] = EngineProcess(info, child, time.monotonic())

    def _forget(self, engine: EngineProcess) -> None:
        """Removes an engine whose process has ended, and its socket."""
        del self._engines[engine.info.engine]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(engine.info.address)

    def _listen(self, engine: EngineProcess) -> None:
        engine.update_pid()
        for subject, value in engine.child.messages():
            match subject:
                case "loading":
                    engine.info = msgspec.structs.replace(engine.info, loaded=value)
                case "ready":
                    logger.log(
                        logging.INFO if self.is_up else logging.DEBUG,
                        "%s serves model %s", engine.info.engine, engine.info.spec.name,
                    )  # fmt: skip
                    engine.last_used = time.monotonic()
                    engine.set_status(ModelStatus.READY, has_served=True)
                    self.is_up = self.is_up or engine.info.is_own
                case "failed" if not engine.info.has_served:
                    if self._is_initial(engine):
                        raise StartupError(value)
                    engine.set_status(
                        ModelStatus.FAILED, error=reason_for_request(value, self._config.models_dir, engine.info.is_own)
                    )
                case "failed":
                    logger.error("%s did not start again: %s", engine.child.name, value)
                case "drained":
                    engine.child.send_command("end")

    def _is_initial(self, engine: EngineProcess) -> bool:
        return engine.info.is_own and not self.is_up

    def _reap(self, name: str, engine: EngineProcess) -> None:
        cause = engine.child.reap()
        engine.info = msgspec.structs.replace(engine.info, pid=0)
        match engine.status:
            case ModelStatus.UNLOADING if engine.restarts:
                engine.restarts = False
                engine.set_status(ModelStatus.LOADING)
            case ModelStatus.UNLOADING:
                logger.info("%s has left", name if engine.info.is_own else f"model {engine.info.spec.name}")
                self._forget(engine)
            case ModelStatus.FAILED:
                logger.error("%s cannot be loaded: %s", name, engine.info.error)
            case ModelStatus.LOADING if not engine.info.has_served:
                if self._is_initial(engine):
                    raise StartupError(f"the engine process ended while starting ({cause})")
                engine.set_status(ModelStatus.FAILED, error=f"its process ended while it loaded ({cause})")
                logger.error("%s cannot be loaded: %s", name, engine.info.error)
            case _:
                engine.schedule_restart(cause)

    def _is_idle(self, engine: EngineProcess, now: float) -> bool:
        idle_s = self._limits.idle_s
        return bool(idle_s) and not engine.info.is_own and now - engine.last_used > idle_s

    def _drop_old_failures(self) -> None:
        failed = [name for name, engine in self._engines.items() if engine.status is ModelStatus.FAILED]
        for name in failed[: max(0, len(failed) - MAX_FAILED + 1)]:
            self._forget(self._engines[name])
