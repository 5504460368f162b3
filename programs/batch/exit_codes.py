"""Runs a command, stops it cleanly, and returns exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from programs.record import RunError
from programs.settings import SettingsError
from rwkv_batch.errors import StartupError

ALL_ANSWERED, CANNOT_RUN, BAD_FLAG, SOME_FAILED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""


def run_command(make: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a command. Returns the exit code. `make` checks the flags and returns the work."""
    try:
        return asyncio.run(_interruptible(make()))
    except SettingsError as error:
        return _print_error(str(error), BAD_FLAG)
    except (RunError, StartupError) as error:
        return _print_error(str(error), CANNOT_RUN)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _print_error("stopped; give the same command again to resume", INTERRUPTED)


def _print_error(error: str, code: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    return code


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Stop cleanly at SIGINT and SIGTERM. Finished answers are kept."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return int(await task)
