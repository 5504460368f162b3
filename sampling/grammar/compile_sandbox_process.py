"""The sandbox process of compile_sandbox.py: compiles grammars within limits.

Exceeding the limit of memory, stack or CPU time ends the process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from native.sandbox import limit_memory, limit_next_cpu, receive, send
from sampling.grammar.compile_sandbox import CPU_S
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint, GrammarError, TooComplexError, exceeds_limit, in_one_line

STACK_BYTES = 1 << 20
"""Half the stack of the engine's mask threads, which have the least."""
MEMORY_BYTES = 3 << 30
"""of the process: libraries, the vocabulary and a grammar"""
MASK_S = 0.25
"""for the first mask"""


def serve() -> None:
    """Answers grammars from standard input until it closes."""
    limit_memory(MEMORY_BYTES)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()


def _answer() -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    table, vocab = receive(source)
    # `list` stands for the tokenizer: only jump-forward tokens need it, and nothing here computes them.
    compiler = GrammarCompiler(table, list, vocab)
    send(answers, None)
    with contextlib.suppress(EOFError):
        while True:
            constraint = receive(source)
            limit_next_cpu(CPU_S)
            send(answers, _try_compile(compiler, constraint))


def _try_compile(compiler: GrammarCompiler, constraint: Constraint) -> tuple[str, str, str] | None:
    try:
        state = compiler.compile(constraint).templates[0].deep_copy()
        compiler.forget()
        started = time.thread_time()
        state.compute_bitmask()
        if time.thread_time() - started > MASK_S:
            return "its masks take too long to compute; write it with less ambiguity", "", ""
        if state.is_error():
            why = in_one_line(state.get_error())
            if exceeds_limit(why):
                raise TooComplexError(why)
            return "no text matches it; allow at least one", "", ""
    except GrammarError as error:
        return str(error), error.place, error.field
    return None
