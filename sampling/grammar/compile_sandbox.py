"""Compiles each grammar in another process first, to protect the engine's process.

llguidance limits most of its work, but not its recursion depth and not the time of its rewrites. The sandbox process
has less stack than any thread of the engine, so a grammar that passes here passes there. A grammar that exceeds the
limits kills the process and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from native.sandbox import ENDED, Sandbox
from sampling.grammar.constraint import Constraint, GrammarError

CPU_S = 2
"""CPU seconds per grammar. The process rounds up to a whole second."""
_PROGRAM = "sampling.grammar.compile_sandbox_process"
_ENDED = f"takes more than {CPU_S} s or 3 GiB to compile, or is nested too deeply; use fewer rules, nested less deeply"

_UNSTARTED = (
    "the grammar sandbox process did not start; if the service's files changed since its start, restart the service"
)


class CompileSandbox:
    """Runs sandbox processes. At most one per calling thread, started on demand. Thread-safe."""

    def __init__(self, byte_table: Sequence[bytes], vocab: int) -> None:
        self._vocabulary = list(byte_table), vocab
        self._idle: list[_Process] = []
        self._is_closed = False

    def check(self, constraint: Constraint) -> None:
        """Check that a grammar compiles within the limits. Raises GrammarError."""
        process = self._take_idle() or _Process(self._vocabulary)
        try:
            refusal = process.try_compile(constraint)
        except ENDED:
            process.close()
            raise GrammarError(_ENDED) from None
        self._idle.append(process)
        if self._is_closed:
            self.close()
        if refusal is not None:
            message, place, field = refusal
            raise GrammarError(message, place, field)

    def close(self) -> None:
        """End all processes. A process that is compiling ends after its grammar."""
        self._is_closed = True
        while process := self._take_idle():
            process.close()

    def _take_idle(self) -> _Process | None:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:  # none, or another thread took the last one
                return None
            if process.is_alive:
                return process
            process.close()


class _Process:
    """The engine's end of one sandbox process."""

    def __init__(self, vocabulary: tuple[list[bytes], int]) -> None:
        self._sandbox = Sandbox(_PROGRAM)
        try:
            self._sandbox.call(vocabulary)
        except ENDED as error:
            self.close()
            raise RuntimeError(_UNSTARTED) from error

    def try_compile(self, constraint: Constraint) -> tuple[str, str, str] | None:
        """Return the refusal (message, place, field), or None. Raises one of ENDED if the process ended."""
        refusal: tuple[str, str, str] | None = self._sandbox.call(constraint)
        return refusal

    @property
    def is_alive(self) -> bool:
        return self._sandbox.is_alive

    def close(self) -> None:
        self._sandbox.close()
