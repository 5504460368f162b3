"""Processes that are forked from a server process.

The server has imported all they need. HTTP workers are forked, because their imports take two seconds. So are engines
of loaded models: importing torch and building the tokenizer's tables takes three seconds of a core, which running
streams would lack. The server starts no thread. Callers never wait for it, and its forks outlive it: the system
reports their end, the server their exit code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import time
from multiprocessing import popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from typing import Any

SUPERVISOR = "RWKV_SUPERVISOR"
"""Environment variable of a fork server: the process id of the supervisor."""
_FORK_SERVER_MODULE = "programs.serve.fork_server"
"""Module that the fork server imports first."""
MAX_PENDING_FORKS = 64
"""Maximum pending forks. The server's socket queues 128, and a further request would block."""
_EXIT_CODE_UNKNOWN = 255
"""Exit code of a process whose server is gone, as in multiprocessing."""
_STATUS_TIMEOUT_S = 1.0
"""Seconds to wait for the server's report of an exit code. The server may be stopped."""


class _Server(ForkServer):
    def __init__(self, preload: list[str]) -> None:
        super().__init__()
        self.set_forkserver_preload(preload)
        self.is_unresponsive = False
        """Whether a report of an exit code timed out."""
        self._pending: set[int] = set()
        """Status descriptors of pending forks."""
        self._abandoned: set[int] = set()
        """Pending forks without a reader."""

    def request_process(self, descriptors: list[int]) -> tuple[int, int]:
        """Requests a process with these descriptors. Returns its status descriptor and its payload descriptor.

        Raises OSError if it cannot be forked now.
        """
        for status_fd in wait(list(self._abandoned), 0):
            assert isinstance(status_fd, int)
            self._abandoned.discard(status_fd)
            self._pending.discard(status_fd)
            os.close(status_fd)
        if len(self._pending) >= MAX_PENDING_FORKS:
            raise BlockingIOError(errno.EAGAIN, f"{MAX_PENDING_FORKS} processes are waiting to be forked; retry later")
        try:
            status_fd, input_fd = self.connect_to_new_process(descriptors)
        except ConnectionRefusedError:  # the server was killed and is not reaped yet
            self._stop()  # type: ignore[attr-defined]
            status_fd, input_fd = self.connect_to_new_process(descriptors)
        self._pending.add(status_fd)
        return status_fd, input_fd

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()  # it would unblock SIGINT
        os.environ[SUPERVISOR] = str(os.getpid())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new server inherits it, and unblocks
        try:
            super().ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            del os.environ[SUPERVISOR]

    def mark_forked(self, status_fd: int) -> None:
        self._pending.discard(status_fd)

    def abandon(self, status_fd: int) -> None:
        """Drops the reader of a status. The pending fork is still tracked by it."""
        if status_fd in self._pending:
            self._abandoned.add(status_fd)
        else:
            os.close(status_fd)

    def end(self) -> None:
        server: Any = self  # multiprocessing offers this to its own tests only
        with server._lock:
            if server._forkserver_pid is not None:
                os.kill(server._forkserver_pid, signal.SIGKILL)
                server._stop_unlocked()


class _NoProcess:
    """Replaces a process that was killed before its fork."""

    def _bootstrap(self, parent_sentinel: int) -> int:
        return 0


class _Forked(popen_forkserver.Popen):
    """A process that the server forks later. Callers do not wait for it, and may kill it before."""

    pid: int | None  # type: ignore[assignment]
    _fds: list[int]

    def __init__(self, process: ForkedProcess) -> None:
        self._server = process.server
        self._last_signal = 0
        """The last signal sent."""
        super().__init__(process)

    def _launch(self, process_obj: ForkedProcess) -> None:
        self.pid = None
        self._data = _pickled(_preparation_data(process_obj.name), process_obj, self)
        self._status_fd, self._input_fd = self._server.request_process(self._fds)
        self.sentinel = self._status_fd
        self.finalizer = util.Finalize(self, self._server.abandon, (self._status_fd,))
        self._close_input = util.Finalize(self, os.close, (self._input_fd,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Returns the exit code. None while the process is pending or runs. Never waits."""
        while self.returncode is None and wait([self.sentinel], 0):
            if self.sentinel == self._status_fd:
                self._read_status()
            else:
                self.returncode = self._reported_exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the exit code. Returns None after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            wait([self.sentinel], left)
        return self.returncode

    def _read_status(self) -> None:
        """Reads the server's reports: the process id, then the exit code."""
        try:
            number = read_signed(self._status_fd)
        except (OSError, EOFError):
            self._handle_server_loss()
            return
        self._server.is_unresponsive = False
        if self.pid is None:
            self.pid = number
            self._server.mark_forked(self._status_fd)
            self._open_pidfd()  # before it gets its work, so that its process id cannot be reused yet
            self._send_payload(self._data)
        else:
            self.returncode = number

    def _open_pidfd(self) -> bool:
        """Opens a pidfd for the end of the process. Returns False if that fails, e.g. without free descriptors."""
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
        elif not self._open_pidfd():  # its end would go unnoticed
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = _EXIT_CODE_UNKNOWN

    def _reported_exit_code(self) -> int:
        """Returns the exit code that the server reports.

        If no report comes in time, returns minus the last signal or _EXIT_CODE_UNKNOWN.
        """
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
        with contextlib.suppress(ProcessLookupError):  # it has just ended and the report is pending
            if self.sentinel == self._status_fd:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self.sentinel, number)

    def _send_payload(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError), open(self._input_fd, "wb", closefd=False) as pipe:
            pipe.write(data)


class ForkedProcess(BaseProcess):
    """See `ForkedContext`."""

    _start_method = "forkserver"
    _popen: _Forked
    server: _Server

    @property
    def sentinel(self) -> int:
        """Descriptor to wait for. Becomes readable at the server's report, then at the end of the process."""
        return self._popen.sentinel

    @staticmethod
    def _Popen(process_obj: ForkedProcess) -> _Forked:  # noqa: N802 - as multiprocessing calls it
        return _Forked(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}


class ForkedContext(ForkServerContext):
    """Context of processes from one server that imported `preload`. They do not run `__main__`."""

    def __init__(self, *preload: str) -> None:
        self._server = _Server([_FORK_SERVER_MODULE, __name__, *preload])

    def Process(self, **arguments: Any) -> ForkedProcess:  # type: ignore[override] # noqa: N802 - likewise
        """Creates a process without starting it."""
        process = ForkedProcess(**arguments)
        process.server = self._server
        return process

    def end(self) -> None:
        """Ends the server. Its forks continue."""
        self._server.end()


def _preparation_data(name: str) -> dict[str, Any]:
    """Returns multiprocessing's preparation data without the main module. Each fork would run that module again."""
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main_from")}


def _pickled(preparation: dict[str, Any], process: ForkedProcess | _NoProcess, popen: _Forked) -> bytes:
    """Returns the payload that a forked process reads first."""
    data = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, data)
        reduction.dump(process, data)
    finally:
        set_spawning_popen(None)
    return data.getvalue()
