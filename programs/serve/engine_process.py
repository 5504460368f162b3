"""One engine's process: how it stands, and what the HTTP workers are told of it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass

import msgspec

from programs.serve.child import Child
from rwkv_batch.ipc.served_model import ModelStatus, ServedModel

logger = logging.getLogger("supervisor")


@dataclass(eq=False)
class EngineProcess:
    """Its process through all restarts."""

    info: ServedModel
    child: Child
    last_used: float
    deadline: float = 0.0
    """When an engine that drains is killed."""
    restarts: bool = False
    """It drains to be started again."""

    @property
    def status(self) -> ModelStatus:
        """Where it stands."""
        return self.info.status

    @property
    def needs_start(self) -> bool:
        """Whether its process should run, and does not."""
        return self.child.process is None and self.status is ModelStatus.LOADING

    @property
    def is_active(self) -> bool:
        """Whether it serves, or is about to."""
        return self.status in (ModelStatus.LOADING, ModelStatus.READY)

    def send_command(self, status: ModelStatus, error: str = "", has_served: bool = False) -> None:
        """From now on it stands so."""
        self.info = msgspec.structs.replace(
            self.info,
            status=status,
            error=error,
            since=int(time.time()),
            has_served=has_served or self.info.has_served,
        )

    def start(self) -> None:
        """Start its process. Where the system has none to give, one that has served is tried again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.info.address)
        try:
            self.child.start()
        except (EOFError, OSError) as error:
            self.child.process = None
            delay = self.child.schedule_restart()
            logger.error("process %s cannot be started (%r)", self.child.name, error)
            if self.info.has_served:
                logger.error("%s is tried again in %.1f s", self.child.name, delay)
            else:
                self.send_command(ModelStatus.FAILED, error=f"its process cannot be started: {error}; load it again")
            return
        self.update_pid()

    def update_pid(self) -> None:
        """Tell its number, which one that is forked has a while after it was started."""
        process = self.child.process
        number = (process.is_alive() and process.pid) or 0 if process is not None else 0
        if number != self.info.pid:
            self.info = msgspec.structs.replace(self.info, pid=number)

    def restart(self, timeout_s: float) -> None:
        """Drain it if it serves, for so long, then start it once more."""
        if self.status is ModelStatus.READY:
            self.drain(timeout_s, restarts=True)
            return
        if self.child.process is not None:
            self.child.kill()  # it has said that it failed, and may not have ended yet
            self.child.reap()
        self.send_command(ModelStatus.LOADING)

    def drain(self, timeout_s: float, restarts: bool = False) -> None:
        """Let its running answers end, for so long, then end it."""
        self.restarts = restarts
        self.send_command(ModelStatus.UNLOADING)
        self.deadline = time.monotonic() + timeout_s
        self.child.send_command("drain")

    def schedule_restart(self, cause: str) -> None:
        """Its process has ended and is wanted."""
        delay = self.child.schedule_restart()
        logger.error("process %s ended (%s); it is started again in %.1f s", self.child.name, cause, delay)
        self.send_command(ModelStatus.LOADING)
