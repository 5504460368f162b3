"""The process that runs nginx on a listening socket, and ends together with it.

A separate process lets the supervisor monitor nginx like the others. If the supervisor is killed, nginx ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from native.files import TemporaryFolder
from programs.serve.nginx_config import NginxConfig
from rwkv_batch.ipc.process import LogStyle, become_child

logger = logging.getLogger("nginx")
_PR_SET_PDEATHSIG = 1


def nginx_process(
    config: NginxConfig, listener: socket.socket, style: LogStyle, name: str, supervisor: Connection
) -> None:
    """Main function of the process. "quit" lets nginx finish its answers; the supervisor's end ends it at once."""
    become_child(name, style)
    folder = TemporaryFolder("nginx")
    Path(folder.path).chmod(0o711)  # nginx started by root runs as another user, who needs access to these folders
    try:
        code = _run(config, listener, folder.path, supervisor)
    finally:
        folder.remove()
    sys.exit(code)


def _run(config: NginxConfig, listener: socket.socket, folder: str, supervisor: Connection) -> int:
    path = Path(folder, "nginx.conf")
    path.touch(mode=0o600)
    path.write_text(config.render(folder), encoding="utf-8")
    command = [config.program, "-p", folder, "-c", str(path), "-e", "stderr"]
    if (reason := _config_error(command)) is not None:
        supervisor.send(("failed", f"nginx cannot be started: {reason}"))
        return 1
    libc = ctypes.CDLL(None)

    def set_parent_death_signal() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        supervisor.send(("started", os.getpid()))  # reported before exec, so that a kill at any time leaves no process

    nginx = subprocess.Popen(
        command,
        pass_fds=[listener.fileno()],
        # nginx's own way to hand listening sockets to a new binary: it takes those whose addresses it is told to use.
        env={"NGINX": f"{listener.fileno()};", "PATH": os.environ.get("PATH", "")},
        process_group=0,
        preexec_fn=set_parent_death_signal,  # noqa: PLW1509  # no other thread runs yet
    )
    threading.Thread(target=_follow_supervisor, args=(nginx, supervisor), daemon=True).start()
    code = nginx.wait()
    _kill_group(nginx.pid)  # a master that was killed leaves its workers
    return 1 if code else 0


def _config_error(command: list[str]) -> str | None:
    """Returns nginx's message about a faulty configuration, or None."""
    tested = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True, check=False, timeout=30)
    return None if tested.returncode == 0 else (tested.stderr.strip() or "no reason given").replace("\n", "; ")


def _follow_supervisor(nginx: subprocess.Popen[bytes], supervisor: Connection) -> None:
    try:
        while supervisor.recv() != "quit":
            pass
        nginx.send_signal(signal.SIGQUIT)
        supervisor.recv()
    except (EOFError, OSError):
        _kill_group(nginx.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
