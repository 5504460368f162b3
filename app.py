"""The service: settings in, one engine process and several HTTP worker processes out, all looked after here.

The supervisor knows neither torch nor HTTP. A process that dies is started again; a signal drains the service;
children notice the supervisor's end by their pipe and end too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogStyle, set_up_logging
from settings import Settings, SettingsError, parse_settings

logger = logging.getLogger("supervisor")
_spawn = multiprocessing.get_context("spawn")

_BACK_OFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 30.0
"""A process that has lived so long starts its back-off anew."""
_LAST_WORDS_S = 5.0
"""What processes get beyond --drain-timeout-s before they are killed."""
ENGINE_FACTORY = "rwkv_batch.engine:Engine"


def _engine_process(*arguments: Any) -> None:
    # Compute threads that spin while they wait are ruinous on cores shared with HTTP workers; read by OpenMP at load.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tqdm import tqdm

    from rwkv_batch.ipc.server import run_engine

    # tqdm's own lock holds a semaphore of the system, which an engine that is killed leaves behind, with a warning.
    tqdm.set_lock(threading.RLock())
    run_engine(*arguments)


def _http_process(*arguments: Any) -> None:
    from routes.serving.worker import run_http_worker

    run_http_worker(*arguments)


@dataclass
class Child:
    """One supervised process, through all its restarts."""

    name: str
    target: Callable[..., None]
    arguments: tuple[Any, ...]
    process: SpawnProcess | None = None
    pipe: Connection | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = field(default=0.0)

    def start(self) -> None:
        """Start the process with a fresh pipe."""
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=self.target, args=(*self.arguments, self.name, theirs), name=self.name)
        self.process.start()
        theirs.close()
        self.started = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.is_alive()

    def tell(self, command: str) -> None:
        """Send a command; a process that is gone does not hear it."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(command)

    def heard(self) -> Any:
        """What the process has said, or None."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe is not None and self.pipe.poll():
                return self.pipe.recv()
        return None

    def plan_restart(self) -> float:
        """Set the time of the next start; returns the wait in seconds."""
        if time.monotonic() - self.started > _STEADY_S:
            self.failures = 0
        delay = _BACK_OFF_S[min(self.failures, len(_BACK_OFF_S) - 1)]
        self.failures += 1
        self.restart_at = time.monotonic() + delay
        self.process = None
        return delay


class Supervisor:
    """Runs the service until a signal ends it."""

    def __init__(self, settings: Settings, engine_factory: str = ENGINE_FACTORY) -> None:
        self._settings = settings
        self._folder = tempfile.mkdtemp(prefix="rwkv-")
        address = os.path.join(self._folder, "engine")
        style = log_style(settings)
        self._engine = Child("engine", _engine_process, (settings.engine, address, engine_factory, style))
        self._workers = [
            Child(f"http-{number}", _http_process, (settings.http, address, style))
            for number in range(settings.service.http_workers)
        ]
        self._wake_read, self._wake_write = os.pipe()
        self._address = address
        self._was_ready = False
        self._signals = 0

    def run(self) -> int:
        """Serve; returns the exit code. Raises StartupError if the first start fails."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            for child in self._children():
                child.start()
            while not self._signals:
                self._look_after()
            self._drain()
            return 0
        finally:
            self._end_all()

    def _children(self) -> list[Child]:
        return [self._engine, *self._workers]

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        os.write(self._wake_write, b"!")

    def _look_after(self) -> None:
        now = time.monotonic()
        for child in self._children():
            if child.process is None and now >= child.restart_at:
                self._clear_address(child)
                child.start()
        sentinels = [child.process.sentinel for child in self._children() if child.process is not None]
        pipes = [self._engine.pipe] if self._engine.is_alive and self._engine.pipe is not None else []
        wait([self._wake_read, *sentinels, *pipes], timeout=self._next_restart())
        self._listen_to_engine()
        for child in self._children():
            if child.process is not None and not child.process.is_alive():
                self._reap(child)

    def _next_restart(self) -> float | None:
        waiting = [child.restart_at for child in self._children() if child.process is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _listen_to_engine(self) -> None:
        match self._engine.heard():
            case ("ready", _):
                if not self._was_ready:
                    http = self._settings.http
                    logger.info("serving %s on http://%s:%d", http.model_name, _bracketed(http.host), http.port)
                self._was_ready = True
            case ("failed", reason) if not self._was_ready:
                raise StartupError(reason)
            case ("failed", reason):
                logger.error("the engine did not start again: %s", reason)

    def _reap(self, child: Child) -> None:
        assert child.process is not None
        code = child.process.exitcode
        if child is self._engine:
            self._listen_to_engine()
            if not self._was_ready:
                raise StartupError(f"the engine process ended while starting ({_cause(code)})")
        child.process.join()
        delay = child.plan_restart()
        logger.error("process %s ended (%s); it is started again in %.1f s", child.name, _cause(code), delay)

    def _clear_address(self, child: Child) -> None:
        if child is self._engine:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)

    def _drain(self) -> None:
        """Refuse new work, let the running work end, store the states, end the processes."""
        timeout_s = self._settings.engine.drain_timeout_s
        logger.info("shutting down: running requests get %.0f s; a second signal ends them at once", timeout_s)
        deadline = time.monotonic() + timeout_s + _LAST_WORDS_S
        for child in self._children():
            child.tell("drain")
        self._await(lambda: not self._engine.is_alive or self._engine.heard() == ("drained", None), deadline)
        for worker in self._workers:
            worker.tell("finish")
        self._await(lambda: not any(worker.is_alive for worker in self._workers), deadline)
        self._engine.tell("end")
        self._await(lambda: not self._engine.is_alive, deadline)
        logger.info("stopped")

    def _await(self, condition: Callable[[], bool], deadline: float) -> None:
        while self._signals < 2 and time.monotonic() < deadline and not condition():
            time.sleep(0.02)

    def _end_all(self) -> None:
        for child in self._children():
            if child.is_alive and child.process is not None:
                child.process.kill()
                child.process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}; too little memory?" if name == "SIGKILL" else name


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def log_style(settings: Settings) -> LogStyle:
    """How every process logs."""
    return LogStyle(settings.service.log_format, settings.service.log_level)


def with_model(settings: Settings) -> Settings:
    """Settings with a model file: the given one, else the demo's. Raises StartupError if it cannot be read."""
    path = settings.engine.model_path
    if not path:
        path = str(_demo_model())
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise StartupError(f"model file {path} cannot be read ({error.strerror}); check --model-path") from None
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, model_path=path))


def _demo_model() -> Path:
    """The demo model's file; without one, random weights in the same form."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        from demo.files import ensure_model

        path = Path(ensure_model())
        logger.info("no --model-path given: serving the built-in demo model %s", path)
        return path
    path = Path(__file__).parent / "demo" / ".cache" / "random.pth"
    if not path.exists():
        from demo.random_weights import write_random_model

        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"half-{os.getpid()}.pth")
        write_random_model(half, layers=4, width=256)
        half.replace(path)
    logger.warning("no --model-path and no demo model: serving random weights (%s), whose text is meaningless", path)
    return path


def check_port(host: str, port: int) -> None:
    """Raise StartupError if the address cannot be listened on. Robyn shares a port with whoever has it already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} on {host} is in use; stop its owner or give another --port"
            else:
                reason = f"cannot listen on {host} port {port}: {error.strerror}; give another --host or --port"
            raise StartupError(reason) from None


def main(arguments: list[str]) -> int:
    """Run the service; returns the exit code: 2 for a bad flag, 1 for what cannot be served."""
    try:
        settings = parse_settings(arguments, os.environ)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    set_up_logging("supervisor", log_style(settings))
    try:
        check_port(settings.http.host, settings.http.port)
        return Supervisor(with_model(settings)).run()
    except StartupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
