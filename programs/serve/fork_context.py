"""Processes that are forked from another one, which has imported all they need, and may not have yet.

HTTP workers are, so that one that takes over need not import for two seconds; so are engines of models that are loaded
while serving: to import torch and to make the tokenizer's tables takes three seconds of a core, which streams would
miss with every model that comes. The process that forks is started with the first, and starts no thread. Nobody waits
for it, and what it has forked outlives it: the system says when that ends, it says how.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import time
from multiprocessing import popen_forkserver, reduction, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from typing import Any

SUPERVISOR = "RWKV_SUPERVISOR"
"""Environment variable of a process that forks others: the number of the one that started it."""
_FIRST = "programs.serve.fork_server"
"""What it imports first; nobody else does."""
MAX_PENDING_FORKS = 64
"""Processes that wait to be forked at a time: the server's socket holds 128, and who asks it for more has to wait."""
_EXIT_CODE_UNKNOWN = 255
"""Exit code of a process whose server had gone, as multiprocessing has it."""
_STATUS_TIMEOUT_S = 1.0
"""How long a server is waited for that is to say how a process ended; it may be stopped."""


class _Server(ForkServer):
    """Imports, then forks what it was asked for."""

    def __init__(self, preload: list[str]) -> None:
        super().__init__()
        self.set_forkserver_preload(preload)
        self.is_unresponsive = False
        """It has not said in time how a process ended."""
        self._pending: set[int] = set()
        """For each process that it is yet to fork: from where its word comes."""
        self._abandoned: set[int] = set()
        """Those of them that nobody listens to any more."""

    def request_process(self, descriptors: list[int]) -> tuple[int, int]:
        """Ask for a process that has these; returns from where word of it comes, and where its work is written to.

        Raises OSError: it cannot be forked now.
        """
        for status_fd in wait(list(self._abandoned), 0):
            assert isinstance(status_fd, int)
            self._abandoned.discard(status_fd)
            self._pending.discard(status_fd)
            os.close(status_fd)
        if len(self._pending) >= MAX_PENDING_FORKS:
            raise BlockingIOError(errno.EAGAIN, f"{MAX_PENDING_FORKS} processes wait to be forked already")
        try:
            status_fd, input_fd = self.connect_to_new_process(descriptors)
        except ConnectionRefusedError:  # it was killed a moment ago, and does not count as ended yet
            self._stop()  # type: ignore[attr-defined]
            status_fd, input_fd = self.connect_to_new_process(descriptors)
        self._pending.add(status_fd)
        return status_fd, input_fd

    def ensure_running(self) -> None:
        """See ForkServer."""
        os.environ[SUPERVISOR] = str(os.getpid())
        try:
            super().ensure_running()
        finally:
            del os.environ[SUPERVISOR]

    def mark_forked(self, status_fd: int) -> None:
        """That process waits no more."""
        self._pending.discard(status_fd)

    def abandon(self, status_fd: int) -> None:
        """Nobody listens to that any more; whether its process is yet to be forked is still seen by it."""
        if status_fd in self._pending:
            self._abandoned.add(status_fd)
        else:
            os.close(status_fd)

    def end(self) -> None:
        """End it at once, whatever it does."""
        server: Any = self  # what multiprocessing has for its own tests
        with server._lock:
            if server._forkserver_pid is not None:
                os.kill(server._forkserver_pid, signal.SIGKILL)
                server._stop_unlocked()


class _NoProcess:
    """Takes the place of a process that was killed before it was forked."""

    def _bootstrap(self, parent_sentinel: int) -> int:
        return 0


class _Forked(popen_forkserver.Popen):
    """A process that the server forks once it can: nobody waits for that, and it may be killed before."""

    pid: int | None  # type: ignore[assignment]
    _fds: list[int]

    def __init__(self, process: ForkedProcess) -> None:
        self._server = process.server
        self._last_signal = 0
        """The last signal that it was sent."""
        super().__init__(process)

    def _launch(self, process_obj: ForkedProcess) -> None:
        self.pid = None
        self._data = _pickled(_preparation_data(process_obj.name), process_obj, self)
        self._status_fd, self._input_fd = self._server.request_process(self._fds)
        self.sentinel = self._status_fd
        self.finalizer = util.Finalize(self, self._server.abandon, (self._status_fd,))
        self._close_input = util.Finalize(self, os.close, (self._input_fd,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; None: it runs, or is yet to be forked. Waits for neither, whatever `flag` is."""
        while self.returncode is None and wait([self.sentinel], 0):
            if self.sentinel == self._status_fd:
                self._read_status()
            else:
                self.returncode = self._reported_exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, once there is one; None: there is none after so many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            wait([self.sentinel], left)
        return self.returncode

    def _read_status(self) -> None:
        """Take the server's word: the number of the process, then its exit code."""
        try:
            number = read_signed(self._status_fd)
        except (OSError, EOFError):
            self._handle_server_loss()
            return
        self._server.is_unresponsive = False
        if self.pid is None:
            self.pid = number
            self._server.mark_forked(self._status_fd)
            self._follow()  # before it has its work, so that it cannot have ended and another one have its number
            self._send_payload(self._data)
        else:
            self.returncode = number

    def _follow(self) -> bool:
        """Have the system say when it ends; False: that cannot be had, as where there are no descriptors left."""
        try:
            assert self.pid is not None
            self.sentinel = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return False
        util.Finalize(self, os.close, (self.sentinel,))
        return True

    def _handle_server_loss(self) -> None:
        if self.pid is None:
            self._server.mark_forked(self._status_fd)
            self.returncode = _EXIT_CODE_UNKNOWN
        elif not self._follow():  # nobody would see its end
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = _EXIT_CODE_UNKNOWN

    def _reported_exit_code(self) -> int:
        """How it ended: the server's word, if that comes soon."""
        self._server.is_unresponsive = not wait(
            [self._status_fd], 0 if self._server.is_unresponsive else _STATUS_TIMEOUT_S
        )
        if not self._server.is_unresponsive:
            with contextlib.suppress(OSError, EOFError):
                return int(read_signed(self._status_fd))
        return -self._last_signal or _EXIT_CODE_UNKNOWN

    def _send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self.pid is None:
            self._send_payload(_pickled({}, _NoProcess(), self))
            self._close_input()
            self.returncode = -number
            return
        self._last_signal = number
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and the server is yet to say so
            if self.sentinel == self._status_fd:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self.sentinel, number)

    def _send_payload(self, data: bytes) -> None:
        """Give the process what it is to do."""
        with contextlib.suppress(BrokenPipeError), open(self._input_fd, "wb", closefd=False) as pipe:
            pipe.write(data)


class ForkedProcess(BaseProcess):
    """See `ForkedContext`."""

    _start_method = "forkserver"
    _popen: _Forked
    server: _Server

    @property
    def sentinel(self) -> int:
        """What becomes readable when something is known of it: its server's word, then its own end."""
        return self._popen.sentinel

    @staticmethod
    def _Popen(process_obj: ForkedProcess) -> _Forked:  # noqa: N802 - as multiprocessing calls it
        return _Forked(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}


class ForkedContext(ForkServerContext):
    """Processes from a server of their own, which has imported `preload`. What they do is in no `__main__`."""

    def __init__(self, *preload: str) -> None:
        self._server = _Server([_FIRST, __name__, *preload])

    def Process(self, **arguments: Any) -> ForkedProcess:  # type: ignore[override] # noqa: N802 - likewise
        """A process that is not started."""
        process = ForkedProcess(**arguments)
        process.server = self._server
        return process

    def end(self) -> None:
        """End the server; what it has forked goes on."""
        self._server.end()


def _preparation_data(name: str) -> dict[str, Any]:
    """What a process is told before its work, but for the main module, which each would run anew."""
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main_from")}


def _pickled(preparation: dict[str, Any], process: ForkedProcess | _NoProcess, popen: _Forked) -> bytes:
    """What a forked process reads first."""
    data = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, data)
        reduction.dump(process, data)
    finally:
        set_spawning_popen(None)
    return data.getvalue()
