"""Runs a command, stops it cleanly, and returns exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from programs.record import RunError
from programs.settings import reports_errors
from rwkv_batch.errors import StartupError

ALL_ANSWERED, SOME_FAILED, INTERRUPTED = 0, 3, 130
"""Exit codes, besides those of `reports_errors`."""


@reports_errors(RunError, StartupError)
def run_command(make: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a command. Returns the exit code. `make` checks the flags and returns the work."""
    try:
        return asyncio.run(_interruptible(make()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("error: stopped; give the same command again to resume\n")
        return INTERRUPTED


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Stop cleanly at SIGINT and SIGTERM. Finished answers are kept."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return int(await task)
