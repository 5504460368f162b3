"""The other end of `compile_sandbox.py`: a process that compiles what it is sent within bounds, and ends where it passes them."""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time

from sampling.grammar.compile_sandbox import CPU_S, receive, send
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint
from sampling.grammar.errors import GrammarError, TooComplexError, exceeds_limit, in_one_line

STACK_BYTES = 1 << 20
"""Half of what the threads have that compute masks; those that compile and the engine's own have more."""
MEMORY_BYTES = 3 << 30
"""Address space of the process: its libraries, the vocabulary, and a grammar."""
MASK_S = 0.25
"""Processor time of the first mask."""


def serve() -> None:
    """Try what comes over standard input until it is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()


def _answer() -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    table, vocab = receive(source)
    # Text is encoded for tokens that are certain, which nobody asks for here.
    compiler = GrammarCompiler(table, list, vocab)
    send(answers, None)
    with contextlib.suppress(EOFError):
        while True:
            constraint = receive(source)
            used = resource.getrusage(resource.RUSAGE_SELF)
            most = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))  # ends the process
            send(answers, _refusal(compiler, constraint))


def _refusal(compiler: GrammarCompiler, constraint: Constraint) -> tuple[str, str, str] | None:
    try:
        state = compiler.compile(constraint).templates[0].deep_copy()
        compiler.forget()
        started = time.thread_time()
        state.compute_bitmask()
        if time.thread_time() - started > MASK_S:
            return "its masks take too long; write it with less ambiguity", "", ""
        if state.is_error():
            why = in_one_line(state.get_error())
            if exceeds_limit(why):
                raise TooComplexError(why)
            return "no text matches it, or none that can be written from its beginning on", "", ""
    except GrammarError as error:
        return str(error), error.place, error.field
    return None
