"""Starts Python programs as forks of a process that has imported what the service imports.

Imports take most of a service's start. They are done once for each worker of pytest. What a program spawns through
multiprocessing (engines, fork servers) is forked as well, where Python would start anew. All else is the same: the
program's arguments, environment, descriptors and parent. Only /proc shows another command line.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
RUN_AGAIN = ("routes.serving.preload", "rwkv_batch.ipc.preload")
"""Modules that set up a process. Each process runs them itself."""
IMPORTS = (
    "routes.serving.preload",
    "rwkv_batch.engine",
    *RUN_AGAIN,
    "app",
    "routes.serving.worker",
    "programs.serve.batches.process",
    "programs.batch.command",
)
MAX_REQUEST_BYTES = 128 << 10
_lock = threading.Lock()
_spawn = util.spawnv_passfds


class Preloaded(subprocess.Popen[Any]):
    """A Python program: [sys.executable, "-P" or nothing, file, arguments]. Of Popen's options: streams, env, cwd."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        cwd, env, pipes = options[4], options[5], options[9:15]
        streams = [mine if mine != -1 else number for number, mine in enumerate((pipes[0], pipes[3], pipes[5]))]
        environment = dict(os.environ if env is None else env)
        self.pid, _ = _request([[str(one) for one in args[1:]], environment, str(cwd or Path.cwd())], streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As `os.waitpid`, by the process that imported: it is the program's parent."""
        while True:
            ended, status = _request(self.pid)
            if ended or flags & os.WNOHANG:
                return ended, status
            time.sleep(0.02)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            ended, status = self._try_wait(os.WNOHANG)
            if ended:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def _request(what: Any, descriptors: Sequence[int] = ()) -> tuple[int, int]:
    """Send a program to start, or a process id to wait for. Returns a process id, 0 if it runs, and its status."""
    with _lock:
        socket.send_fds(_origin(), [json.dumps(what).encode()], descriptors)
        answer = _origin().recv(64)
    assert answer, "the process that imports has ended"
    return tuple(json.loads(answer))


@functools.cache
def _origin() -> socket.socket:
    """Start the process that imports, and return a connection to it. It ends with this process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from test import preloaded; preloaded.serve({theirs.fileno()})"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RWKV_", "PYTHONPATH"))}
    with theirs:
        subprocess.Popen([sys.executable, "-c", code], cwd="/", env=clean, pass_fds=[theirs.fileno()])
    return mine


def serve(descriptor: int) -> None:
    """Fork for each request, until the other side closes. A fork does not return."""
    paths = sys.path[1:]
    for name in IMPORTS:
        importlib.import_module(name)
    for name in RUN_AGAIN:
        del sys.modules[name]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            data, streams, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
            if not data:
                os._exit(0)
            request = json.loads(data)
            if not streams:
                answer = (request, 0)  # another thread has its status
                with contextlib.suppress(ChildProcessError):
                    answer = os.waitpid(request, os.WNOHANG)
            elif (program := os.fork()) == 0:
                break
            else:
                answer = (program, 0)
            for stream in streams:
                os.close(stream)
            requests.send(json.dumps(answer).encode())
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv, environment, folder = request
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may have changed
    safe = sys.argv[0] == "-P"
    sys.argv = sys.argv[safe:]
    own = [] if safe else [str(Path(sys.argv[0]).parent)]
    known = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *known, *paths]
    util.spawnv_passfds = _fork
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        _end(end.code)
    _end(0)


def _fork(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do as multiprocessing's `spawnv_passfds`, without a new interpreter. Returns the process id."""
    at = arguments.index("-c") + 1
    if "forkserver" not in arguments[at] and "spawn_main" not in arguments[at]:  # the resource tracker
        return int(_spawn(path, arguments, descriptors))
    sys.stdout.flush()
    sys.stderr.flush()
    if (process := os.fork()) != 0:
        return process
    status: Any = 1
    try:
        gc.freeze()  # no object of the parent may close a descriptor
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for first, last in pairwise(sorted({0, 1, 2, *descriptors, os.sysconf("SC_OPEN_MAX")})):
            os.closerange(first + 1, last)
        atexit._clear()
        sys.argv = ["-c", *arguments[at + 1 :]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(arguments[at], main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _end(status)


def _end(status: Any) -> NoReturn:
    """End this process as Python does, but tear down no module: those of the imports take 0.6 s of CPU time."""
    if not isinstance(status, int | None):
        sys.stderr.write(f"{status}\n")
    with contextlib.suppress(Exception):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
