"""One engine's process and the status that HTTP workers see."""

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
    """An engine's process and its restarts."""

    info: ServedModel
    child: Child
    last_used: float
    deadline: float = 0.0
    """Time at which a draining engine is killed."""
    restarts: bool = False
    """The engine drains in order to restart."""

    @property
    def status(self) -> ModelStatus:
        return self.info.status

    @property
    def needs_start(self) -> bool:
        """Whether the process should run but does not."""
        return self.child.process is None and self.status is ModelStatus.LOADING

    @property
    def is_active(self) -> bool:
        """Whether the engine serves or is starting."""
        return self.status in (ModelStatus.LOADING, ModelStatus.READY)

    def set_status(self, status: ModelStatus, error: str = "", has_served: bool = False) -> None:
        self.info = msgspec.structs.replace(
            self.info,
            status=status,
            error=error,
            since=int(time.time()),
            has_served=has_served or self.info.has_served,
        )

    def start(self) -> None:
        """Starts the process. If the fork fails, an engine that has served is retried."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.info.address)
        try:
            self.child.start()
        except (EOFError, OSError) as error:
            self.child.process = None
            delay = self.child.schedule_restart()
            logger.error("process %s cannot be started (%r)", self.child.name, error)
            if self.info.has_served:
                logger.error("%s: retry in %.1f s", self.child.name, delay)
            else:
                self.set_status(ModelStatus.FAILED, error=f"its process cannot be started: {error}; load it again")
            return
        self.update_pid()

    def update_pid(self) -> None:
        """Reports the process id, which a forked process has only some time after its start."""
        process = self.child.process
        number = (process.is_alive() and process.pid) or 0 if process is not None else 0
        if number != self.info.pid:
            self.info = msgspec.structs.replace(self.info, pid=number)

    def restart(self, timeout_s: float) -> None:
        """Drains the engine for at most `timeout_s` if it serves, then starts it again."""
        if self.status is ModelStatus.READY:
            self.drain(timeout_s, restarts=True)
            return
        if self.child.process is not None:
            self.child.kill()  # it reported a failure and may still run
            self.child.reap()
        self.set_status(ModelStatus.LOADING)

    def drain(self, timeout_s: float, restarts: bool = False) -> None:
        """Lets running answers end for at most `timeout_s`, then ends the engine."""
        self.restarts = restarts
        self.set_status(ModelStatus.UNLOADING)
        self.deadline = time.monotonic() + timeout_s
        self.child.send_command("drain")

    def schedule_restart(self, cause: str) -> None:
        """Plans the restart of a process that ended."""
        delay = self.child.schedule_restart()
        logger.error("process %s ended (%s); restart in %.1f s", self.child.name, cause, delay)
        self.set_status(ModelStatus.LOADING)
