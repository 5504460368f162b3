"""Engines of models that are loaded while serving are forked from a process that has imported all they need.

To import torch and to make the tokenizer's tables takes three seconds of a core, which streams would miss with every
model that comes. The process is started with the first such model, and starts no thread. Engines outlive it.
"""

from __future__ import annotations

import contextlib
import io
import os
from multiprocessing import popen_forkserver, reduction, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from typing import Any

PRELOADED = "rwkv_batch.ipc.preload"
"""What the engine needs."""
_LOST = 255
"""Exit code of a process whose server had gone, as multiprocessing has it."""


class _Nobody:
    """Takes the place of a process that was killed before it was forked."""

    def _bootstrap(self, parent_sentinel: int) -> int:
        return 0


class _Forked(popen_forkserver.Popen):
    """A process that the server forks once it can: nobody waits for that, and it may be killed before."""

    pid: int | None  # type: ignore[assignment]
    _fds: list[int]

    def __init__(self, process: ForkedProcess) -> None:
        self._server = process.server
        self._outlived_server = False
        super().__init__(process)

    def _launch(self, process_obj: ForkedProcess) -> None:
        self.pid = None
        self._data = _pickled(_preparation(process_obj.name), process_obj, self)
        self.sentinel, self._to_child = self._connected()
        self.finalizer = util.Finalize(self, _close, (self._to_child, self.sentinel))

    def _connected(self) -> tuple[int, int]:
        try:
            return self._server.connect_to_new_process(self._fds)
        except ConnectionRefusedError:  # it was killed a moment ago, and does not count as ended yet
            self._server._stop()  # type: ignore[attr-defined]
            return self._server.connect_to_new_process(self._fds)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; None: it runs, or is yet to be forked."""
        while self.returncode is None:
            if not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            if self._outlived_server:
                self.returncode = _LOST
                break
            try:
                number = read_signed(self.sentinel)
            except (OSError, EOFError):
                self._follow_without_server()
                continue
            if self.pid is None:
                self.pid = number
                self._tell(self._data)
            else:
                self.returncode = number
        return self.returncode

    def _follow_without_server(self) -> None:
        """Nobody will say how the process ended; the system says when."""
        try:
            if self.pid is None:
                raise ProcessLookupError("it was never forked")
            self.sentinel = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self.pid, self.returncode = self.pid or 0, _LOST
        else:
            util.Finalize(self, _close, (self.sentinel,))
            self._outlived_server = True

    def _send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self.pid is None:
            self._tell(_pickled({}, _Nobody(), self))
            self.returncode = -number
        else:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and the server is yet to say so
                os.kill(self.pid, number)

    def _tell(self, data: bytes) -> None:
        """Give the process what it is to do."""
        with contextlib.suppress(BrokenPipeError), open(self._to_child, "wb", closefd=False) as pipe:
            pipe.write(data)


class ForkedProcess(BaseProcess):
    """See `ForkedContext`."""

    _start_method = "forkserver"
    _popen: _Forked
    server: ForkServer

    @property
    def sentinel(self) -> int:
        """What becomes readable when something is known of it: its server's word, or its own end without a server."""
        return self._popen.sentinel

    @staticmethod
    def _Popen(process_obj: ForkedProcess) -> _Forked:  # noqa: N802 - as multiprocessing calls it
        return _Forked(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}


class ForkedContext(ForkServerContext):
    """Processes from a server of their own, which has imported `preload`. What they do is in no `__main__`."""

    def __init__(self, *preload: str) -> None:
        self._server = ForkServer()
        self._server.set_forkserver_preload([__name__, *preload])

    def Process(self, **arguments: Any) -> ForkedProcess:  # type: ignore[override] # noqa: N802 - likewise
        """A process that is not started."""
        process = ForkedProcess(**arguments)
        process.server = self._server
        return process


def _preparation(name: str) -> dict[str, Any]:
    """What a process is told before its work, but for the main module, which each would run anew."""
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main_from")}


def _close(*descriptors: int) -> None:
    for one in descriptors:
        os.close(one)


def _pickled(preparation: dict[str, Any], process: ForkedProcess | _Nobody, popen: _Forked) -> bytes:
    """What a forked process reads first."""
    data = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, data)
        reduction.dump(process, data)
    finally:
        set_spawning_popen(None)
    return data.getvalue()
