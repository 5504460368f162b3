"""One engine's process: how it stands, and what the HTTP workers are told of it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass

import msgspec

from rwkv_batch.ipc.served_model import ModelStatus, ServedModel
from supervisor.child import Child

logger = logging.getLogger("supervisor")


@dataclass(eq=False)
class EngineProcess:
    """Its process through all restarts."""

    told: ServedModel
    child: Child
    last_used: float
    deadline: float = 0.0
    """When an engine that drains is killed."""
    comes_back: bool = False
    """It drains to be started again."""

    @property
    def status(self) -> ModelStatus:
        """Where it stands."""
        return self.told.status

    @property
    def is_wanted(self) -> bool:
        """Whether its process should run, and does not."""
        return self.child.process is None and self.status is ModelStatus.LOADING

    @property
    def takes_part(self) -> bool:
        """Whether it serves, or is about to."""
        return self.status in (ModelStatus.LOADING, ModelStatus.READY)

    def tell(self, status: ModelStatus, error: str = "", has_served: bool = False) -> None:
        """From now on it stands so."""
        self.told = msgspec.structs.replace(
            self.told,
            status=status,
            error=error,
            since=int(time.time()),
            has_served=has_served or self.told.has_served,
        )

    def start(self) -> None:
        """Start its process. Where the system has none to give, one that has served is tried again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.told.address)
        try:
            self.child.start()
        except (EOFError, OSError) as error:
            self.child.process = None
            delay = self.child.plan_restart()
            logger.error("process %s cannot be started (%r)", self.child.name, error)
            if self.told.has_served:
                logger.error("%s is tried again in %.1f s", self.child.name, delay)
            else:
                self.tell(ModelStatus.FAILED, error=f"its process cannot be started: {error}; load it again")
            return
        self.note_process()

    def note_process(self) -> None:
        """Tell its number, which one that is forked has a while after it was started."""
        process = self.child.process
        number = (process.is_alive() and process.pid) or 0 if process is not None else 0
        if number != self.told.pid:
            self.told = msgspec.structs.replace(self.told, pid=number)

    def start_anew(self, timeout_s: float) -> None:
        """Drain it if it serves, for so long, then start it once more."""
        if self.status is ModelStatus.READY:
            self.drain(timeout_s, comes_back=True)
            return
        if self.child.process is not None:
            self.child.kill()  # it has said that it failed, and may not have ended yet
            self.child.reap()
        self.tell(ModelStatus.LOADING)

    def drain(self, timeout_s: float, comes_back: bool = False) -> None:
        """Let its running answers end, for so long, then end it."""
        self.comes_back = comes_back
        self.tell(ModelStatus.UNLOADING)
        self.deadline = time.monotonic() + timeout_s
        self.child.tell("drain")

    def plan_restart(self, cause: str) -> None:
        """Its process has ended and is wanted."""
        delay = self.child.plan_restart()
        logger.error("process %s ended (%s); it is started again in %.1f s", self.child.name, cause, delay)
        self.tell(ModelStatus.LOADING)
