"""Compiles each grammar in another process first, to protect the engine's process.

llguidance limits most of its work, but not its recursion depth and not the time of its rewrites. The sandbox process
has less stack than any thread of the engine, so a grammar that passes here passes there. A grammar that exceeds the
limits kills the process and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from native.sandbox import ENDED, Sandbox, Sandboxes
from sampling.grammar.constraint import Constraint, GrammarError

CPU_S = 2
"""CPU seconds per grammar. The process rounds up to a whole second."""
_PROGRAM = "sampling.grammar.compile_sandbox_process"
_ENDED = f"takes more than {CPU_S} s or 3 GiB to compile, or is nested too deeply; use fewer rules, nested less deeply"
_UNSTARTED = (
    "the grammar sandbox process did not start; if the service's files changed since its start, restart the service"
)


class CompileSandbox:
    """Compiles grammars in sandbox processes. Thread-safe."""

    def __init__(self, byte_table: Sequence[bytes], vocab: int) -> None:
        self._vocabulary = list(byte_table), vocab
        self._sandboxes = Sandboxes(self._start)

    def _start(self) -> Sandbox:
        sandbox = Sandbox(_PROGRAM)
        try:
            sandbox.call(self._vocabulary)
        except ENDED as error:
            raise RuntimeError(_UNSTARTED) from error
        return sandbox

    def check(self, constraint: Constraint) -> None:
        """Check that a grammar compiles within the limits. Raises GrammarError."""
        try:
            refusal = self._sandboxes.call(constraint)
        except ENDED:
            raise GrammarError(_ENDED) from None
        if refusal is not None:
            message, place, field = refusal
            raise GrammarError(message, place, field)

    def close(self) -> None:
        """End all processes. A process that is compiling ends after its grammar."""
        self._sandboxes.close()
