"""A child process that answers one call at a time.

It is for work on untrusted input. The child sets its own limits. If it passes one of them it ends, and the caller gets
OSError or EOFError.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_FOLDER = str(Path(__file__).parents[__name__.count(".")])
ENDED = (OSError, EOFError, pickle.UnpicklingError)
"""Exceptions of `Sandbox.call` if the process ended."""


def _command(module: str) -> list[str]:
    program = f"import sys; sys.path.insert(0, {_FOLDER!r}); from {module} import serve; serve()"
    return [sys.executable, "-c", program]


async def call_once(module: str, value: Any) -> Any:
    """Send a value to a new process and return its answer. If the task is cancelled, the process ends.

    Raises EOFError if the process passed a limit, and RuntimeError with its traceback if it failed.
    """
    import asyncio  # the sandbox processes, which import this module too, start without it

    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_command(module), stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        answer, errors = await process.communicate(await asyncio.to_thread(pickle.dumps, value))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if not answer and process.returncode == 1 and b"MemoryError" not in errors.rstrip().rpartition(b"\n")[2]:
        raise RuntimeError(f"{module} failed:\n{errors.decode(errors='replace')}")
    return await asyncio.to_thread(pickle.loads, answer)


class Sandbox:
    """Runs `serve()` of a module in another process. Not thread-safe."""

    def __init__(self, module: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(_command(module), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def call(self, value: Any) -> Any:
        """Sends a value and returns the answer. Raises one of ENDED; then the process is closed."""
        try:
            send(self._to, value)
            return receive(self._from)
        except ENDED:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        for stream in (self._to, self._from):
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()


class Sandboxes:
    """Runs processes of a module. At most one per calling thread, started on demand. Thread-safe."""

    def __init__(self, start: Callable[[], Sandbox]) -> None:
        self._start = start
        self._idle: list[Sandbox] = []
        self._is_closed = False

    def call(self, value: Any) -> Any:
        """Sends a value to a process and returns the answer. Raises one of ENDED if the process ended.

        RuntimeError: none can be started, which is not the value's fault.
        """
        try:
            sandbox = self._take_idle() or self._start()
        except OSError as error:
            raise RuntimeError(
                f"no process can be started ({error}); raise the limits of processes or memory"
            ) from error
        answer = sandbox.call(value)
        self._idle.append(sandbox)
        if self._is_closed:
            self.close()
        return answer

    def close(self) -> None:
        """End all processes. A process that answers a call ends after it."""
        self._is_closed = True
        while sandbox := self._take_idle():
            sandbox.close()

    def _take_idle(self) -> Sandbox | None:
        while True:
            try:
                sandbox = self._idle.pop()
            except IndexError:  # none, or another thread took the last one
                return None
            if sandbox.is_alive:
                return sandbox
            sandbox.close()


def send(stream: IO[bytes], value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Reads a value. Raises EOFError at the end of the stream."""
    return pickle.load(stream)  # noqa: S301 - both ends are this program


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process, and write no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_next_cpu(seconds: int) -> None:
    """End this process if it uses this much more CPU time. The limit is rounded up to a whole second."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
