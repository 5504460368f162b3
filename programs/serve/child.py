"""One supervised process with its pipe and its restart time."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import site
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from programs.serve.fork_context import ForkedContext

logger = logging.getLogger("supervisor")

_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STABLE_S = 30.0
"""After this lifetime a process restarts without back-off."""
_JOIN_TIMEOUT_S = 5.0
"""The supervisor waits this long for a killed process, which the system may hold."""


def export_python_path() -> None:
    """Puts our modules on the PYTHONPATH of fork servers.

    Python 3.11 does not pass `sys.path` to them. Without it each forked process would import everything again.
    """
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in (*known, *site.getsitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, known)])


def backoff_s(failures: int) -> float:
    """Seconds to wait after a number of failed starts in a row."""
    return _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]


@dataclass(eq=False)
class Child:
    name: str
    context: SpawnContext | ForkedContext
    target: Callable[..., None]
    arguments: tuple[Any, ...]
    """First arguments of `target`. The process's name and its end of the pipe follow."""
    process: BaseProcess | None = None
    pipe: Connection | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = field(default=0.0)
    group: int | None = None
    """Process group of its own children. They end with it."""

    def start(self) -> None:
        """Starts the process with a new pipe. Raises EOFError or OSError if the fork fails."""
        self.pipe, theirs = self.context.Pipe()
        process = self.context.Process(target=self.target, args=(*self.arguments, self.name, theirs), name=self.name)
        process.start()
        self.process = process
        theirs.close()
        self.started = time.monotonic()

    def try_start(self) -> bool:
        """Starts the process. If that fails, for example without a fork server, a retry follows."""
        try:
            self.start()
        except (EOFError, OSError) as error:
            delay = self.schedule_restart()
            logger.error("process %s cannot be started (%r); retry in %.1f s", self.name, error, delay)
            return False
        return True

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def was_forked(self) -> bool:
        """Whether the process exists or has existed. A lost fork server may never create it."""
        return self.process is not None and self.process.pid is not None

    @property
    def waitables(self) -> list[Any]:
        """Returns objects to wait for. They become readable when the process sends a message or ends."""
        if self.process is None or self.pipe is None:
            return []
        return [self.process.sentinel] if self.pipe.closed else [self.process.sentinel, self.pipe]

    def send_command(self, command: object) -> None:
        """Sends a command. Does nothing if the process is gone."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(command)

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Yields the received messages as (subject, value)."""
        if self.pipe is None or self.pipe.closed:
            return
        try:
            while self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.pipe.close()  # the process closed its end, so it ends soon

    def reap(self) -> str:
        """Returns why the process ended. Call it after the end only."""
        assert self.process is not None
        self.process.join(_JOIN_TIMEOUT_S)
        code = self.process.exitcode
        self.close()
        self.process = None
        return _exit_cause(code)

    def restart_later(self, cause: str) -> None:
        """Sets the next start's time after the process has ended."""
        logger.error("process %s ended (%s); restart in %.1f s", self.name, cause, self.schedule_restart())

    def schedule_restart(self) -> float:
        """Sets the next start's time and returns the wait in seconds."""
        if time.monotonic() - self.started > _STABLE_S:
            self.failures = 0
        delay = backoff_s(self.failures)
        self.failures += 1
        self.restart_at = time.monotonic() + delay
        return delay

    def end(self) -> None:
        """Terminates the process. Call `reap` later."""
        if self.is_alive and self.process is not None:
            self.process.kill()

    def kill(self) -> None:
        if self.is_alive and self.process is not None:
            self.end()
            self.process.join(_JOIN_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Closes the pipe. A process that still runs ends by that."""
        if self.pipe is not None:
            self.pipe.close()
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
            self.group = None


def _exit_cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}; too little memory?" if name == "SIGKILL" else name
