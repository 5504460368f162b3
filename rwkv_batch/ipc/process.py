"""What every process of the service does first: a process group of its own, and log lines that say who speaks."""

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

logger = logging.getLogger(__name__)

SLOW_GC_S = 0.001
"""Collections of garbage that take longer are told in the log, at level debug."""
_NOISY_LOGGERS = ("robyn", "actix_server", "actix_http", "actix_web", "asyncio")
"""Libraries that tell every step of their start."""


SWITCH_INTERVAL_S = 0.001
"""How long a thread that wants Python's lock lets another have it: events of other rows must not wait out launches."""


_GARBAGE_OBJECTS = 100_000
"""New objects after which the youngest are searched for cycles; Python's 700 are made several times a step."""


class LogStyle(msgspec.Struct, frozen=True):
    """How log lines look and which are written."""

    form: str = "text"
    """"text" or "json"."""
    level: str = "info"


class _Text(logging.Formatter):
    """The message, then the record's `fields` as name=value."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d {process:<10} %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See logging.Formatter."""
        fields: dict[str, object] = getattr(record, "fields", {})
        return super().formatMessage(record) + "".join(f" {name}={value}" for name, value in fields.items())


class _Json(logging.Formatter):
    """One JSON object per line; the record's `fields` stand beside the message."""

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
        return msgspec.json.encode(line).decode()


def set_up_logging(process: str, style: LogStyle) -> None:
    """Send this process's log lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(process) if style.form == "json" else _Text(process))
    logging.basicConfig(handlers=[handler], level=style.level.upper(), force=True)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if logger.isEnabledFor(logging.DEBUG):
        gc.callbacks.append(_SlowGcLogger())


class _SlowGcLogger:
    """Logs collections of garbage that stop this process's threads for a while."""

    def __init__(self) -> None:
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """See gc.callbacks."""
        if phase == "start":
            self._began = time.monotonic()
        elif (duration_s := time.monotonic() - self._began) > SLOW_GC_S:
            found = {"at_s": self._began, "ms": round(duration_s * 1e3, 1), "generation": info["generation"]}
            logger.debug("collection %s", msgspec.json.encode(found).decode())


def become_child(process: str, style: LogStyle) -> None:
    """Start of a supervised process, before it has threads: signals of a group are the supervisor's business, and a
    thread that dies ends it.

    It stays in the supervisor's session: Linux gives sessions like shares of the cores (sched_autogroup), whatever
    their threads' priorities. In one of its own, a single thread that stands back would go before each of many others.
    """
    limit_malloc_arenas()
    fix_futex_table()
    threading.excepthook = _exit_on_thread_error
    faulthandler.enable()  # a crash in native code leaves the stacks in the log
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    # The last one: log lines go to a terminal that would stop those in the background (stty tostop).
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    set_up_logging(process, style)


def _exit_on_thread_error(args: threading.ExceptHookArgs) -> None:
    """A thread has died of an exception: without it the process would go on and do half of its work, unseen.

    The supervisor starts it anew.
    """
    if args.exc_type is SystemExit or sys.is_finalizing():
        return
    name = args.thread.name if args.thread is not None else "of no name"
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    logger.critical("the thread %s has died; its process ends, to be started anew", name, exc_info=error)
    logging.shutdown()
    os._exit(1)


def set_compute_environment() -> None:
    """For a process that will import torch, before it does."""
    # Compute threads that spin while they wait are ruinous on cores shared with HTTP workers; read by OpenMP at load.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """For imports: what they make stays, and each collection would walk it.

    So does what they leave as garbage, 1.6 MB: to find it would take 0.1 to 0.2 s of each start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_garbage_collector() -> None:
    """Called when everything is loaded, which stays: a full collection that walks all of it stops every row for 100 ms.

    What steps make is freed by reference counts; the few cycles of requests that ended can wait for a hundred thousand
    objects more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS)
