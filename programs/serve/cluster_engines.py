"""Engines of a service in a Ray cluster. Also this machine's loaded models."""

from __future__ import annotations

import logging
import time
from typing import Any

from programs.serve.child import Child
from programs.serve.engines import MAX_REPLICAS, RESTARTABLE, Engines
from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.plan import ALL
from rwkv_batch.ipc.served_model import ModelCommand, ModelStatus, ServedModel

logger = logging.getLogger("supervisor")


class ClusterEngines:
    """`Engines` whose replicas are Ray actors. `child` runs `rwkv_batch.fleet.actors.process`."""

    def __init__(self, models: Engines, child: Child, drain_s: float) -> None:
        self._models = models
        self._child = child
        self._drain_s = drain_s
        self._replicas: tuple[ServedModel, ...] = ()
        self._leaving: set[str] = set()
        """Engines that are being removed. They may run on while the cluster's head is unreachable."""
        self._is_leaving = False
        self.is_up = False
        """Whether an engine of the service's own model has been ready."""

    @property
    def registered(self) -> tuple[ServedModel, ...]:
        """All engines, with the cluster's last reported states."""
        return self._replicas + self._models.registered

    def handle_command(self, command: ModelCommand) -> str | None:
        if command.spec is not None or command.unload:
            return self._models.handle_command(command)
        if command.add_engine is not None:
            if len(self._replicas) >= MAX_REPLICAS:
                return (
                    f"devices: {len(self._replicas)} engines serve the model, the limit is {MAX_REPLICAS}; "
                    "remove one first"
                )
            self._child.send_command(("add", command.add_engine))
            return None
        name = command.remove_engine or command.restart_engine
        refusal = self._refusal_reason(name, bool(command.remove_engine))
        if refusal is None:
            if command.remove_engine:
                self._leaving.add(name)
            self._child.send_command(("remove" if command.remove_engine else "restart", name))
        return refusal

    def _refusal_reason(self, name: str, leaves: bool) -> str | None:
        here = {engine.engine: engine for engine in self._replicas}
        if name == ALL and not leaves:
            return None
        if name not in here:
            return f"engine: no engine {name!r} serves the model, only {', '.join(here)}"
        stay = here.keys() - self._leaving - {name}
        serves_on = any(here[one].status is ModelStatus.READY for one in stay)
        if leaves and not serves_on and here[name].status is not ModelStatus.FAILED:
            return f"engine: {name!r} is the last one of the model; add another one first"
        if not leaves and here[name].status not in RESTARTABLE:
            return f"engine: {name!r} is {here[name].status}; wait until it is ready, or has failed"
        return None

    def mark_used(self, names: tuple[str, ...]) -> None:
        self._models.mark_used(names)

    def poll(self) -> None:
        self._models.poll()
        self._listen()
        child = self._child
        if child.process is not None and not child.is_alive:
            self._listen()
            cause = child.reap()
            if not self._is_leaving:
                child.restart_later(cause)
        may_start = child.process is None and not self._is_leaving and time.monotonic() >= child.restart_at
        if may_start and child.try_start():
            self._leaving.clear()  # the new process does not know of removals
            child.send_command(("begin", self.is_up))

    def _listen(self) -> None:
        for subject, value in self._child.messages():
            match subject:
                case "engines":
                    self._replicas = value
                    self._leaving &= {one.engine for one in value}
                    self.is_up = self.is_up or any(one.status is ModelStatus.READY for one in value)
                case "failed" if not self.is_up:
                    raise StartupError(value)
                case "failed":
                    logger.error("%s", value)

    def wait_s(self) -> float | None:
        waits = [self._models.wait_s()]
        if self._child.process is None and not self._is_leaving:
            waits.append(max(0.0, self._child.restart_at - time.monotonic()))
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def waitables(self) -> list[Any]:
        return [*self._models.waitables, *self._child.waitables]

    @property
    def any_alive(self) -> bool:
        """Whether a process runs here or an engine is being removed."""
        return self._models.any_alive or self._child.is_alive

    def drain(self) -> None:
        """Ends the service on this machine. Also ends engines that no other machine uses."""
        self._is_leaving = True
        self._models.drain()
        self._child.send_command(("leave", self._drain_s))

    def kill(self) -> None:
        """Kills the local processes. The cluster's engines notice that they have no client."""
        self._models.kill()
        self._child.kill()
