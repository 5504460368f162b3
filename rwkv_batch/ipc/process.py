"""Common setup of the service's processes: process group, signals, logging, garbage collection."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from native.futexes import fix_futex_table
from native.heap import limit_malloc_arenas
from rwkv_batch.line_breaks import escape_line_breaks

logger = logging.getLogger(__name__)

_NOISY_LOGGERS = ("robyn", "actix_server", "actix_http", "actix_web", "asyncio")
"""They log every step of their start."""


SWITCH_INTERVAL_S = 0.001
"""Seconds after which a thread releases Python's lock, so that events of other rows do not wait for launches."""


_GARBAGE_OBJECTS = 100_000
"""Threshold of the youngest generation. Steps reach Python's default of 700 several times each."""


_RED, _YELLOW, _GREEN, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
"""Escape sequences of a terminal."""


class LogConfig(msgspec.Struct, frozen=True):
    form: str = "text"
    level: str = "info"


class _Text(logging.Formatter):
    """The message, then the record's `fields` as name=value. On a terminal, problems and headlines are coloured."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d {process:<10} %(levelname)-7s %(message)s", "%H:%M:%S")
        self._has_colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields: dict[str, object] = getattr(record, "fields", {})
        line = super().formatMessage(record) + "".join(f" {name}={value}" for name, value in fields.items())
        if self._has_colours and (colour := self._colour(record)):
            return f"{colour}{line}{_PLAIN}"
        return line

    @staticmethod
    def _colour(record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return _RED if record.levelno >= logging.ERROR else _YELLOW
        return _GREEN if getattr(record, "is_headline", False) else ""


class _Json(logging.Formatter):
    """One JSON object per line, including the record's `fields`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escape_line_breaks(msgspec.json.encode(line)).decode()


def set_up_logging(process: str, log_config: LogConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(process) if log_config.form == "json" else _Text(process))
    logging.basicConfig(handlers=[handler], level=log_config.level.upper(), force=True)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def become_child(process: str, log_config: LogConfig) -> None:
    """Set up a supervised process before it starts threads.

    It ignores signals of the group, which are for the supervisor. An uncaught exception in a thread ends the process.

    It stays in the supervisor's session: sched_autogroup shares the cores evenly between sessions, regardless of thread
    priorities. Otherwise one low-priority thread could take the time of many normal ones.
    """
    limit_malloc_arenas()
    fix_futex_table()
    threading.excepthook = _exit_on_thread_error
    faulthandler.enable()  # logs the stacks on a crash in native code
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    # SIGTTOU: a terminal with `stty tostop` would stop background processes that log.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    set_up_logging(process, log_config)


def _exit_on_thread_error(args: threading.ExceptHookArgs) -> None:
    """End the process when a thread dies of an exception. The supervisor restarts it.

    Without this, the process would continue without that thread.
    """
    if args.exc_type is SystemExit or sys.is_finalizing():
        return
    name = args.thread.name if args.thread is not None else "(unnamed)"
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    logger.critical("the thread %s has died; ending the process for a restart", name, exc_info=error)
    logging.shutdown()
    os._exit(1)


def set_compute_environment() -> None:
    """Call before torch is imported."""
    # Spinning compute threads would take the cores from the HTTP workers. OpenMP reads this when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection during imports, whose objects stay.

    Collections would walk all of them. The remaining garbage is 1.6 MB. Finding it would take 0.1 to 0.2 s per start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection. Call when everything is loaded.

    Otherwise a full collection stops every row for 100 ms. Reference counts free the objects of steps. The few cycles
    of ended requests can wait for 100,000 new objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS)
