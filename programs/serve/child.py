"""One supervised process: its pipe, its end, the time of its next start."""

from __future__ import annotations

import contextlib
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

_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STABLE_S = 30.0
"""A process that has lived so long starts its back-off anew."""
_JOIN_TIMEOUT_S = 5.0
"""A killed process that has not ended by then is waited for no more: the system holds it."""


def export_python_path() -> None:
    """Have processes that others are forked from find our modules wherever the command was started.

    Python 3.11 tells them nothing of `sys.path`, and what they cannot import each fork would import for itself.
    """
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in (*known, *site.getsitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, known)])


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failed starts in a row."""
    return _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]


@dataclass(eq=False)
class Child:
    """A process, through all its restarts."""

    name: str
    context: SpawnContext | ForkedContext
    target: Callable[..., None]
    arguments: tuple[Any, ...]
    """What `target` gets before the process's name and its end of the pipe."""
    process: BaseProcess | None = None
    pipe: Connection | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = field(default=0.0)
    group: int | None = None
    """Of processes that it has started and that end with it, whatever ends it."""

    def start(self) -> None:
        """Start the process with a fresh pipe. Raises EOFError, OSError if it cannot be forked."""
        self.pipe, theirs = self.context.Pipe()
        process = self.context.Process(target=self.target, args=(*self.arguments, self.name, theirs), name=self.name)
        process.start()
        self.process = process
        theirs.close()
        self.started = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.is_alive()

    @property
    def was_forked(self) -> bool:
        """Whether there is a process, or was: one that forks others may be lost before."""
        return self.process is not None and self.process.pid is not None

    @property
    def waitables(self) -> list[Any]:
        """What becomes readable when the process speaks or ends."""
        if self.process is None or self.pipe is None:
            return []
        return [self.process.sentinel] if self.pipe.closed else [self.process.sentinel, self.pipe]

    def send_command(self, command: object) -> None:
        """Send a command; a process that is gone does not hear it."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(command)

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What the process has said: (subject, value)."""
        if self.pipe is None or self.pipe.closed:
            return
        try:
            while self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.pipe.close()  # its end of the pipe is gone, so will be the process

    def reap(self) -> str:
        """Why the process has ended. It must have."""
        assert self.process is not None
        self.process.join(_JOIN_TIMEOUT_S)
        code = self.process.exitcode
        self.close()
        self.process = None
        return _exit_cause(code)

    def schedule_restart(self) -> float:
        """Set the time of the next start; returns the wait in seconds."""
        if time.monotonic() - self.started > _STABLE_S:
            self.failures = 0
        delay = backoff_s(self.failures)
        self.failures += 1
        self.restart_at = time.monotonic() + delay
        return delay

    def end(self) -> None:
        """End the process, which is to be reaped."""
        if self.is_alive and self.process is not None:
            self.process.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self.is_alive and self.process is not None:
            self.end()
            self.process.join(_JOIN_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Close the pipe; a process that still lives ends of it."""
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
