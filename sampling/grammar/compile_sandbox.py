"""A process that compiles a grammar first, so that none can crash, stall or fill the engine's process.

llguidance bounds most of what it does, but not how deep it calls itself nor how long it rewrites. What passes here
passes there: it has less stack than any of the engine's threads. What does not ends the process, and is refused.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from sampling.grammar.constraint import Constraint
from sampling.grammar.errors import GrammarError

CPU_S = 2
"""Processor time for one grammar, rounded up to a whole second of the process."""
_PROGRAM = "sampling.grammar.compile_sandbox_process"
_FOLDER = str(Path(__file__).parents[__name__.count(".")])
_ENDED = (
    f"takes more than {CPU_S} s or too much memory to compile, or is nested too deeply; "
    "write it with fewer rules inside each other"
)

_UNSTARTED = (
    "the process that tries grammars cannot be started; if the service's files were changed while it runs, restart it"
)


class CompileSandbox:
    """Processes that try grammars, one for each thread that asks at a time. Any thread; started at the first need."""

    def __init__(self, byte_table: Sequence[bytes], vocab: int) -> None:
        """As GrammarCompiler has them."""
        self._vocabulary = list(byte_table), vocab
        self._idle: list[_Process] = []
        self._is_closed = False

    def check(self, constraint: Constraint) -> None:
        """Raises GrammarError if the grammar cannot be served."""
        process = self._next() or _Process(self._vocabulary)
        try:
            refusal = process.try_compile(constraint)
        except (OSError, EOFError, pickle.UnpicklingError):
            process.close()
            raise GrammarError(_ENDED) from None
        self._idle.append(process)
        if self._is_closed:
            self.close()
        if refusal is not None:
            message, place, field = refusal
            raise GrammarError(message, place, field)

    def close(self) -> None:
        """End the processes; one that tries a grammar ends behind it."""
        self._is_closed = True
        while process := self._next():
            process.close()

    def _next(self) -> _Process | None:
        """An idle process, for the caller alone; None: there is none. One that has ended is no grammar's fault."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:  # another thread may have taken the last one
                return None
            if process.is_alive:
                return process
            process.close()


class _Process:
    """The engine's end of one process."""

    def __init__(self, vocabulary: tuple[list[bytes], int]) -> None:
        program = f"import sys; sys.path.insert(0, {_FOLDER!r}); from {_PROGRAM} import serve; serve()"
        command = [sys.executable, "-c", program]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        try:
            send(self._to, vocabulary)
            receive(self._from)  # it is ready: what fails from now on is the grammar's
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.close()
            raise RuntimeError(_UNSTARTED) from error

    def try_compile(self, constraint: Constraint) -> tuple[str, str, str] | None:
        """Why it is refused: message, place, field. Raises OSError, EOFError if the process ended over it."""
        send(self._to, constraint)
        refusal: tuple[str, str, str] | None = receive(self._from)
        return refusal

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for stream in (self._to, self._from):
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()


def send(stream: IO[bytes], value: Any) -> None:
    """Write a value."""
    pickle.dump(value, stream)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read a value. Raises EOFError at the end."""
    return pickle.load(stream)  # noqa: S301 - from our own process, or from the engine
